"""One container seen from the host: entering it, cutting its link, killing it.

Entering goes through the container's namespaces (3 ms) and not through the engine (100 ms): tests poll.
All of it needs root on the host, directly or through sudo.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from muster.slurm.image.engine import Engine, EngineError, Outcome

# The host's end of the container's link goes down or up. The container keeps its address and routes, as with
# a pulled cable: what it sends is dropped without an error, and its peers hear nothing at all.
_LINK = """
index=$(cat /proc/$1/root/sys/class/net/eth0/iflink) || exit 1
file=$(grep -slx "$index" /sys/class/net/*/ifindex) # -s: links of other clusters come and go meanwhile
[ -n "$file" ] || { echo "no link of the host leads to process $1" >&2; exit 1; }
link=${file#/sys/class/net/}
exec ip link set dev "${link%/ifindex}" "$2"
"""

# Enters the namespaces of process $1 and, before that, its freezer's control group (version 1 or 2): what runs in
# a container stands still with it.
_ENTER = """
while IFS=: read -r _ controller path; do
    case $controller in
    freezer) group=/sys/fs/cgroup/freezer$path ;;
    "") group=/sys/fs/cgroup$path ;;
    *) continue ;;
    esac
    [ ! -w "$group/cgroup.procs" ] || echo $$ >"$group/cgroup.procs"
done </proc/$1/cgroup
pid=$1
shift
exec nsenter -t "$pid" -a -- "$@"
"""

_ENVIRONMENT = (
    "PATH=/opt/muster/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "USE_LIBUV=0",
    "LANG=C.UTF-8",
)


@dataclass(frozen=True)
class Process:
    """A container's first process on the host; `started` (clock ticks since boot) tells a reused pid apart."""

    engine: Engine
    pid: int
    started: str

    @staticmethod
    def of(engine: Engine, pid: int) -> Process:
        """The process `pid` as it is now; raises `EngineError` when there is none."""
        started = _start_time(pid)
        if pid <= 0 or started is None:
            raise EngineError(f"there is no process {pid}: the container is not running")
        return Process(engine, pid, started)

    @staticmethod
    def exists(pid: int) -> bool:
        """Whether there is a process `pid` that has not ended."""
        return _start_time(pid) is not None

    @property
    def alive(self) -> bool:
        """Whether this very process still runs."""
        return _start_time(self.pid) == self.started

    @property
    def proc(self) -> str:
        """The container's own /proc, as a path of the host's."""
        return f"/proc/{self.pid}/root/proc"

    def enter_argv(self, user: str, *command: str) -> list[str]:
        """The host's command line that runs `command` inside as `user`, in that user's home."""
        home = "/root" if user == "root" else f"/shared/home/{user}"
        become = () if user == "root" else ("setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups")
        environment = (*_ENVIRONMENT, f"HOME={home}", f"USER={user}", f"LOGNAME={user}")
        enter = ("sh", "-c", _ENTER, "enter", str(self.pid), *become, "env", "-i", "-C", home, *environment)
        return self.engine.host_argv(*enter, *command)

    def enter(self, user: str, *command: str, stdin: bytes | None = None, timeout: float = 60.0) -> Outcome:
        """Run `command` inside as `user` to its end; `timeout` in seconds."""
        done = self.engine.host_call(self.enter_argv(user, *command), stdin=stdin, timeout=timeout)
        return dataclasses.replace(done, argv=command)  # errors name the command, not the way in

    def cut_link(self) -> float:
        """Cut the network link; the wall-clock time at which it was cut."""
        return self._link("down")

    def mend_link(self) -> float:
        """Put the link back; the wall-clock time at which it was up."""
        return self._link("up")

    def kill(self) -> float:
        """SIGKILL to every process of the container, and wait for their end; the wall-clock time just before it."""
        at = time.time()
        self.engine.kill(self.pid).checked()
        # The kernel ends the others before the first one: a matter of milliseconds, unless they are frozen.
        while self.alive and time.time() - at < 5:
            time.sleep(0.001)
        return at

    def _link(self, state: str) -> float:
        self.engine.host("sh", "-c", _LINK, "link", str(self.pid), state).checked()
        return time.time()


def _start_time(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/stat") as handle:
            fields = handle.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]
