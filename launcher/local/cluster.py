"""The processes of a local cluster on loopback: one coordinator, and one musterd and one muster-agent for each node.

These are the programs of a real cluster. Three parts are replaced: the coordinator has an in-memory Slurm, a secret
file in a private folder replaces munge, and a plain file replaces each node's kernel log.

Nothing of the site's /etc/muster is read: the host may be one of a cluster, whose certificates, ports and policy have
nothing to do with processes on loopback. The local cluster has a muster.toml and a policy of its own.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format

from muster.daemon.host import private_file
from muster.daemon.host.process import log_format
from muster.daemon.transport.identity import SecretCredentials
from muster.launcher.local import processes
from muster.launcher.local.faults import DueFault, Kind, kernel_line
from muster.launcher.local.processes import Program
from muster.slurm.client.batch_script import RANK_ENVIRONMENT
from muster.v1.common_pb2 import JobSpec

JOB = 1
"""The Slurm job id of the local gang."""
_OF_AGENTS = ("SLURM_JOB_ID", "SLURM_NODEID")
"""What agents read of Slurm's variables."""
_AT_START = Path("/proc/self/environ")
"""The environment that the user has given to this process, which sets variables for gRPC."""
_STOP_GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL."""
_RANKS_LEAVE_S = 30.0
"""Seconds for which ranks may go on after a signal: torchrun's --shutdown-timeout without that option."""
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class LocalNode:
    """A simulated node: its two processes and its kernel log."""

    name: str
    daemon: Program
    agent: Program
    kernel_log: Path


