"""A running test cluster: commands inside it, its faults, and its repair.

Faults and what the peers of the node see of them:

===========  =====================================================  ===========================
`crash`      SIGKILL to all its processes                           connections end at once
`power_off`  the link is cut, then SIGKILL                          nothing at all
`partition`  the link is cut, the processes run on                  nothing at all
`pause`      the processes stand still, the kernel answers          acknowledgements, no words
===========  =====================================================  ===========================

Every fault returns the wall-clock time (`time.time()`) at which it took effect.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from muster.slurm.cluster.host import Process
from muster.slurm.cluster.registry import clusters_dir, container_name, remove_cluster
from muster.slurm.cluster.spec import CONTROLLER, KMSG, LOGIN, USERS, ClusterSpec
from muster.slurm.cluster.waiting import wait_until
from muster.slurm.image.engine import Engine, EngineError, Outcome, find_engine

COORDINATOR = "muster-coordinator"
_FREEZE_S = 20.0

# Ends service $2 with signal $1, and waits until it is gone; $3 = hold keeps it from being started again.
_STOP = """
cd /run/cluster
[ "$3" != hold ] || : >"$2.hold"
pid=$(cat "$2.pid" 2>/dev/null) || exit 0
kill "-$1" "$pid" 2>/dev/null
while kill -0 "$pid" 2>/dev/null; do sleep 0.02; done
"""


class Cluster:
    """The cluster `name` on this host. Make one with `up` or `attach`."""

    def __init__(self, engine: Engine, name: str, spec: ClusterSpec, subnet: str) -> None:
        self.engine, self.name, self.spec, self.subnet = engine, name, spec, subnet
        self._processes: dict[str, Process] = {}
        self._touched: set[str] = set()  # hosts that something was done to since `mend`

    @staticmethod
    def up(spec: ClusterSpec | None = None, name: str | None = None, by_hand: bool = False) -> Cluster:
        """Start a cluster and wait until every node is IDLE; see `muster.slurm.cluster.start.start`."""
        from muster.slurm.cluster.start import start

        return start(spec or ClusterSpec(), name, by_hand=by_hand)

    @staticmethod
    def attach(name: str, engine: Engine | None = None) -> Cluster:
        """The running cluster `name`; `EngineError` naming those that there are when there is none."""
        path = clusters_dir() / name / "cluster.json"
        if not path.exists():
            there = ", ".join(sorted(p.parent.name for p in clusters_dir().glob("*/cluster.json"))) or "none"
            raise EngineError(f"there is no cluster {name!r} (there: {there}); start one with `make cluster-up`")
        saved = json.loads(path.read_text())
        if "spec" not in saved:
            raise EngineError(f"the cluster {name!r} is still starting (or its start was killed: take it down)")
        return Cluster(engine or find_engine(), name, ClusterSpec.from_json(saved["spec"]), saved["subnet"])

    def down(self) -> None:
        """Remove exactly what this cluster created."""
        self._processes.clear()
        remove_cluster(self.engine, self.name)

    def __enter__(self) -> Cluster:
        """The cluster itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Tear down, whatever happened."""
        self.down()

    # What is there

    @property
    def nodes(self) -> list[str]:
        """The compute nodes' names."""
        return self.spec.node_names

    @property
    def folder(self) -> Path:
        """The cluster's folder on this host."""
        return clusters_dir() / self.name

    @property
    def shared(self) -> Path:
        """/shared of every container, seen from this host."""
        return self.folder / "shared"

    def address(self, host: str) -> str:
        """The fixed address of `host` on the cluster's own network."""
        return self.spec.address(host, self.subnet)

    def is_running(self, host: str) -> bool:
        """Whether the container runs (a paused one does)."""
        return self._status(host) in ("running", "paused")

    def proc(self, host: str) -> str:
        """The /proc of `host`, as a path of this machine's (for root); empty where `host` is down."""
        known = self._processes.get(host)
        if known is None or not known.alive:
            return self._process(host).proc if self._lives(host) else ""
        return known.proc

    # Commands inside

    def exec(
        self,
        host: str,
        *command: str,
        user: str = "root",
        stdin: bytes | None = None,
        timeout: float = 60.0,
        check: bool = True,
    ) -> Outcome:
        """Run `command` on `host` as `user`; with `check` a non-zero exit raises `EngineError`."""
        outcome = self._process(host).enter(user, *command, stdin=stdin, timeout=timeout)
        if check:
            outcome.checked()
        return outcome

    def sh(self, host: str, script: str, user: str = "root", timeout: float = 60.0) -> str:
        """The output of a shell script run on `host` as `user`; raises `EngineError` when it fails."""
        return self.exec(host, "bash", "-c", script, user=user, timeout=timeout).stdout.strip()

    def exec_argv(self, host: str, *command: str, user: str = "root") -> list[str]:
        """The host's command line that runs `command` on `host`, for callers that keep the process."""
        return self._process(host).enter_argv(user, *command)

    def popen(self, host: str, *command: str, user: str = "root") -> subprocess.Popen[str]:
        """Start `command` on `host`, its output (both streams) on a pipe; end it with `hang_up`."""
        return subprocess.Popen(
            self.exec_argv(host, *command, user=user),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def hang_up(self, process: subprocess.Popen[str]) -> str:
        """Kill what `popen` started, with its children; the output that was not read yet."""
        self.kill(process)
        return process.communicate(timeout=20)[0]

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Kill what `popen` started, with its children, and leave its output to whoever reads it."""
        # nsenter forks: killing it alone would leave the command running.
        self.engine.kill(-process.pid)

    def logs(self, host: str, service: str = "*") -> str:
        """The log files of `host` (of one service, or of all of them one after another)."""
        return self.sh(host, f"cd /var/log/muster && tail -n +1 {service}.log 2>/dev/null || true")

    # Faults

    def power_off(self, node: str) -> float:
        """Cut the link, then kill: the peers hear nothing."""
        process = self._touch(node)
        at = process.cut_link()
        process.kill()
        return at

    def crash(self, node: str) -> float:
        """Kill every process: the peers' connections end at once."""
        return self._touch(node).kill()

    def partition(self, node: str) -> float:
        """Cut the link: the node's processes run on, and nobody hears anything."""
        return self._touch(node).cut_link()

    def heal(self, node: str) -> float:
        """Put the link back."""
        return self._process(node).mend_link()

    def pause(self, node: str) -> float:
        """Freeze every process of the node; its kernel goes on answering."""
        self._touch(node)
        # The kernel can't freeze a process that is just being made: the engine gives up after a while, and thaws all.
        pause = ("pause", container_name(self.name, node))
        wait_until(lambda: self.engine.call(*pause).rc == 0, _FREEZE_S, f"{node} stands still")
        return time.time()

    def unpause(self, node: str) -> float:
        """Let a paused node's processes go on."""
        self.engine.call("unpause", container_name(self.name, node)).checked()
        return time.time()

    def kmsg(self, node: str, line: str) -> float:
        """Append a line to the node's kernel log, as a record of /dev/kmsg unless it is one already."""
        if not re.match(r"\d+,\d+,\d+,", line):
            now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            line = f"3,{now},{now},-;{line}"
        # The stamp is taken inside, with the line in hand: getting there takes longer than the write.
        write = f'line=$(cat); date +%s.%N; printf "%s\\n" "$line" >>{KMSG}'
        said = self.exec(node, "sh", "-c", write, stdin=line.encode()).stdout
        return float(said)

    # Services

    def stop_service(self, host: str, service: str, signal: str = "TERM") -> float:
        """End a service and keep it down until `start_service`."""
        self._touch(host)
        return self._stop(host, service, signal, "hold")

    def start_service(self, host: str, service: str) -> None:
        """Let a stopped service start again (within 0.2 s)."""
        self.exec(host, "rm", "-f", f"/run/cluster/{service}.hold")

    def restart_service(self, host: str, service: str, signal: str = "TERM") -> float:
        """End a service; its supervisor starts it again within 0.2 s."""
        return self._stop(host, service, signal, "again")

    def restart_slurmctld(self) -> None:
        """Restart slurmctld and wait until it answers."""
        self.restart_service(CONTROLLER, "slurmctld")
        wait_until(self._slurmctld_answers, 30, "slurmctld answers after its restart")

    def restart_slurmd(self, node: str) -> None:
        """Restart slurmd on `node`; it registers with slurmctld anew."""
        self.restart_service(node, "slurmd")

    def freeze_service(self, host: str, service: str) -> None:
        """Let a service stand still (SIGSTOP); the rest of the host goes on."""
        self._signal(host, service, "STOP")

    def thaw_service(self, host: str, service: str) -> None:
        """Let a service that stands still go on."""
        self._signal(host, service, "CONT")

    def kill_coordinator(self, host: str = CONTROLLER) -> float:
        """SIGKILL to the coordinator; it stays down until `start_service`."""
        return self.stop_service(host, COORDINATOR, "KILL")

    def restart_coordinator(self, signal: str = "KILL", host: str = CONTROLLER) -> float:
        """End the coordinator; it is started again at once."""
        return self.restart_service(host, COORDINATOR, signal)

    def reconfigure(self, spec: ClusterSpec) -> None:
        """Put other Slurm settings in force on a running cluster (the nodes stay as they are)."""
        self.spec = spec
        for name, text in spec.files().items():
            (self.folder / "slurm" / name).write_text(text)
        self.exec(CONTROLLER, "scontrol", "reconfigure")
        wait_until(self._slurmctld_answers, 30, "slurmctld answers after reconfiguring")

    # Bringing back

    def start_node(self, node: str) -> None:
        """Start a container that was crashed or powered off: a boot, with the same address and disk."""
        name = container_name(self.name, node)
        if self._status(node) != "exited":  # podman forgets exit codes after 5 minutes, and `wait` then fails
            self.engine.call("wait", name).checked()
        self.engine.call("start", name).checked()

    def restart(self, node: str) -> None:
        """Reboot a node at once, and wait until it is IDLE (or at work) in Slurm."""
        if self.is_running(node):
            self.crash(node)
        self.repair(node)

    def repair(self, *nodes: str) -> None:
        """Undo whatever was done to the nodes, and wait until Slurm can use them."""
        for node in nodes:
            if self._status(node) == "paused":
                self.unpause(node)
            elif not self._lives(node):
                self.start_node(node)
            self.heal(node)
            self.exec(node, "sh", "-c", "rm -f /run/cluster/*.hold")
        for node in nodes:
            self._resume(node)

    def node_states(self) -> dict[str, str]:
        """Slurm's state of each node, as `sinfo` names it (``idle``, ``down*``, ``drained`` ...)."""
        lines = self.exec(CONTROLLER, "sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").stdout.splitlines()
        return dict(line.split() for line in lines)

    def broken_nodes(self) -> list[str]:
        """The nodes that Slurm can't start a job on now or after a running one."""
        usable = {"idle", "allocated", "mixed", "completing", "allocated+"}
        return [node for node, state in self.node_states().items() if state not in usable]

    def mend(self) -> None:
        """Make the cluster as good as new between tests: no job, every service up, every node usable."""
        self.exec(CONTROLLER, "sh", "-c", "squeue -h -o %A | xargs -r scancel", check=False)
        for host in self._touched - set(self.nodes):
            self.exec(host, "sh", "-c", "rm -f /run/cluster/*.hold")
        wait_until(self._slurmctld_answers, 30, "slurmctld answers")
        nodes = sorted({*(self._touched & set(self.nodes)), *self.broken_nodes()})
        self.repair(*nodes)
        self._touched.clear()
        # Where a node of a step has died, slurmstepd waits a minute for the children of its tree; and on a node that
        # Slurm had taken from a job it looks for what is left only when slurmd starts.
        left = "pkill -KILL -u {}; pkill -KILL slurmstepd".format(",".join(USERS))
        for node in {*nodes, *self._queued_nodes()}:
            self.exec(node, "sh", "-c", left, check=False)
        wait_until(lambda: not self._queue(), 30, "no job is left in the queue")

    # Inside

    def _queue(self) -> str:
        return self.exec(CONTROLLER, "squeue", "-h", "-o", "%i %T %N").stdout.strip()

    def _queued_nodes(self) -> list[str]:
        return self.sh(CONTROLLER, "squeue -h -o %N | xargs -r scontrol show hostnames").split()

    def _slurmctld_answers(self) -> bool:
        return self.exec(CONTROLLER, "sinfo", "-h", check=False).rc == 0

    def _resume(self, node: str) -> None:
        began = time.monotonic()
        kicked = False

        def usable() -> bool:
            nonlocal kicked
            state = self.node_states()[node]
            if node not in self.broken_nodes():
                return True
            for wanted in [s for s, mark in (("undrain", "drain"), ("resume", "down")) if mark in state]:
                self.exec(CONTROLLER, "scontrol", "update", f"nodename={node}", f"state={wanted}", check=False)
            if not kicked and time.monotonic() - began > 2:
                kicked = True
                self.restart_slurmd(node)  # it registers at once; slurmctld's own ping would take longer
            return False

        wait_until(usable, 40, f"{node} is usable in Slurm again", every=0.1)

    def _touch(self, host: str) -> Process:
        process = self._process(host)
        self._touched.add(host)
        return process

    def _stop(self, host: str, service: str, signal: str, how: str) -> float:
        at = time.time()
        self.exec(host, "sh", "-c", _STOP, "stop", signal, service, how)
        return at

    def _signal(self, host: str, service: str, signal: str) -> None:
        self.exec(host, "sh", "-c", f"kill -{signal} $(cat /run/cluster/{service}.pid)", check=False)

    def _process(self, host: str) -> Process:
        if host not in self.spec.hosts:
            raise EngineError(f"there is no host {host!r} in this cluster; it has {', '.join(self.spec.hosts)}")
        known = self._processes.get(host)
        if known is None or not known.alive:
            known = Process.of(self.engine, int(self._inspect(host, "{{.State.Pid}}")))
            self._processes[host] = known
        return known

    def _status(self, host: str) -> str:
        # The engines disagree on whether a paused container counts as running; on this word they agree.
        return self._inspect(host, "{{.State.Status}}")

    def _lives(self, host: str) -> bool:
        # The engine needs a moment to see that a container has died.
        pid = int(self._inspect(host, "{{.State.Pid}}"))
        return pid > 0 and Process.exists(pid)

    def _inspect(self, host: str, form: str) -> str:
        name = container_name(self.name, host)
        return self.engine.call("container", "inspect", "--format", form, name).checked().strip()


__all__: Sequence[str] = ("CONTROLLER", "COORDINATOR", "LOGIN", "Cluster")
