"""The processes of a local cluster: one coordinator, and for each node one musterd and one muster-agent, on loopback.

They are the very programs of a real cluster. What stands in for it: Slurm is in the coordinator's memory, a secret file
in a private folder takes munge's place, and each node's kernel log is a plain file.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format

from muster.daemon.transport.identity import SecretCredentials
from muster.launcher.local import processes
from muster.launcher.local.faults import Hit, Kind, kernel_line
from muster.launcher.local.processes import Program
from muster.v1.common_pb2 import JobSpec

JOB = 1
HEARTBEAT_S = 1.0
_STOP_S = 3.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Node:
    """One "node": its two processes and its kernel log."""

    name: str
    daemon: Program
    agent: Program
    kernel_log: Path


class LocalCluster:
    """Started by `start`, ended by `stop`; in between, faults. `folder` is private (0700) and holds the state."""

    def __init__(self, folder: Path, spec: JobSpec, gang: str) -> None:
        self._folder, self._spec, self._gang = folder, spec, gang
        self.secret = folder / "secret"
        self._place = _kept_place()
        self.address = f"{_LOOPBACK}:{self._place.getsockname()[1]}"
        self.coordinator: Program | None = None
        self.nodes: dict[str, Node] = {}

    def start(self) -> None:
        """Starts everything, at once: daemons wait for their coordinator. No thread may run in this process yet."""
        SecretCredentials.create(self.secret)
        state = self._folder / "state"
        state.mkdir()
        self.coordinator = self._start(
            "coordinator",
            "muster.daemon.coordinator",
            ["--listen", self.address, "--state-dir", str(state), "--slurm", "fake", "--heartbeat", str(HEARTBEAT_S)],
        )
        for index in range(self._spec.nodes + self._spec.spares):
            node = self._start_node(index)
            self.nodes[node.name] = node

    def _start_node(self, index: int) -> Node:
        name = f"n{index}"
        kernel_log = self._folder / f"{name}.kmsg"
        kernel_log.touch()
        where = ["--coordinator", self.address, "--listen", f"{_LOOPBACK}:0", "--node", name, "--memory", ""]
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
            _slurm_environment(index),
        )
        daemon = self._start(f"musterd-{name}", "muster.daemon.node", [*where, "--kmsg", str(kernel_log)])
        return Node(name, daemon, agent, kernel_log)

    def _spec_file(self) -> Path:
        path = self._folder / "spec.json"
        path.write_text(json_format.MessageToJson(self._spec, preserving_proto_field_name=True))
        return path

    def _start(self, name: str, module: str, words: list[str], more: Mapping[str, str] | None = None) -> Program:
        argv = [sys.executable, "-m", module, *words, "--auth", f"secret:{self.secret}"]
        # What this shell has set for the site's cluster is nothing to this one.
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "MUSTER_"))}
        return processes.start(name, argv, self._folder / f"{name}.log", {**kept, **(more or {})})

    @property
    def without_coordinator(self) -> bool:
        """Whether the coordinator was started and has ended."""
        return self.coordinator is not None and self.coordinator.ended is not None

    def broken(self) -> str:
        """What ended that never should, in words; empty while all is well."""
        if self.coordinator and self.without_coordinator:
            return f"the local coordinator has ended: {self.coordinator.last_words}"
        running = [node for node in self.nodes.values() if node.agent.ended is None]
        if self.nodes and not running:
            return f"every agent has ended: {next(iter(self.nodes.values())).agent.last_words}"
        return ""

    def inject(self, hit: Hit) -> bool:
        """Makes the fault happen; whether there was something to hit."""
        node = self.nodes.get(hit.node)
        if node is None:
            return False
        match hit.fault.kind:
            case Kind.KILL_NODE:
                processes.kill([node.daemon, node.agent])
            case Kind.KILL_RANK:
                return processes.tell_rank(node.agent, hit.rank, signal.SIGKILL)
            case Kind.HANG_RANK:
                return processes.tell_rank(node.agent, hit.rank, signal.SIGSTOP)
            case Kind.XID_NODE:
                with node.kernel_log.open("a") as log:
                    log.write(f"{kernel_line(hit.fault.code)}\n")
        return True

    def stop(self, *, agents_leave_s: float = 0.0) -> None:
        """Ends every process; agents first get `agents_leave_s` seconds to leave by themselves. Blocking."""
        agents = [node.agent for node in self.nodes.values()]
        processes.wait(agents, agents_leave_s)
        processes.stop(agents, _STOP_S)
        others = [node.daemon for node in self.nodes.values()]
        processes.stop([*others, self.coordinator] if self.coordinator else others, _STOP_S)
        self._place.close()


def _slurm_environment(index: int) -> dict[str, str]:
    """What Slurm would tell an agent, and one GPU for each node as long as there are enough."""
    gpus = len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    gpu = {"CUDA_VISIBLE_DEVICES": str(index % gpus)} if gpus else {}
    return {"SLURM_JOB_ID": str(JOB), "SLURM_NODEID": str(index), **gpu}


def _kept_place() -> socket.socket:
    """A bound socket for which the system gives its port to nobody who asks for any; the coordinator's own can share
    it, for neither listens when it is bound."""
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind((_LOOPBACK, 0))
    return place