class LocalCluster:
    """The processes of the cluster, from `start` to `stop`.

    Args:
        folder: private (0700); it holds the state.
        launcher: the command of a launcher that each node runs, and that says what the ranks are. The agents then write
            what ranks print. Empty: the spec says it.
    """

    def __init__(self, folder: Path, spec: JobSpec, gang: str, launcher: Sequence[str] = ()) -> None:
        self._folder, self._spec, self._gang = folder, spec, gang
        self.launcher = tuple(launcher)
        self.secret = folder / "secret"
        self.settings = folder / "muster.toml"
        self._place = _reserve_port()
        self.address = f"{_LOOPBACK}:{self._place.getsockname()[1]}"
        self.coordinator: Program | None = None
        self.nodes: dict[str, LocalNode] = {}

    def start(self) -> None:
        """Starts all processes; daemons wait for the coordinator. This process must not have other threads yet."""
        SecretCredentials.create(self.secret)
        lines = (f"coordinator = {json.dumps(self.address)}", f"auth = {json.dumps(f'secret:{self.secret}')}")
        self.settings.write_text("\n".join(lines))
        policy = self._folder / "policy.toml"
        policy.touch()  # no row: the shipped table counts
        state = self._folder / "state"
        state.mkdir()
        names = [f"n{index}" for index in range(self._spec.nodes + self._spec.spares)]
        without_slurm = ["--slurm", "fake", "--local-nodes", *names]
        self.coordinator = self._start(
            "coordinator",
            "muster.daemon.coordinator",
            ["--listen", self.address, "--state-dir", str(state), *without_slurm, "--policy", str(policy)],
        )
        for index, name in enumerate(names):
            self.nodes[name] = self._start_node(index, name)

    def _start_node(self, index: int, name: str) -> LocalNode:
        kernel_log = self._folder / f"{name}.kmsg"
        kernel_log.touch(mode=0o600)  # musterd believes no file that others can write
        where = ["--listen", f"{_LOOPBACK}:0", "--node", name, "--memory", ""]
        agent = self._start(
            f"agent-{name}",
            "muster.daemon.agent",
            [
                "run",
                *where,
                "--advertise",
                _LOOPBACK,
                "--notice",
                "0",
                "--gang",
                self._gang,
                "--spec",
                str(self._spec_file()),
            ],
            self._agents_environment(index),
            self._launcher_words(),
        )
        daemon = self._start(f"musterd-{name}", "muster.daemon.node", [*where, "--kmsg", str(kernel_log)])
        return LocalNode(name, daemon, agent, kernel_log)

    def _agents_environment(self, index: int) -> dict[str, str]:
        """The variables that Slurm would set for an agent, and one GPU for each of several nodes, while there are
        enough GPUs. What starts a launcher has its ranks' environment, too."""
        slurm = {"SLURM_JOB_ID": str(JOB), "SLURM_NODEID": str(index)}
        gpus = len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])
        if gpus and self._spec.nodes + self._spec.spares > 1:
            slurm["CUDA_VISIBLE_DEVICES"] = str(index % gpus)
        if self.launcher:
            path = self._folder / "environment"
            private_file.replace(path, _AT_START.read_bytes().decode(errors="surrogateescape"))
            slurm[RANK_ENVIRONMENT] = str(path)
        return slurm

    def _launcher_words(self) -> list[str]:
        """What of Slurm the agents are told is not for ranks."""
        return ["--", "env", *(f"--unset={name}" for name in _OF_AGENTS), *self.launcher] if self.launcher else []

    def _spec_file(self) -> Path:
        path = self._folder / "spec.json"
        private_file.replace(path, json_format.MessageToJson(self._spec, preserving_proto_field_name=True))
        return path

    def _start(
        self,
        name: str,
        module: str,
        words: list[str],
        extra: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
    ) -> Program:
        argv = [sys.executable, "-m", module, *words, "--config", str(self.settings), *launcher]
        # Variables that this shell sets for the site's cluster must not reach the local one, but for the form of logs.
        inherited = {
            key: value
            for key, value in os.environ.items()
            if key == log_format.VARIABLE or not key.startswith(("SLURM", "MUSTER_"))
        }
        log = self._folder / f"{name}.log"
        return processes.start(name, argv, log, {**inherited, **(extra or {})}, shares_output=bool(launcher))

    @property
    def launch_status(self) -> int | None:
        """The exit status of a launcher that has ended on every node. None while one runs."""
        statuses = [node.agent.exit_status for node in self.nodes.values()]
        return None if not self.launcher or None in statuses else max(filter(None, statuses), default=0)

    @property
    def coordinator_has_ended(self) -> bool:
        """Whether the coordinator was started and has exited."""
        return self.coordinator is not None and self.coordinator.exit_status is not None

    def failure(self) -> str:
        """Which process exited although it never should, in words; "" if none has."""
        if self.coordinator and self.coordinator_has_ended:
            return f"the local coordinator has exited: {self.coordinator.last_log_line}"
        running = [node for node in self.nodes.values() if node.agent.exit_status is None]
        if self.nodes and not running:
            return f"every agent has exited: {next(iter(self.nodes.values())).agent.last_log_line}"
        return ""

    def inject(self, hit: DueFault) -> bool:
        """Injects the fault. Returns False if its target does not exist."""
        node = self.nodes.get(hit.node)
        if node is None:
            return False
        match hit.fault.kind:
            case Kind.KILL_NODE:
                processes.kill([node.daemon, node.agent])
            case Kind.KILL_RANK:
                return processes.signal_rank(node.agent, hit.rank, signal.SIGKILL)
            case Kind.HANG_RANK:
                return processes.signal_rank(node.agent, hit.rank, signal.SIGSTOP)
            case Kind.XID_NODE:
                with node.kernel_log.open("a") as log:
                    log.write(f"{kernel_line(hit.fault.code)}\n")
        return True

    def interrupt(self, number: signal.Signals, over: Callable[[], bool]) -> None:
        """Passes a signal on to the ranks, as torchrun does, and gives them its time to end; less if `over` says so.
        The coordinator ends first, because it would start them again. Blocks."""
        if self.coordinator:
            processes.kill([self.coordinator])
        processes.interrupt_ranks([node.agent for node in self.nodes.values()], number, _RANKS_LEAVE_S, over)

    def stop(self, *, agents_leave_s: float = 0.0) -> None:
        """Ends all processes. Agents first get `agents_leave_s` seconds to exit on their own. Blocks."""
        agents = [node.agent for node in self.nodes.values()]
        processes.wait(agents, agents_leave_s)
        processes.stop(agents, _STOP_GRACE_S)
        # The others keep nothing that is not in the journal: to let them end by themselves takes a second.
        others = [node.daemon for node in self.nodes.values()]
        processes.kill([*others, self.coordinator] if self.coordinator else others)
        self._place.close()


def _reserve_port() -> socket.socket:
    """Binds a socket, so that the system assigns its port to nobody else.

    The coordinator can bind the same port, because neither socket listens at that time.
    """
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind((_LOOPBACK, 0))
    return place
