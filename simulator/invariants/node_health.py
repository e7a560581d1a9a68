"""Invariant 3: no healthy node is evicted on the word of one witness, but only by a quorum.

No node is called LOST while its gang makes progress, and none is called HUNG within 3 s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.detection.attribution import EXIT_BY_SIGKILL
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.state_tables import MONITORED, Phase
from muster.node_health import UNRESPONSIVE, NodeHealth
from muster.simulator.coverage.reason_phrases import ReasonPhrase
from muster.simulator.coverage.transitions import TransitionRecorder
from muster.simulator.environment.machine import Machine
from muster.simulator.environment.network import COORDINATOR
from muster.simulator.invariants.ground_truth import Progress, Reachability
from muster.simulator.world.observer import require

if TYPE_CHECKING:
    from muster.simulator.world.world import World

SHORTEST_PROBE_ROUND_S = 0.35
"""Seconds that the shortest round of probes takes."""
MIN_HUNG_S = 3.0
"""Seconds. The core probes for 4 s before it calls a node hung; the probes may miss a moment of life in between."""
UNKILLABLE_WINDOW_S = 15.0
"""Seconds for which a node may be called UNFIT after its ranks could not be killed."""


def gang_watching(state: DurableState, node: str) -> Gang | None:
    """A gang that probes `node` when the node falls silent."""
    return next((g for g in state.gangs.values() if node in g.roster.members and g.phase in MONITORED), None)


class NodeHealthInvariant:
    """By node: how often ranks have crashed there by themselves.

    By gang and generation: the nodes on which healthy ranks died of a peer's connection reset, and whether a rank that
    crashed by itself ended by SIGKILL.
    """

    def __init__(
        self, world: World, reachability: Reachability, progress: Progress, transitions: TransitionRecorder
    ) -> None:
        self._world = world
        self._reachability = reachability
        self._progress = progress
        self._transitions = transitions
        self._crash_counts: dict[str, int] = {}
        self._conditional_drains: dict[int, str] = {}
        """Node of each call that is owed on the condition that the job still has the node."""
        self._confirmed_by_slurm: set[str] = set()
        """Nodes that Slurm has drained, and whose health changes next."""
        self._reset_nodes: dict[tuple[str, int], set[str]] = {}
        self._ended_by_sigkill: set[tuple[str, int]] = set()
        self._crashed_nodes: dict[tuple[str, int], set[str]] = {}
        """By gang and generation: the nodes on which a rank has crashed because of itself or its node."""
        self._crashed_unseen: dict[tuple[str, int], str] = {}
        """By gang and generation: the node on which a signal ended a rank while nobody coordinated."""

    def rank_crashed(self, generation: tuple[str, int], node: str, exit_code: int) -> None:
        """A rank has crashed because of itself or its node."""
        self._crash_counts[node] = self._crash_counts.get(node, 0) + 1
        self._crashed_nodes.setdefault(generation, set()).add(node)
        if exit_code == EXIT_BY_SIGKILL:
            self._ended_by_sigkill.add(generation)
        if exit_code < 0 and not self._world.coordinator.alive:
            self._crashed_unseen.setdefault(generation, node)

    def rank_died_of_reset(self, generation: tuple[str, int], node: str) -> None:
        """A healthy rank has died because the kernel of a peer reset their connection."""
        self._reset_nodes.setdefault(generation, set()).add(node)

    def check_fence(self, fact: facts.GenerationFenced) -> None:
        """A fence names a node. It is none whose ranks only died of a reset, if the agent that has seen the cause can
        say so."""
        generation = (fact.gang, fact.generation)
        cause = self._crashed_unseen.get(generation, "")
        require(
            not cause
            or fact.crashed_on in self._crashed_nodes[generation]
            or fact.crashed_on not in self._reset_nodes.get(generation, set())
            or self._reachability.was_unreachable(COORDINATOR, fact.gang, cause),
            f"invariant 3: {fact.crashed_on} is named for a crash, and a rank on {cause} had crashed before",
        )

    def check_health_change(self, core: Core, fact: facts.NodeJudged, at: float) -> None:
        """The core changes a node's health."""
        machine = self._world.machines[fact.node]  # KeyError: the core judges a node that does not exist
        if fact.health is NodeHealth.UNFIT and fact.node in self._confirmed_by_slurm:
            self._confirmed_by_slurm.discard(fact.node)  # the evidence was checked when the drain was owed
            given_back = self._has_rogue_agent(fact.node) and not self._is_in_a_job(fact.node)
            require(
                not given_back, f"invariant 3: {fact.node} is UNFIT on the word of an agent that its job has no more"
            )
        elif fact.health is NodeHealth.UNFIT:
            self._check_unfit(core, machine, at)
        if fact.health in UNRESPONSIVE and (gang := gang_watching(core.state, fact.node)) is not None:
            self._check_witnesses(gang, fact)
            self._check_no_progress(gang, fact)
            self._check_hung_duration(gang, fact, at)

    def check_drain(self, core: Core, fact: facts.SlurmCallOwed, at: float) -> None:
        """Slurm shall drain a node if the job that reported about it still has it."""
        if fact.if_run_has_node is not None:
            if not self._has_rogue_agent(fact.node):  # what such an agent says of its own job's node is believed
                self._check_unfit(core, self._world.machines[fact.node], at)
            self._conditional_drains[fact.call] = fact.node

    def call_settled(self, fact: facts.SlurmCallSettled) -> None:
        """Slurm has carried out a call, or has refused it."""
        node = self._conditional_drains.pop(fact.call, "")
        if node and not fact.error:
            self._confirmed_by_slurm.add(node)

    def _has_rogue_agent(self, node: str) -> bool:
        return any(agent.is_rogue for (_, name), agent in self._world.agents.items() if name == node)

    def _is_in_a_job(self, node: str) -> bool:
        return any(node in job.held_nodes for job in self._world.cluster.jobs().values())

    def check_removal(self, fact: facts.MemberRemoved) -> None:
        """A gang removes a node and continues without it."""
        agent = self._world.agents.get((fact.gang, fact.node))
        if fact.alive or agent is None:
            return
        ended = ReasonPhrase.AGENT_ENDED in fact.reason
        require(
            ReasonPhrase.AGENT_ANSWERS_NO_HOST not in fact.reason
            or self._reachability.was_unreachable(COORDINATOR, fact.gang, fact.node),
            f"invariant 3: {fact.node} is out because it answers no host, and the coordinator was able to reach it",
        )
        require(
            not ended or not agent.alive or self._reachability.was_unreachable(COORDINATOR, fact.gang, fact.node),
            f"invariant 3: the agent on {fact.node} is said to have ended, and it is alive",
        )

    def _check_unfit(self, core: Core, machine: Machine, at: float) -> None:
        unkillable = at - UNKILLABLE_WINDOW_S < machine.ranks_unkillable_until
        own_crashes = self._crash_counts.get(machine.name, 0)
        crashes = own_crashes > 1 or (own_crashes == 1 and self._seems_to_crash(machine.name))
        has_reason = (
            machine.has_hardware_fault
            or machine.has_precursor
            or unkillable
            or crashes
            or self._has_unexplained_signal(core, machine.name)
        )
        require(has_reason, f"invariant 3: {machine.name} is called UNFIT without a reason")

    def _seems_to_crash(self, node: str) -> bool:
        """The exit codes of a generation name `node` alone, though a peer crashed: the peer's rank ended by SIGKILL, as
        every fenced rank does, and a healthy rank on `node` died of the reset."""
        return any(nodes == {node} for at, nodes in self._reset_nodes.items() if at in self._ended_by_sigkill)

    def _has_unexplained_signal(self, core: Core, node: str) -> bool:
        """The node reported a correlated signal, and its gang does not suspect the lost peer, or does not watch nodes
        now."""
        if node not in self._world.correlated_signals:
            return False
        id, dead = self._world.correlated_signals[node]
        gang = core.state.gangs[id]
        missed = (
            dead in gang.roster.members
            and not gang.roster.members[dead].removed
            and dead in core.observed.gang(id).suspected_since
        )
        return gang.phase not in MONITORED or not missed

    def _check_witnesses(self, gang: Gang, fact: facts.NodeJudged) -> None:
        world, node = self._world, fact.node
        require(
            self._reachability.was_unreachable(COORDINATOR, gang.id, node),
            f"invariant 3: {node} is called {fact.health}, and the coordinator was able to reach it",
        )
        # A node that is out or never joined is no witness: nodes go out because they are no longer trusted.
        members = {m.node for m in gang.roster.present()} - {node}
        others = [n for (id, n), a in world.agents.items() if id == gang.id and n in members and a.is_running()]
        unable = [n for n in others if self._reachability.was_unreachable(n, gang.id, node)]
        require(
            len(unable) >= min(2, len(others)),
            f"invariant 3: {node} is called {fact.health}; of {others} only {unable} may have found it silent",
        )

    def _check_no_progress(self, gang: Gang, fact: facts.NodeJudged) -> None:
        """A live node must not be called lost within the shortest round of probes after a step was reported.

        Steps say nothing about a node without ranks. For such a node only a step counts that the core takes for
        progress.
        """
        agent = self._world.agents.get((gang.id, fact.node))
        if self._transitions.phase(gang.id) is Phase.RECOVERING or agent is None or not agent.alive:
            return  # closed connections prove the end of a process at once, even right after a step
        carries_ranks = any(seat.node == fact.node for seat in gang.roster.seats)
        step_at = self._progress.reported_at(gang.id) if carries_ranks else self._progress.proven_at(gang.id)
        since_step_s = self._world.schedule.now - step_at
        require(
            since_step_s > SHORTEST_PROBE_ROUND_S,
            f"invariant 3: {fact.node} is called {fact.health} {since_step_s:.2f} s after a step of its gang",
        )

    def _check_hung_duration(self, gang: Gang, fact: facts.NodeJudged, at: float) -> None:
        silent_s = at - (self._reachability.unreachable_since(COORDINATOR, gang.id, fact.node) or 0.0)
        require(
            fact.health is not NodeHealth.HUNG or silent_s > MIN_HUNG_S,
            f"invariant 3: {fact.node} is called HUNG after {silent_s:.2f} s of silence",
        )
