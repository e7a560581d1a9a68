"""A running test cluster: commands inside it, its faults, and its repair.

Faults, and what the peers of the node see:

===========  =====================================================  ===========================
`crash`      SIGKILL to all processes                               connections end at once
`power_off`  the link is cut, then SIGKILL                          nothing
`partition`  the link is cut, the processes continue                nothing
`pause`      all processes are frozen, the kernel answers           TCP acknowledgements, no data
===========  =====================================================  ===========================

Every fault method returns the wall-clock time (`time.time()`) at which the fault took effect.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from muster.slurm.image.engine import Engine, EngineError, Outcome, find_engine
from muster.slurm.image.nvml_stand_in import healthy_gpu
from muster.slurm.testcluster.hardware.faults import (
    HOST_ROOT,
    THROTTLING,
    mend_adapter_and_memory,
    mend_gpus,
    read_gpus,
    set_link,
    set_memory_error,
    with_memory_error,
    write_gpus,
)
from muster.slurm.testcluster.hardware.pretended_host import PretendedHost, tar_of
from muster.slurm.testcluster.hardware.slow_rank import slow_rank, speed_up_ranks
from muster.slurm.testcluster.host import Process
from muster.slurm.testcluster.registry import clusters_dir, container_name, remove_cluster
from muster.slurm.testcluster.spec import CONTROLLER, KMSG, LOGIN, USERS, ClusterSpec
from muster.slurm.testcluster.waiting import wait_until

_NO_COORDINATOR = 69
"""Exit status of `muster`: the coordinator does not answer."""
_QUEUED = "may have been queued"
"""What `muster submit` says if sbatch has not answered: to call it again could queue a second job."""

COORDINATOR = "muster-coordinator"
_PAUSE_TIMEOUT_S = 20.0
"""Seconds in which the pause of a container is retried."""

# Stops service $2 with signal $1, and waits until it has exited. $3 = hold prevents its restart.
_STOP_SERVICE_SCRIPT = """
cd /run/cluster
[ "$3" != hold ] || : >"$2.hold"
pid=$(cat "$2.pid" 2>/dev/null) || exit 0
kill "-$1" "$pid" 2>/dev/null
while kill -0 "$pid" 2>/dev/null; do sleep 0.02; done
"""


class Cluster:
    """The cluster `name` on this host. Create one with `up` or `attach`."""

    def __init__(self, engine: Engine, name: str, spec: ClusterSpec, subnet: str) -> None:
        self.engine, self.name, self.spec, self.subnet = engine, name, spec, subnet
        self._processes: dict[str, Process] = {}
        self._touched: set[str] = set()  # hosts that were changed since the last `restore_all`

    @staticmethod
    def up(spec: ClusterSpec | None = None, name: str | None = None, by_hand: bool = False) -> Cluster:
        """Starts a cluster and waits until every node is IDLE; see `muster.slurm.testcluster.start.start`."""
        from muster.slurm.testcluster.start import start

        return start(spec or ClusterSpec(), name, by_hand=by_hand)

    @staticmethod
    def attach(name: str, engine: Engine | None = None) -> Cluster:
        """Returns the running cluster `name`.

        Raises:
            EngineError: there is no such cluster; the message lists the existing clusters.
        """
        path = clusters_dir() / name / "cluster.json"
        if not path.exists():
            existing = ", ".join(sorted(p.parent.name for p in clusters_dir().glob("*/cluster.json"))) or "none"
            raise EngineError(f"there is no cluster {name!r} (existing: {existing}); start one with `make cluster-up`")
        saved = json.loads(path.read_text())
        if "spec" not in saved:
            raise EngineError(
                f"the cluster {name!r} is still starting (if its start was killed, remove it with `make cluster-down`)"
            )
        return Cluster(engine or find_engine(), name, ClusterSpec.from_json(saved["spec"]), saved["subnet"])

    def down(self) -> None:
        """Removes exactly what this cluster created."""
        self._processes.clear()
        remove_cluster(self.engine, self.name)

    def __enter__(self) -> Cluster:
        """Returns the cluster itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the cluster, also after an error."""
        self.down()

    # Names and paths

    @property
    def nodes(self) -> list[str]:
        """The names of the compute nodes."""
        return self.spec.node_names

    @property
    def folder(self) -> Path:
        """The cluster's folder on this host."""
        return clusters_dir() / self.name

    @property
    def shared(self) -> Path:
        """The folder /shared of all containers, as seen from this host."""
        return self.folder / "shared"

    def address(self, host: str) -> str:
        """The fixed address of `host` in the cluster's own network."""
        return self.spec.address(host, self.subnet)

    def is_running(self, host: str) -> bool:
        """Whether the container runs. A paused container counts as running."""
        return self._status(host) in ("running", "paused")

    def proc_path(self, host: str) -> str:
        """The /proc of `host` as a path on this host (readable by root); "" if `host` is down."""
        known = self._processes.get(host)
        if known is None or not known.alive:
            return self._process(host).proc_path if self._lives(host) else ""
        return known.proc_path

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
        """Runs `command` on `host` as `user`. With `check`, a non-zero exit status raises `EngineError`."""
        outcome = self._process(host).enter(user, *command, stdin=stdin, timeout=timeout)
        if check:
            outcome.checked()
        return outcome

    def muster(self, host: str, *words: str, user: str = "root") -> str:
        """Runs a command of `muster` that succeeds, and returns its output. See `muster_answer`."""
        return self.muster_answer(host, *words, user=user).stdout

    def muster_answer(self, host: str, *words: str, user: str = "root") -> Outcome:
        """Runs a command of `muster` that succeeds. On a busy machine it may find no coordinator within its time (69),
        and is called again for a while, unless it may have queued a job. Raises `EngineError` if it fails otherwise.
        """

        def answer() -> Outcome | None:
            done = self.exec(host, "muster", *words, user=user, check=False)
            return None if done.rc == _NO_COORDINATOR and _QUEUED not in done.stderr else done

        answered = wait_until(answer, 60, f"muster {words[0]} finds the coordinator")
        assert answered is not None
        answered.checked()
        return answered

    def sh(self, host: str, script: str, user: str = "root") -> str:
        """Runs a shell script on `host` as `user` and returns its output. Raises `EngineError` if the script fails."""
        return self.exec(host, "bash", "-c", script, user=user).stdout.strip()

    def exec_argv(self, host: str, *command: str, user: str = "root") -> list[str]:
        """The command line on this host that runs `command` on `host`, for callers that keep the process."""
        return self._process(host).enter_argv(user, *command)

    def network_argv(self, host: str, *command: str) -> list[str]:
        """The command line that runs a program of this host, with its files, in the network of `host`. What this host
        sends into the cluster's network itself may be redirected by what else it runs.
        """
        return self.engine.host_argv("nsenter", "-t", str(self._process(host).pid), "-n", *command)

    def popen(self, host: str, *command: str, user: str = "root") -> subprocess.Popen[str]:
        """Starts `command` on `host`, with both output streams on one pipe. End it with `kill_and_read`."""
        return subprocess.Popen(
            self.exec_argv(host, *command, user=user),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def kill_and_read(self, process: subprocess.Popen[str]) -> str:
        """Kills a process of `popen` and its children. Returns the output that was not read yet."""
        self.kill(process)
        return process.communicate(timeout=20)[0]

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Kills a process of `popen` and its children, and leaves the output to its reader."""
        # nsenter forks: the command would survive the kill of nsenter alone.
        self.engine.kill(-process.pid)

    def logs(self, host: str, service: str = "*") -> str:
        """The log files of `host`: of one service, or of all services one after another."""
        return self.sh(host, f"cd /var/log/muster && tail -n +1 {service}.log 2>/dev/null || true")

    # Faults

    def power_off(self, node: str) -> float:
        """Cuts the link, then kills all processes: the peers receive nothing."""
        process = self._touch(node)
        at = process.cut_link()
        process.kill()
        return at

    def crash(self, node: str) -> float:
        """Kills all processes: the peers' connections end at once."""
        return self._touch(node).kill()

    def partition(self, node: str) -> float:
        """Cuts the link: the node's processes continue, and no message passes."""
        return self._touch(node).cut_link()

    def heal(self, node: str) -> float:
        """Restores the link."""
        return self._process(node).restore_link()

    def pause(self, node: str) -> float:
        """Freezes all processes of the node. Its kernel still answers."""
        self._touch(node)
        # The kernel can't freeze a process during its creation. The engine then gives up and thaws all processes.
        pause = ("pause", container_name(self.name, node))
        wait_until(lambda: self.engine.call(*pause).rc == 0, _PAUSE_TIMEOUT_S, f"{node} is frozen")
        return time.time()

    def unpause(self, node: str) -> float:
        """Resumes the processes of a paused node."""
        self.engine.call("unpause", container_name(self.name, node)).checked()
        return time.time()

    def kmsg(self, node: str, line: str) -> float:
        """Appends a line to the node's kernel log. A plain line becomes a record of /dev/kmsg.

        NVIDIA's driver gives its messages no level, and flags each of them as a continuation.
        """
        if not re.match(r"\d+,\d+,\d+,", line):
            now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            level_and_flag = (4, "c") if line.startswith("NVRM: ") else (3, "-")
            line = "{0},{2},{2},{1};{3}".format(*level_and_flag, now, line)
        # The time is taken inside the container, just before the write: entering takes longer than the write.
        write = f'line=$(cat); date +%s.%N; printf "%s\\n" "$line" >>{KMSG}'
        timestamp = self.exec(node, "sh", "-c", write, stdin=line.encode()).stdout
        return float(timestamp)

    def throttle(self, node: str, gpu: int, clear: bool = False) -> float:
        """Lets GPU number `gpu` of the node report that its hardware slows it down for heat; `clear`: it is well again.

        The node then has as many GPUs as its Slurm GRES says, and at least this one.
        """
        self._touch(node)
        file = read_gpus(self, node, max(self.spec.gpus, gpu + 1))
        file.gpus[gpu] = healthy_gpu(gpu) if clear else healthy_gpu(gpu) | THROTTLING
        return write_gpus(self, node, file)

    def gpu_ecc(self, node: str, gpu: int, clear: bool = False) -> float:
        """Lets GPU number `gpu` of the node report one more uncorrected memory error; `clear`: it is well again.

        A daemon that sees the GPU for the first time takes the error for an old one, and sees only the pending remap.
        """
        self._touch(node)
        file = read_gpus(self, node, max(self.spec.gpus, gpu + 1))
        file.gpus[gpu] = healthy_gpu(gpu) if clear else with_memory_error(file.gpus[gpu])
        return write_gpus(self, node, file)

    def give_hardware(self, node: str, host: PretendedHost) -> float:
        """Lets the node have these sockets, GPUs and network adapters, besides the adapter that each node has.

        The boot of a node, and its repair, take the files of /sys away. The GPUs stay.
        """
        self._touch(node)
        read_gpus(self, node, 0)  # it fails where the image has no stand-in for NVIDIA's library
        self.exec(node, "tar", "-x", "-C", HOST_ROOT, stdin=tar_of(host.files()))
        return write_gpus(self, node, host.control_file())

    def link_down(self, node: str, clear: bool = False) -> float:
        """Lets the link of the node's InfiniBand port go down; `clear`: it is up again."""
        self._touch(node)
        return set_link(self, node, up=clear)

    def memory_error(self, node: str, clear: bool = False) -> float:
        """Lets the node's memory have one more uncorrectable error; `clear`: as after a reboot, it had none."""
        self._touch(node)
        return set_memory_error(self, node, clear=clear)

    def slow_rank(self, node: str, rank: int, clear: bool = False) -> None:
        """Lets a rank of any job on the node compute at 30 % of its speed; `clear`: at its own speed again."""
        self._touch(node)
        slow_rank(self, node, rank, clear=clear)

    # Services

    def stop_service(self, host: str, service: str, signal: str = "TERM") -> float:
        """Stops a service until `start_service`."""
        self._touch(host)
        return self._stop(host, service, signal, "hold")

    def start_service(self, host: str, service: str) -> None:
        """Allows a stopped service to start again (within 0.2 s)."""
        self.exec(host, "rm", "-f", f"/run/cluster/{service}.hold")

    def restart_service(self, host: str, service: str, signal: str = "TERM") -> float:
        """Stops a service. Its supervisor starts it again within 0.2 s."""
        return self._stop(host, service, signal, "again")

    def restart_slurmctld(self) -> None:
        """Restarts slurmctld and waits until it answers."""
        self.restart_service(CONTROLLER, "slurmctld")
        wait_until(self._slurmctld_answers, 30, "slurmctld answers after its restart")

    def restart_slurmd(self, node: str) -> None:
        """Restarts slurmd on `node`. It registers with slurmctld again."""
        self.restart_service(node, "slurmd")

    def freeze_coordinator(self, host: str) -> None:
        """Freezes the coordinator (SIGSTOP). The rest of the host continues."""
        self._signal(host, COORDINATOR, "STOP")

    def thaw_coordinator(self, host: str) -> None:
        """Resumes a frozen coordinator."""
        self._signal(host, COORDINATOR, "CONT")

    def kill_coordinator(self, host: str = CONTROLLER) -> float:
        """Sends SIGKILL to the coordinator. It remains down until `start_service`."""
        return self.stop_service(host, COORDINATOR, "KILL")

    def restart_coordinator(self, signal: str = "KILL", host: str = CONTROLLER) -> float:
        """Stops the coordinator. Its supervisor starts it again at once."""
        return self.restart_service(host, COORDINATOR, signal)

    def reconfigure(self, spec: ClusterSpec | None = None, **changes: Any) -> None:
        """Applies other Slurm settings to the running cluster: `spec`, with `changes`. The nodes do not change."""
        self.spec = replace(spec or self.spec, **changes)
        for name, text in self.spec.files().items():
            (self.folder / "slurm" / name).write_text(text)
        self.exec(CONTROLLER, "scontrol", "reconfigure")
        wait_until(self._slurmctld_answers, 30, "slurmctld answers after reconfiguring")

    def set_program(self, setting: str, text: str) -> None:
        """Lets Slurm call a program with this text, as its `setting` says: a Prolog or a TaskProlog."""
        program = self.folder / "slurm" / f"{setting}.sh"
        program.write_text(text)
        program.chmod(0o755)
        self.reconfigure(extra=(*self.spec.extra, f"{setting}=/etc/slurm/{setting}.sh"))

    # Repair

    def start_node(self, node: str) -> None:
        """Starts a container that was crashed or powered off: a boot with the same address and disk."""
        name = container_name(self.name, node)
        if self._status(node) != "exited":  # podman forgets exit codes after 5 minutes, and `wait` then fails
            self.engine.call("wait", name).checked()
        self.engine.call("start", name).checked()

    def restart(self, node: str) -> None:
        """Reboots a node at once, and waits until it is IDLE or allocated in Slurm."""
        if self.is_running(node):
            self.crash(node)
        self.repair(node)

    def repair(self, *nodes: str) -> None:
        """Undoes all faults of the nodes, and waits until Slurm can use them."""
        for node in nodes:
            if self._status(node) == "paused":
                self.unpause(node)
            elif not self._lives(node):
                self.start_node(node)
            self.heal(node)
            self.exec(node, "sh", "-c", "rm -f /run/cluster/*.hold")
            mend_gpus(self, node)
            what = f"{node} has the files of a healthy host"
            wait_until(partial(mend_adapter_and_memory, self, node), 10, what)
            speed_up_ranks(self, node)
        for node in nodes:
            self._resume(node)

    def node_states(self) -> dict[str, str]:
        """Slurm's state of each node, as `sinfo` prints it (``idle``, ``down*``, ``drained`` ...)."""
        lines = self.exec(CONTROLLER, "sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").stdout.splitlines()
        return dict(line.split() for line in lines)

    def broken_nodes(self) -> list[str]:
        """The nodes on which Slurm can start no job, now or after the running one."""
        usable = {"idle", "allocated", "mixed", "completing", "allocated+"}
        return [node for node, state in self.node_states().items() if state not in usable]

    def restore_all(self) -> None:
        """Restores the whole cluster between tests: no job, all services running, all nodes usable."""
        self.exec(CONTROLLER, "sh", "-c", "squeue -h -o %A | xargs -r scancel", check=False)
        for host in self._touched - set(self.nodes):
            self.exec(host, "sh", "-c", "rm -f /run/cluster/*.hold")
        wait_until(self._slurmctld_answers, 30, "slurmctld answers")
        nodes = sorted({*(self._touched & set(self.nodes)), *self.broken_nodes()})
        self.repair(*nodes)
        self._touched.clear()
        # After a node of a step has died, slurmstepd waits a minute for its child steps. On a node that was
        # removed from a job, Slurm looks for remaining processes only when slurmd starts.
        left = "pkill -KILL -u {}; pkill -KILL slurmstepd".format(",".join(USERS))
        for node in {*nodes, *self._queued_nodes()}:
            self.exec(node, "sh", "-c", left, check=False)
        wait_until(lambda: not self._queue(), 30, "no job is left in the queue")

    # Inside

    def _queue(self) -> str:
        return self.exec(CONTROLLER, "squeue", "-h", "-o", "%i %T %N").stdout.strip()

    def _queued_nodes(self) -> list[str]:
        # One expression for all jobs: scontrol takes no second one. A job that waits has no nodes.
        return self.sh(CONTROLLER, "squeue -h -o %N | grep . | paste -sd, - | xargs -r scontrol show hostnames").split()

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
                self.restart_slurmd(node)  # slurmd registers at once; slurmctld's ping takes longer
            return False

        wait_until(usable, 40, f"{node} is usable in Slurm again", every=0.1)

    def _touch(self, host: str) -> Process:
        process = self._process(host)
        self._touched.add(host)
        return process

    def _stop(self, host: str, service: str, signal: str, how: str) -> float:
        at = time.time()
        self.exec(host, "sh", "-c", _STOP_SERVICE_SCRIPT, "stop", signal, service, how)
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
        # The engines disagree whether a paused container is running. They agree on the field Status.
        return self._inspect(host, "{{.State.Status}}")

    def _lives(self, host: str) -> bool:
        # The engine notices a container's death only after a moment.
        pid = int(self._inspect(host, "{{.State.Pid}}"))
        return pid > 0 and Process.exists(pid)

    def _inspect(self, host: str, form: str) -> str:
        name = container_name(self.name, host)
        return self.engine.call("container", "inspect", "--format", form, name).checked().strip()


__all__: Sequence[str] = ("CONTROLLER", "COORDINATOR", "LOGIN", "Cluster")
