"""The faults that a chaos run injects: into a node, a process, a service, or two nodes at once."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from muster.slurm.image.engine import EngineError
from muster.slurm.testcluster.chaos.faulted_nodes import FaultedNodes
from muster.slurm.testcluster.chaos.jobs import NODES, JobSequence
from muster.slurm.testcluster.cluster import CONTROLLER, COORDINATOR, Cluster
from muster.slurm.testcluster.training import FATAL_XID_LINE

MAX_FAULTED_NODES = 3
"""No node is faulted while so many nodes are not repaired: two jobs of four nodes need the rest of the ten."""
MAX_DRAWS = 10
"""Draws until a fault is possible now. For example, a job that is starting has no rank to kill."""
REPAIR_DELAY_S = (8.0, 30.0)
"""Seconds from a node's fault to its repair (least, most)."""
SLOW_S = (2.0, 5.0)
"""Seconds for which a rank computes slowly (least, most): too few for a site to leave a straggler's node."""
GLITCH_S = (0.2, 0.6)
"""Seconds of a glitch (least, most). No node may be evicted for a glitch. A cut link may last a second longer, until
its peers repeat their failed address lookup (ARP).
"""


@dataclass
class FaultInjector:
    """Injects faults, and counts them."""

    cluster: Cluster
    random: random.Random
    say: Callable[[str], None]
    nodes: FaultedNodes
    counts: Counter[str] = field(default_factory=Counter)

    def summary(self) -> str:
        """The faults that were injected."""
        return f"{self.counts.total()} faults: {', '.join(f'{name} {n}' for name, n in sorted(self.counts.items()))}"

    def inject_fault(self, sequences: Sequence[JobSequence]) -> None:
        """Injects one fault, drawn at random from those that are possible now."""
        room = len(self.nodes.repair_at) < MAX_FAULTED_NODES
        actions = [(action, weight) for action, weight, faults_node in self._actions() if room or not faults_node]
        for _ in range(MAX_DRAWS):
            action = self.random.choices([action for action, _ in actions], [weight for _, weight in actions])[0]
            name = action.__name__.strip("_").replace("_", " ")
            if target := action(self.random.choice(sequences)):
                self.counts[name] += 1
                self.say(f"{name}: {target}")
                return

    def _actions(self) -> list[tuple[Callable[[JobSequence], str], int, bool]]:
        """Each fault's function, its weight in the draw, and whether it faults nodes."""
        return [
            (self._power_off, 4, True),
            (self._crash, 4, True),
            (self._reboot, 2, True),
            (self._partition, 4, True),
            (self._pause, 3, True),
            (self._xid, 4, True),
            (self._link_down, 2, True),
            (self._throttle, 2, True),
            (self._gpu_ecc, 2, True),
            (self._memory_error, 2, True),
            (self._drain, 2, True),
            (self._two_at_once, 4, True),
            (self._kill_rank, 4, False),
            (self._slow_rank, 2, False),
            (self._kill_agent, 2, False),
            (self._restart_musterd, 2, False),
            (self._restart_coordinator, 3, False),
            (self._stop_coordinator, 1, False),
            (self._freeze_coordinator, 2, False),
            (self._restart_slurmctld, 1, False),
            (self._restart_slurmd, 1, False),
            (self._short_partition, 2, False),
            (self._short_pause, 2, False),
        ]

    def _power_off(self, sequence: JobSequence) -> str:
        return self._fault_node(sequence, self.cluster.power_off)

    def _crash(self, sequence: JobSequence) -> str:
        return self._fault_node(sequence, self.cluster.crash)

    def _reboot(self, sequence: JobSequence) -> str:
        """The node may be back before Muster detects the fault. After the reboot it knows no job."""

        def reboot(node: str) -> float:
            at = self.cluster.crash(node)
            self.cluster.start_node(node)
            return at

        return self._fault_node(sequence, reboot)

    def _partition(self, sequence: JobSequence) -> str:
        return self._fault_node(sequence, self.cluster.partition)

    def _pause(self, sequence: JobSequence) -> str:
        return self._fault_node(sequence, self.cluster.pause)

    def _xid(self, sequence: JobSequence) -> str:
        return self._fault_node(sequence, lambda node: self.cluster.kmsg(node, FATAL_XID_LINE))

    def _link_down(self, sequence: JobSequence) -> str:
        return self._fault_node(sequence, self.cluster.link_down)

    def _throttle(self, sequence: JobSequence) -> str:
        return self._fault_node(sequence, lambda node: self.cluster.throttle(node, 0))

    def _gpu_ecc(self, sequence: JobSequence) -> str:
        return self._fault_node(sequence, lambda node: self.cluster.gpu_ecc(node, 0))

    def _memory_error(self, sequence: JobSequence) -> str:
        return self._fault_node(sequence, self.cluster.memory_error)

    def _drain(self, sequence: JobSequence) -> str:
        """An operator drains a node. If no coordinator answers, the node is only repaired later."""
        command = ("muster", "drain", "--reason", "chaos")

        def drain(node: str) -> float:
            self.cluster.exec(CONTROLLER, *command, node, check=False)
            return time.time()

        return self._fault_node(sequence, drain)

    def _two_at_once(self, sequence: JobSequence) -> str:
        """Faults two nodes, at once or one soon after the other, in the middle of a recovery."""
        first = self._fault_node(sequence, self.cluster.crash)
        if not first or len(self.nodes.repair_at) >= MAX_FAULTED_NODES:
            return first
        gap = self.random.choice((0.0, self.random.uniform(*GLITCH_S)))
        time.sleep(gap)
        return f"{first}, {gap:.1f} s later {self._fault_node(sequence, self.cluster.power_off)}"

    def _kill_rank(self, sequence: JobSequence) -> str:
        """Kills a rank only after the job has made progress: Muster blames three crashes without progress on the
        script.
        """
        step = int(sequence.training.view.get("step", 0))
        if sequence.training.view.get("phase") != "RUNNING" or step <= sequence.killed_at + 5:
            return ""
        rank = self.random.randrange(NODES)
        node = sequence.training.node_of(rank)
        if node in self.nodes.repair_at:
            return ""
        try:
            sequence.training.kill_rank(rank)
        except EngineError:
            return ""  # the rank has just ended, because of a fault that the view does not show yet
        self.nodes.recent.record(node, time.monotonic())  # Muster blames the node for two consecutive crashes
        self.nodes.rank_killed_on[node] = sequence.training
        sequence.killed_at = step
        return f"rank {rank} of {sequence.user}'s job"

    def _slow_rank(self, sequence: JobSequence) -> str:
        """A rank computes slowly for some seconds. No node may be evicted for that."""
        rank = self.random.randrange(NODES)
        if (
            sequence.training.view.get("phase") != "RUNNING"
            or (node := sequence.training.node_of(rank)) in self.nodes.repair_at
        ):
            return ""
        try:
            self.cluster.slow_rank(node, rank)
            time.sleep(self.random.uniform(*SLOW_S))
            self.cluster.slow_rank(node, rank, clear=True)
        except EngineError:
            return ""  # the node has just failed
        return f"rank {rank} of {sequence.user}'s job"

    def _kill_agent(self, sequence: JobSequence) -> str:
        node = self._healthy_node(sequence)
        return node and self._end_process(node, f"pkill -KILL -u {sequence.user} -f 'python3 [^ ]*/muster-agent run'")

    def _restart_musterd(self, sequence: JobSequence) -> str:
        node = self._healthy_node(sequence)
        if node:
            self.cluster.restart_service(node, "musterd", "KILL")
        return node

    def _restart_coordinator(self, _: JobSequence) -> str:
        host = self._management()
        self.cluster.restart_coordinator(host=host)
        return f"SIGKILL on {host}"

    def _stop_coordinator(self, _: JobSequence) -> str:
        host, pause_s = self._management(), self.random.uniform(2, 8)
        self.cluster.kill_coordinator(host)
        time.sleep(pause_s)
        self.cluster.start_service(host, COORDINATOR)
        return f"SIGKILL on {host}, stopped for {pause_s:.1f} s"

    def _freeze_coordinator(self, _: JobSequence) -> str:
        """Sometimes long enough for the standby, if there is one, to take over."""
        host, pause_s = self._management(), self.random.uniform(1, 12)
        self.cluster.freeze_coordinator(host)
        time.sleep(pause_s)
        self.cluster.thaw_coordinator(host)
        return f"coordinator of {host} frozen for {pause_s:.1f} s"

    def _management(self) -> str:
        return self.random.choice(self.cluster.spec.coordinators)

    def _restart_slurmctld(self, _: JobSequence) -> str:
        self.cluster.restart_slurmctld()
        return "SIGTERM"

    def _restart_slurmd(self, sequence: JobSequence) -> str:
        node = self._healthy_node(sequence)
        if node:
            self.cluster.restart_slurmd(node)
        return node

    def _short_partition(self, sequence: JobSequence) -> str:
        return self._glitch(sequence, self.cluster.partition, self.cluster.heal)

    def _short_pause(self, sequence: JobSequence) -> str:
        return self._glitch(sequence, self.cluster.pause, self.cluster.unpause)

    def _fault_node(self, sequence: JobSequence, how: Callable[[str], float]) -> str:
        node = self._healthy_node(sequence)
        if node:
            self.nodes.recent.record(node, time.monotonic())
            how(node)
            self.nodes.repair_at[node] = time.monotonic() + self.random.uniform(*REPAIR_DELAY_S)
        return node

    def _glitch(self, sequence: JobSequence, begin: Callable[[str], float], end: Callable[[str], float]) -> str:
        node = self._healthy_node(sequence)
        if not node:
            return ""
        moment = self.random.uniform(*GLITCH_S)
        begin(node)
        time.sleep(moment)
        end(node)
        return f"{node} for {moment:.1f} s"

    def _end_process(self, node: str, command: str) -> str:
        done = self.cluster.exec(node, "sh", "-c", command, check=False)
        return node if done.rc == 0 else ""

    def _healthy_node(self, sequence: JobSequence) -> str:
        """A node of the job that is not faulted; "" if there is none."""
        nodes = [str(node["node"]) for node in sequence.training.view.get("nodes", ())]
        whole = [node for node in nodes if node not in self.nodes.repair_at]
        return self.random.choice(whole) if whole else ""
