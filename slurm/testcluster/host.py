"""One container as seen from this host: enter it, cut its link, kill it.

Entering uses the container's namespaces (3 ms) instead of the engine (100 ms), because tests poll. Everything here
needs root on the host, directly or through sudo.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from muster.slurm.image.engine import Engine, EngineError, Outcome

# Sets the host's end of the container's link down or up. The container keeps its address and routes, as with a pulled
# cable: its packets are dropped without an error, and its peers receive nothing.
_SET_LINK_SCRIPT = """
index=$(cat /proc/$1/root/sys/class/net/eth0/iflink) || exit 1
file=$(grep -slx "$index" /sys/class/net/*/ifindex) # -s: links of other clusters come and go meanwhile
[ -n "$file" ] || { echo "no link of the host leads to process $1" >&2; exit 1; }
link=${file#/sys/class/net/}
exec ip link set dev "${link%/ifindex}" "$2"
"""

# Enters the freezer control group (version 1 or 2) of process $1, then its namespaces. So the command freezes together
# with the container.
_ENTER_SCRIPT = """
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
    """A container's first process. `started` (clock ticks since boot) distinguishes it from a later process with the
    same pid.
    """

    engine: Engine
    pid: int
    started: str

    @staticmethod
    def of(engine: Engine, pid: int) -> Process:
        """Returns the process `pid`. Raises `EngineError` if there is none."""
        started = start_time(pid)
        if pid <= 0 or started is None:
            raise EngineError(f"there is no process {pid}: the container is not running")
        return Process(engine, pid, started)

    @staticmethod
    def exists(pid: int) -> bool:
        """Whether a process `pid` exists and has not ended."""
        return start_time(pid) is not None

    @property
    def alive(self) -> bool:
        """Whether exactly this process still runs."""
        return start_time(self.pid) == self.started

    @property
    def proc_path(self) -> str:
        """The container's /proc, as a path on this host."""
        return f"/proc/{self.pid}/root/proc"

    def enter_argv(self, user: str, *command: str) -> list[str]:
        """The command line on this host that runs `command` inside as `user`, in that user's home folder."""
        home = "/root" if user == "root" else f"/shared/home/{user}"
        become = () if user == "root" else ("setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups")
        environment = (*_ENVIRONMENT, f"HOME={home}", f"USER={user}", f"LOGNAME={user}")
        enter = ("sh", "-c", _ENTER_SCRIPT, "enter", str(self.pid), *become, "env", "-i", "-C", home, *environment)
        return self.engine.host_argv(*enter, *command)

    def enter(self, user: str, *command: str, stdin: bytes | None = None, timeout: float = 60.0) -> Outcome:
        """Runs `command` inside as `user` until it ends. `timeout` is in seconds."""
        done = self.engine.host_call(self.enter_argv(user, *command), stdin=stdin, timeout=timeout)
        return dataclasses.replace(
            done, argv=command
        )  # errors show the command without the prefix that enters the container

    def cut_link(self) -> float:
        """Cuts the network link. Returns the wall-clock time of the cut."""
        return self._link("down")

    def restore_link(self) -> float:
        """Restores the network link. Returns the wall-clock time at which it was up."""
        return self._link("up")

    def kill(self) -> float:
        """Sends SIGKILL to all processes of the container and waits until they have ended. Returns the wall-clock time
        just before.
        """
        at = time.time()
        self.engine.kill(self.pid).checked()
        # The kernel ends the other processes before the first one. This takes milliseconds, unless they are frozen.
        while self.alive and time.time() - at < 5:
            time.sleep(0.001)
        return at

    def _link(self, state: str) -> float:
        self.engine.host("sh", "-c", _SET_LINK_SCRIPT, "link", str(self.pid), state).checked()
        return time.time()


def start_time(pid: int) -> str | None:
    """When a process started (clock ticks since boot). None: there is none, or it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as handle:
            fields = handle.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]
