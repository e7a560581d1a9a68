"""The ledger of one gang: follows its facts, and says to what the time of its nodes went.

A node is held from the start of a run of the Slurm job, or from its joining if it came with a pool job, until the job
ends, or until Slurm has taken it away. Every second of a node that is held is in one interval, or in several with
shares of it. What an interval is charged with may become clear later, so intervals are settled when a recovery ends,
or a generation does.
"""

from __future__ import annotations

from copy import copy

from muster.checkpoint.format.folder_names import parse_path
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import Version
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.state_updates import LONG_RUN_S
from muster.daemon.coordinator.goodput.faults import FaultFinder
from muster.daemon.coordinator.goodput.generation_account import (
    Debt,
    Running,
    Slice,
    after,
    from_first_number,
    labelled,
    split,
    trained,
)
from muster.daemon.coordinator.goodput.held_nodes import HeldNodes
from muster.daemon.coordinator.goodput.intervals import Category, FaultKind, Interval, Measured, Wait

SETTLING = (facts.GenerationFenced, facts.PhaseChanged, facts.GangEnded, facts.JobRestarted)
"""Facts that may end a generation: what is measured of it is given to its ledger before."""


class Ledger:
    """The account of one gang. `note` its facts in their order, and `take` what is settled."""

    def __init__(self) -> None:
        self._settled: list[Interval] = []
        self._waits: list[Wait] = []
        self._waits_since = 0.0
        """Since when the job is in the queue, or in a recovery since when its ranks must end."""
        self._held = HeldNodes()
        self._faults = FaultFinder()
        self._stage: Category | None = None
        self._at = 0.0
        self._slices: list[Slice] = []
        """What is not settled yet."""
        self._run: Running | None = None
        self._generation = 0
        self._debts: tuple[Debt, ...] = ()
        self._reached = 0
        """The newest step of the last generation that has finished one, or has had its state restored."""
        self._logged = 0
        """The newest step that the numbers of the last generation have named that reported no finished steps."""
        self._durable_step: int | None = None
        self._asked = 0
        self._requeue: int | None = None
        """The number of the call that has Slurm requeue the job; None: there is none under way."""
        self._has_stepped = False
        """Ranks report finished steps. Otherwise the steps are those that the script's numbers name."""
        self._over = False

    def note(self, fact: facts.Fact, at: float) -> None:
        """A fact was decided at `at` (seconds)."""
        self._advance(at)
        self._faults.note(fact, at)
        if isinstance(fact, facts.PhaseChanged | facts.GenerationFenced | facts.GangEnded):
            self._note_late_step(fact.progress)
        match fact:
            case facts.GangRegistered() if self._stage is not None:  # its script has launched: the whole spec is known
                self._asked = fact.spec.nodes + fact.spec.spares
            case facts.GangRegistered():
                self._asked, self._stage = fact.spec.nodes + fact.spec.spares, Category.QUEUE
                self._durable_step = _step_of(fact.spec.resume_from)
                self._held.begin_run(fact.job)
                self._waits_since = at
            case facts.JobChanged():
                self._held.change_job(fact.nodes)
            case facts.MemberJoined():
                self._held.join(fact)
            case facts.MemberRemoved():
                self._held.leave(fact, self._faults.of_removal(fact, at))
            case facts.PoolJobQueued():
                self._held.queue_pool_job(fact)
            case facts.PoolRequestClosed():
                self._held.close_pool_request(fact.serial)
            case facts.SlurmCallOwed(verb="requeue"):
                self._requeue = fact.call
            case facts.SlurmCallSettled() if fact.call == self._requeue:
                self._end_requeue(fact)
            case facts.FlushOrdered() if self._stage is Category.FENCE:
                self._stage = Category.CHECKPOINT
            case facts.FlushEnded():
                self._end_flush(fact)
            case _:
                self._note_training(fact, at)
        if self._stage in (None, Category.QUEUE) and self._held.allocated and not self._over:
            self._stage = Category.START

    def measure(self, measured: Measured) -> None:
        """What was measured of the running generation so far."""
        if self._run is not None:
            self._run.measured = measured

    def take(self) -> list[Interval]:
        """What was settled since the last call."""
        found, self._settled = self._settled, []
        return found

    def take_waits(self) -> list[Wait]:
        """The waits that have ended since the last call."""
        found, self._waits = self._waits, []
        return found

    @property
    def over(self) -> bool:
        """Nothing follows any more."""
        return self._over

    @property
    def logged_step(self) -> int:
        """The newest step that the script's numbers have named, if its ranks report no finished steps; 0: none."""
        if self._has_stepped:
            return 0
        return (self._run.measured.step if self._run is not None else 0) or self._logged

    def unsettled(self, now: float, step: int = 0) -> list[Interval]:
        """What would be settled if the gang were over now (seconds). `step`: the newest finished step."""
        ledger = copy(self)
        ledger._settled, ledger._slices, ledger._run = [], [*self._slices], copy(self._run)
        ledger._advance(now)
        ledger._settle(step)
        return ledger._settled

    def _advance(self, at: float) -> None:
        """Nothing has changed until `at`."""
        since, self._at = self._at, max(at, self._at)
        if self._stage is None or since == self._at:
            return
        if self._stage is Category.QUEUE:
            self._slices.append(Slice(self._stage, since, self._at, frozenset(), asked=self._asked))
            return
        carrying, spares, left = self._held.roles()
        last = self._slices[-1] if self._slices else None
        if last is not None and last.until == since and last.is_like(self._stage, carrying, spares, left):
            since = self._slices.pop().since
        self._slices.append(Slice(self._stage, since, self._at, carrying, spares, left))

    def _note_training(self, fact: facts.Fact, at: float) -> None:
        match fact:
            case facts.GenerationFenced():
                self._fence(fact)
            case facts.GenerationStarted():
                self._start(fact, at)
            case facts.StateRestored() if self._run is not None:
                self._run.restored = fact.version.step
                self._stage = Category.FIRST_STEP if self._stage is Category.LOAD else self._stage
                self._run.loads = False
            case facts.FirstStep() if self._run is not None:
                self._run.first_step, self._run.first_step_at = fact.step, at
                self._stage, self._has_stepped = Category.USEFUL, True
            case facts.StragglerDetected() if self._run is not None:
                self._run.straggler = self._faults.straggler
            case facts.PhaseChanged():
                self._enter(fact)
            case facts.JobRestarted():
                self._settle(0)
                self._held.begin_run(fact.job)
                self._stage, self._requeue = Category.QUEUE, None  # a call may be settled after the new run has begun
            case facts.GangEnded():
                self._settle(_reached(fact.progress))
                self._faults.taken()
                self._held.carry_all()
                self._stage = Category.START if self._held.allocated else None
            case facts.JobEnded() | facts.GangForgotten():
                self._settle(0)
                self._held.release()
                self._stage, self._over = None, True
            case _:
                pass

    def _note_late_step(self, progress: facts.Progress | None) -> None:
        """Agents may say only after the fence how far the generation had come: a coordinator has just started."""
        step = progress.step if progress is not None else None
        if self._run is None and step is not None and step.generation == self._generation:
            self._reached = max(self._reached, step.step)
            self._debts = after(self._debts, step.step)

    def _enter(self, fact: facts.PhaseChanged) -> None:
        """The phase of the gang has changed."""
        match fact.phase:
            case Phase.GATHERING:
                self._stage = Category.START
            case Phase.RUNNING if self._stage is Category.RENDEZVOUS and self._run is not None:
                self._stage = Category.LOAD if self._run.loads else Category.FIRST_STEP
            case Phase.DRAINING:
                self._settle(_reached(fact.progress))
                self._stage = Category.CHECKPOINT
            case Phase.REQUEUED:
                self._settle(_reached(fact.progress))
                self._held.carry_all()
                self._stage, self._waits_since = Category.START, self._at
                if self._requeue is None:  # Slurm has requeued it by itself
                    self._held.release()
                    self._stage = Category.QUEUE
            case _:
                pass

    def _end_flush(self, fact: facts.FlushEnded) -> None:
        """A version is on durable storage, or can't be written there. A recovery may have waited for that."""
        if fact.path:
            self._durable_step = fact.version.step if fact.version is not None else _step_of(fact.path)
        if self._stage is Category.CHECKPOINT:
            self._stage = Category.PLACE

    def _end_requeue(self, fact: facts.SlurmCallSettled) -> None:
        """Slurm has put the job back into its queue, and has taken its nodes away; or it has refused to."""
        self._requeue = None
        if not fact.error and self._run is None and self._stage is Category.START:
            self._held.release()
            self._stage = Category.QUEUE

    def _fence(self, fact: facts.GenerationFenced) -> None:
        """The ranks of a generation must end. What was trained since the first sign of the fault is lost."""
        if self._run is None:
            return  # a preflight
        slices = split(self._slices, fact.suspected_at, Category.DETECT)
        self._slices = [one for one in slices if one.until <= fact.suspected_at]
        detected = slices[len(self._slices) :]
        crashed = self._faults.current is not None and self._faults.current.kind is FaultKind.CRASH
        self._settle(_reached(fact.progress) or fact.step_before, crashed=crashed)
        self._slices, self._waits_since = detected, self._at
        self._stage = Category.FENCE

    def _start(self, fact: facts.GenerationStarted, at: float) -> None:
        """Ranks start. What came before is the time of the recovery, or of the start of the run."""
        seats, before = frozenset(seat.node for seat in fact.seats), self._held.seats
        if before is None or seats - before:
            self._waits.append(Wait(at, at - self._waits_since, len(seats), swap=before is not None))
        fenced = [one for one in self._slices if one.stage is Category.FENCE]
        placed = split(fenced, fact.fenced_at, Category.PLACE)
        self._slices = [one for one in self._slices if one.stage is not Category.FENCE] + placed
        self._settle(0)
        self._generation = fact.generation
        step = fact.version.step if fact.version is not None else None
        if step is None and fact.durable_path:
            step = self._durable_step if self._durable_step is not None else _step_of(fact.durable_path)
        self._run = Running(fact.generation, self._faults.taken(), step, self._debts, self._reached)
        self._run.loads = fact.version is not None or bool(fact.durable_path)
        self._held.carry(seats)
        self._stage = Category.RENDEZVOUS

    def _settle(self, reached: int, *, crashed: bool = False) -> None:
        """Classify what has happened since the last time. A generation that ran is over: it came to step `reached`, or
        nobody knows how far. `crashed`: a rank has ended by itself. If that is soon, its script may never have trained.
        """
        run, self._run = self._run, None
        slices, self._slices = self._slices, []
        if run is None:
            self._settled += labelled(slices, self._generation, self._faults.current)
            return
        if run.first_step_at is None and run.measured.first_at and not self._has_stepped:
            slices, self._logged = from_first_number(slices, run), run.measured.step
            reached = max(reached, self._logged)
        soon = bool(slices) and slices[-1].until - slices[0].since < LONG_RUN_S
        stepless = not self._has_stepped and run.first_step_at is None and run.restored is None
        stepless = stepless and not (crashed and soon)
        self._settled += trained(slices, run, max(reached, run.first_step), stepless=stepless)
        if run.first_step_at is not None:
            self._reached = max(reached, run.first_step)
            self._debts = after(run.debts_now(), self._reached)
        elif run.restored is not None:
            self._reached, self._debts = run.restored, run.debts_now()


def _reached(progress: facts.Progress | None) -> int:
    """The newest finished step; 0: it is not said."""
    step: Version | None = progress.step if progress is not None else None
    return step.step if step is not None else 0


def _step_of(path: str) -> int | None:
    """The step of a durable checkpoint, as its folder's name says; None: it does not say."""
    name = parse_path(path) if path else None
    return name.step if name is not None else None
