"""What happens in the world, passed on to the laws that it concerns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.recovery.gang_end import EXIT_NEVER_GATHERED, EXIT_NO_REQUEUE, EXIT_STOPPED
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState, Gang
from muster.daemon.coordinator.core.state.events import Status, Version
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.node.kept_memory.retention import KeptEntry
from muster.simulator.invariants.batch_processes import Launchers
from muster.simulator.invariants.generations import Generations
from muster.simulator.invariants.hangs import Hangs
from muster.simulator.invariants.journal_first import JournalFirst
from muster.simulator.invariants.kept_memory import KeptMemory
from muster.simulator.invariants.liveness import Ends
from muster.simulator.invariants.outages import Outages
from muster.simulator.invariants.progress import Progress
from muster.simulator.invariants.reachability import Reach
from muster.simulator.invariants.seats import Seats
from muster.simulator.invariants.site_limits import SiteLimits
from muster.simulator.invariants.transitions import Moves
from muster.simulator.invariants.verdicts import Verdicts
from muster.simulator.invariants.versions import Versions

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent, Rank
    from muster.simulator.world.world import World
    from muster.slurm.client.types import Job
    from muster.v1 import agent_pb2 as pb


class Laws:
    """All that must hold. Any method raises Violation where a law is broken.

    `journal`: every fact that was journaled, and when.
    """

    def __init__(self, world: World) -> None:
        self.journal: list[tuple[float, facts.Fact]] = []
        self._world = world
        self._moves = Moves(world)
        self._reach = reach = Reach(world)
        self._progress = progress = Progress(world)
        self._journal_first = JournalFirst()
        self._generations = Generations(world)
        self._versions = Versions(world, reach)
        self._verdicts = Verdicts(world, reach, progress, self._moves)
        self._outages = Outages(world, reach)
        self._hangs = Hangs(world, reach, progress)
        self._seats = Seats(world)
        self._launchers = Launchers(world)
        self._site_limits = SiteLimits(world)
        self._kept_memory = KeptMemory()
        self._ends = Ends(world)

    # -- facts --

    def written(self, core: Core, facts: Sequence[facts.Fact], at: float) -> None:
        """The journal holds these facts from now on."""
        for fact in facts:
            self.journal.append((at, fact))
            self._world.note(fact)
            self._moves.take(fact)
            self._check(core, fact, at)
        self._journal_first.written(core.state)

    def _check(self, core: Core, fact: facts.Fact, at: float) -> None:
        """Which laws look at a fact, the first one first."""
        gangs = core.state.gangs
        match fact:
            case facts.GenerationStarted():
                self._site_limits.starts(fact)
                self._generations.starts(fact)
                self._versions.sources(fact)
                self._seats.starts(gangs[fact.gang], fact)
                self._versions.resumed(gangs[fact.gang], fact)
            case facts.GenerationFenced():
                self._outages.fenced(fact.gang, at)
                self._hangs.fenced(fact, at)
            case facts.HangFound():
                self._hangs.found(core, fact, at)
            case facts.NodeJudged():
                self._site_limits.judged(fact)
                self._verdicts.judged(core, fact, at)
                self._outages.judged(core, fact, at)
            case facts.MemberJoined():
                self._outages.joined(fact.gang, fact.node)
                self._site_limits.joined(gangs[fact.gang], fact)
            case facts.MemberOut():
                self._outages.out(fact.gang, fact.node)
                self._verdicts.out(fact)
            case facts.SlurmOwed() if fact.verb in ("drain", "down"):
                self._site_limits.taken(fact)
            case facts.SlurmOwed() if fact.verb == "requeue" and "batch script" in fact.text:
                self._launchers.given_up(core, fact, at)
            case facts.Flushed() if fact.path:
                self._versions.flushed(gangs[fact.gang], fact)
            case facts.JobRestarted():
                self._versions.run_over(fact.gang)
            case facts.PhaseChanged() if fact.phase is Phase.REQUEUED:
                self._kept_memory.requeued(gangs[fact.gang])
                self._versions.saved(gangs[fact.gang])
            case facts.GangEnded():
                self._ended(gangs[fact.gang], fact)
            case _:
                pass

    def _ended(self, gang: Gang, fact: facts.GangEnded) -> None:
        if fact.exit_code == EXIT_STOPPED:
            self._versions.saved(gang)
        elif fact.exit_code == EXIT_NO_REQUEUE:
            self._ends.software_failed(gang)
        elif fact.exit_code == EXIT_NEVER_GATHERED:
            self._launchers.never_gathered(gang)
        self._moves.ended(fact)

    # -- the coordinator --

    def ordered(self, gang: Gang, order: pb.Order) -> None:
        """An order goes out."""
        self._journal_first.ordered(gang, order)

    def called(self, call: facts.SlurmOwed) -> None:
        """Slurm is called."""
        self._journal_first.called(call)

    def snapshot_taken(self, state: DurableState, journal: Journal) -> None:
        """The journal holds a new snapshot."""
        self._journal_first.snapshot_taken(state, journal)

    def reported(self, gang: str, status: Status) -> None:
        """The coordinator hears an agent's status."""
        self._progress.reported(gang, status)

    def crashed(self, state: DurableState, written: bool) -> None:
        """The coordinator dies with this durable state; `written`: the journal holds all of it."""
        self._journal_first.crashed(state, written)

    def restarted(self, state: DurableState, journal: Journal) -> None:
        """A coordinator has taken up the journal."""
        self._reach.restarted()
        self._journal_first.restarted(state, journal)

    # -- wires, kernels, processes --

    def changed(self) -> None:
        """Wires, kernels or processes have changed."""
        self._reach.changed()

    def goes_on(self, node: str) -> None:
        """What was stopped on `node` runs again."""
        self._generations.goes_on(node)

    # -- ranks --

    def started(self, gang: str, rank: Rank) -> None:
        """A rank's process was started."""
        self._generations.started(gang, rank)

    def joined(self, gang: str, generation: int, nodes: Collection[str]) -> None:
        """All ranks of a generation, which are on these nodes, have met."""
        self._generations.joined(gang, generation, nodes)

    def committed(self, leader: Agent, order: pb.Order, version: Version) -> None:
        """The leader calls a version committed."""
        if self._versions.binds(leader):
            self._generations.committed(leader.post.gang, version)
            self._versions.committed(leader.post.gang, order, version)

    def crashed_by_itself(self, gang: str, generation: int, node: str, of_reset: bool) -> None:
        """A rank has exited with an error, and nobody had killed it. `of_reset`: its peer had died."""
        self._ends.crashed(gang, generation)
        if not of_reset:
            self._verdicts.crashed(node)

    def hung_by_itself(self, gang: str, generation: int) -> None:
        """A rank hangs: it may be no node's fault, for it may be slow only."""
        self._ends.crashed(gang, generation)

    # -- memory between two runs of a job --

    def left(self, agent: Agent) -> None:
        """An agent leaves its shards with its node's daemon."""
        self._kept_memory.left(agent)

    def prolog_returned(self, node: str, job: int, kept: KeptEntry[Any] | None) -> None:
        """A job's first process is about to start on a node that keeps this."""
        self._kept_memory.prolog_returned(node, job, kept)

    def kept_at(self, node: str, now: float, kept: KeptEntry[Any] | None) -> None:
        """A node keeps this at this time."""
        self._kept_memory.kept_at(node, now, kept)

    def batch_leaves(self, gang: Gang, job: Job) -> None:
        """A batch script ends, and its job with it."""
        self._ends.batch_leaves(gang, job)

    # -- the end --

    def end_of_run(self) -> None:
        """All has settled."""
        coordinator = self._world.coordinator
        self._journal_first.end_of_run(coordinator.core.state, coordinator.journal)
        self._ends.end_of_run(coordinator.core.state)
