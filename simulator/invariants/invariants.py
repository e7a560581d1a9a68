"""Tells each event of the simulated cluster to the invariants that it concerns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import AgentStatus, Version
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.node.kept_memory.retention import KeptEntry
from muster.exit_codes import EXIT_FAILED_AGAIN, EXIT_NEVER_GATHERED, EXIT_STOPPED
from muster.simulator.coverage.reason_phrases import ReasonPhrase
from muster.simulator.coverage.transitions import TransitionRecorder
from muster.simulator.invariants.batch_processes import BatchProcessInvariant
from muster.simulator.invariants.generations import GenerationInvariant
from muster.simulator.invariants.goodput import GoodputInvariant
from muster.simulator.invariants.ground_truth import Progress, Reachability
from muster.simulator.invariants.hangs_and_stragglers import HangInvariant, StragglerInvariant
from muster.simulator.invariants.journal_first import JournalInvariant, ViewInvariant
from muster.simulator.invariants.liveness import LivenessInvariant
from muster.simulator.invariants.node_checks import NodeCheckInvariant, ResumeInvariant
from muster.simulator.invariants.node_health import NodeHealthInvariant
from muster.simulator.invariants.outages import OutageInvariant
from muster.simulator.invariants.planned_swaps import PlannedSwapInvariant
from muster.simulator.invariants.replicas import ReplicaInvariant
from muster.simulator.invariants.seats import SeatInvariant
from muster.simulator.invariants.site_limits import KeptMemoryInvariant, SiteLimitInvariant
from muster.simulator.invariants.versions import RollBackInvariant, VersionInvariant
from muster.simulator.world.observer import InvariantViolation

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent, Rank
    from muster.simulator.world.world import World
    from muster.slurm.client.types import Job, Node
    from muster.v1 import agent_pb2 as pb


class Invariants:
    """All invariants. Any method raises InvariantViolation if an invariant is violated.

    `journal`: every journaled fact with its time.
    """

    def __init__(self, world: World) -> None:
        self.journal: list[tuple[float, facts.Fact]] = []
        self._world = world
        self._transitions = TransitionRecorder(world.coverage, world.phase_entered)
        self._reachability = reachability = Reachability(world)
        self._progress = progress = Progress(world)
        self._journal_first = JournalInvariant()
        self._views = ViewInvariant()
        self._generations = GenerationInvariant(world)
        self._versions = VersionInvariant(world, reachability)
        self._node_health = NodeHealthInvariant(world, reachability, progress, self._transitions)
        self._node_checks = NodeCheckInvariant(world)
        self._resumes = ResumeInvariant(world)
        self._outages = OutageInvariant(world, reachability)
        self._hangs = HangInvariant(world, reachability, progress)
        self._seats = SeatInvariant(world)
        self._batch_processes = BatchProcessInvariant(world)
        self._site_limits = SiteLimitInvariant(world)
        self._kept_memory = KeptMemoryInvariant()
        self._planned_swaps = PlannedSwapInvariant(world)
        self._replicas = ReplicaInvariant(world)
        self._stragglers = StragglerInvariant(world)
        self._liveness = LivenessInvariant(world)
        self._goodput = GoodputInvariant(world)
        self._roll_backs = RollBackInvariant(world)

    # -- facts --

    def journaled(self, core: Core, facts: Sequence[facts.Fact], at: float) -> None:
        """The journal holds these facts from now on."""
        for fact in facts:
            self.journal.append((at, fact))
            self._world.note(fact)
            self._transitions.record(fact)
            if gang := core.state.gangs.get(getattr(fact, "gang", "")):
                self._site_limits.recorded(gang, fact)
            self._check(core, fact, at)
        self._journal_first.journaled(core.state)
        self._goodput.journaled(core, facts, at)

    def _check(self, core: Core, fact: facts.Fact, at: float) -> None:
        """Tell a fact to the invariants that it concerns. The order matters: a fact may violate several."""
        gangs = core.state.gangs
        match fact:
            case facts.GenerationStarted():
                self._site_limits.check_start(fact)
                self._generations.check_start(fact)
                self._versions.check_sources(gangs[fact.gang], fact)
                self._seats.check_start(core, gangs[fact.gang], fact)
                self._node_checks.check_start(core, gangs[fact.gang], fact)
                self._versions.check_restored_version(gangs[fact.gang], fact)
                self._replicas.check_start(core, fact)
                self._roll_backs.check_start(fact)
                self._planned_swaps.check_start(core, gangs[fact.gang], fact, at)
            case facts.RolledBack():
                self._versions.rolled_back(fact)
                self._roll_backs.rolled_back(fact)
            case facts.ReplicasDisagreed():
                self._replicas.check_named(fact)
            case facts.StragglerDetected():
                self._stragglers.check_named(fact, at)
            case facts.GenerationFenced():
                self._outages.generation_fenced(fact.gang, at)
                self._versions.generation_fenced(gangs[fact.gang], fact)
                self._planned_swaps.check_fence(gangs[fact.gang], fact)
                self._hangs.check_fence(fact, at)
                self._node_health.check_fence(fact)
                self._liveness.generation_fenced(gangs[fact.gang], fact)
            case facts.SwapPlanned():
                self._planned_swaps.check_plan(core, fact)
            case facts.GrowthPlanned():
                self._planned_swaps.check_growth(core, fact, at)
            case facts.HangDetected():
                self._hangs.check_hang(core, fact, at)
            case facts.NodeJudged():
                self._site_limits.health_changed(fact)
                self._node_health.check_health_change(core, fact, at)
                self._outages.check_health_change(core, fact, at)
            case facts.MemberJoined():
                self._outages.member_joined(fact.gang, fact.node)
                self._site_limits.check_join(gangs[fact.gang], fact)
            case facts.PoolJobQueued():
                self._site_limits.pool_job_queued(fact)
            case facts.PoolRequestClosed():
                self._site_limits.pool_request_closed(fact)
            case facts.MemberRemoved():
                self._outages.member_out(fact.gang, fact.node)
                self._node_health.check_removal(fact)
                self._planned_swaps.check_removal(fact)
                self._node_checks.check_removal(fact)
            case facts.SlurmCallOwed() if fact.verb in ("drain", "down"):
                self._site_limits.check_taken(fact)
                self._node_health.check_drain(core, fact, at)
                self._outages.check_drain(core, fact, at)
            case facts.SlurmCallSettled():
                self._node_health.call_settled(fact)
            case facts.SlurmCallOwed() if fact.verb == "requeue" and ReasonPhrase.BATCH_PROCESS_LOST in fact.text:
                self._batch_processes.check_requeue(core, fact, at)
            case facts.FlushOrdered():
                self._replicas.check_flush(core, fact)
            case facts.FlushEnded() if fact.path:
                self._versions.check_flush(gangs[fact.gang], fact)
            case facts.JobRestarted():
                self._versions.run_ended(fact.gang)
                self._replicas.run_ended(fact.gang)
                self._stragglers.run_ended(fact.gang)
                self._node_checks.run_ended(fact.gang)
            case facts.PhaseChanged() if fact.phase is Phase.GATHERING:
                self._batch_processes.gathering_begins(fact.gang, at)
            case facts.PhaseChanged() if fact.phase is Phase.REQUEUED:
                self._kept_memory.gang_requeued(gangs[fact.gang])
                self._versions.check_saved(gangs[fact.gang])
            case facts.GangEnded():
                self._ended(gangs[fact.gang], fact, at)
                self._views.gang_ended(core, fact.gang)
            case _:
                pass

    def _ended(self, gang: Gang, fact: facts.GangEnded, at: float) -> None:
        if fact.phase is Phase.DONE:
            self._planned_swaps.check_end(gang)
        elif fact.exit_code == EXIT_STOPPED:
            self._versions.check_saved(gang)
        elif fact.exit_code == EXIT_FAILED_AGAIN:
            self._liveness.check_software_failure(gang)
            self._planned_swaps.check_software_failure(gang)
        elif fact.exit_code == EXIT_NEVER_GATHERED:
            self._batch_processes.check_gather_failure(gang, at)
        self._transitions.gang_ended(fact)

    # -- the coordinator --

    def order_sent(self, gang: Gang, order: pb.Order) -> None:
        """The coordinator sends an order."""
        self._journal_first.order_sent(gang, order)

    def slurm_call_started(self, call: facts.SlurmCallOwed) -> None:
        """The coordinator starts a call to Slurm."""
        self._journal_first.slurm_call_started(call)

    def drain_lifted(self, before: Node) -> None:
        """Muster has resumed the node, which was drained like this before."""
        self._resumes.check_resume(before)

    def node_checked(self, node: str, outcome: str) -> None:
        """The daemon of a node has checked the node."""
        self._resumes.node_checked(node, outcome)

    def snapshot_taken(self, state: DurableState, journal: Journal) -> None:
        """The journal holds a new snapshot."""
        self._journal_first.snapshot_taken(state, journal)

    def status_received(self, gang: str, status: AgentStatus) -> None:
        """The coordinator receives an agent's status."""
        self._progress.status_received(gang, status)

    def agent_attached(self, gang: str, status: AgentStatus) -> None:
        """The coordinator admits an agent that attaches with this status."""
        self._progress.agent_attached(gang, status)

    def coordinator_crashed(self, core: Core, written: bool) -> None:
        """The coordinator ends with this core. `written`: the journal holds all of its durable state."""
        self._journal_first.coordinator_crashed(core.state, written)
        self._views.coordinator_crashed(core, written)

    def coordinator_restarted(self, core: Core, journal: Journal) -> None:
        """A new coordinator has replayed the journal."""
        self._reachability.coordinator_restarted()
        self._journal_first.coordinator_restarted(core.state, journal)
        self._views.coordinator_restarted(core)

    def core_bug_reported(self, bug: str) -> None:
        """The core must find no bug in itself."""
        raise InvariantViolation(bug)

    # -- links, kernels, processes --

    def topology_changed(self) -> None:
        """Links, kernels or processes have changed."""
        self._reachability.topology_changed()

    def node_resumed(self, node: str) -> None:
        """Processes on `node` that were stopped run again."""
        self._generations.node_resumed(node)

    # -- ranks --

    def rank_started(self, gang: str, rank: Rank) -> None:
        """A rank's process was started."""
        self._generations.rank_started(gang, rank)

    def generation_joined(self, gang: str, generation: int, nodes: Collection[str]) -> None:
        """All ranks of a generation, which run on these nodes, have joined the rendezvous."""
        self._generations.generation_joined(gang, generation, nodes)

    def version_committed(self, leader: Agent, order: pb.Order, version: Version) -> None:
        """The commit leader commits a version."""
        if self._versions.is_binding(leader):
            self._generations.version_committed(leader.identity.gang, version)
            self._versions.version_committed(leader.identity.gang, order, version)
            self._replicas.version_committed(leader.identity.gang, order, version)

    def rank_crashed(self, gang: str, generation: int, node: str, exit_code: int, of_reset: bool) -> None:
        """A rank has exited with an error and was not killed. `of_reset`: it exited because a peer had ended."""
        self._goodput.rank_crashed(gang, generation, node)
        self._liveness.generation_failed(gang, generation)
        if of_reset:
            self._node_health.rank_died_of_reset((gang, generation), node)
        else:
            self._node_health.rank_crashed((gang, generation), node, exit_code)

    def batch_read(self, gang: str, batch: int) -> None:
        """A step has read a batch. Only gangs that report their losses say it."""
        self._roll_backs.batch_read(gang, batch)

    def rank_hung(self, gang: str, generation: int) -> None:
        """A rank hangs. The cause need not be a node: the rank may only be slow."""
        self._liveness.generation_failed(gang, generation)
        self._goodput.rank_hung(gang, generation)

    # -- memory between two runs of a job --

    def shards_handed_over(self, agent: Agent) -> None:
        """An agent hands its shards to its node's daemon."""
        self._kept_memory.shards_handed_over(agent)

    def prolog_finished(self, node: str, job: int, kept: KeptEntry[Any] | None) -> None:
        """A job's first process is about to start on a node that keeps this memory."""
        self._kept_memory.prolog_finished(node, job, kept)

    def kept_memory_checked(self, node: str, now: float, kept: KeptEntry[Any] | None) -> None:
        """A node keeps this memory at this time."""
        self._kept_memory.kept_memory_checked(node, now, kept)

    def batch_script_ended(self, gang: Gang, job: Job) -> None:
        """A batch script ends, and its job with it."""
        self._liveness.batch_script_ended(gang, job)

    # -- the end --

    def run_settled(self) -> None:
        """The run is over and everything has settled."""
        coordinator = self._world.coordinator
        self._journal_first.run_settled(coordinator.core.state, coordinator.journal)
        self._liveness.run_settled(coordinator.core.state)
        self._planned_swaps.run_settled(coordinator.core)
        self._goodput.run_settled()
