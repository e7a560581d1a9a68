"""Counters of what happens: recoveries and their phases, steps done again, signals, jobs
that end, findings about losses.

They count from the start of this coordinator, as every process does that Prometheus asks: its `rate` and `increase`
know that a counter begins again at 0. Each label has a closed list of values, and all that are likely are there from
the start, at 0: the first recovery is an increase, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from muster.daemon.coordinator.core.losses.loss_rule import LossResponse
from muster.daemon.coordinator.core.losses.loss_watch import LossKind
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.generations import Recovery
from muster.daemon.coordinator.core.state.state_tables import FINAL
from muster.daemon.coordinator.goodput.faults import FaultFinder
from muster.daemon.coordinator.goodput.intervals import Fault, FaultKind
from muster.daemon.coordinator.policy.policy import Policy
from muster.recovery_phases import RecoveryPhase

ACTIONS = (
    "restart in place", "swap", "planned swap", "fewer replicas", "more replicas", "pool node gives way", "requeue",
)  # fmt: skip
"""What was done: the `action`, as `muster status` says it."""
_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_OTHER, _NOT_FINITE = "other", "not finite"
_CAUSES = (*(kind.value for kind in FaultKind), _OTHER)


class EventCounters:
    """Counts in `registry`.

    Args:
        state: of the coordinator, after the facts that are noted.
        now: the coordinator's clock in seconds.
        policy: names the signals that have series of their own.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        state: DurableState,
        now: Callable[[], float],
        policy: Policy,
    ) -> None:
        self._state, self._now, self._policy = state, now, policy
        self._faults: dict[str, FaultFinder] = {}
        """Gang → what its recoveries are charged with."""
        self._recoveries = Counter(
            "muster_recoveries", "Generations that were started anew.", ["cause", "action"], registry=registry
        )
        self._recovery_s = Histogram(
            "muster_recovery_seconds",
            "Time of the phases of recoveries that have led to a step.",
            ["phase"],
            registry=registry,
            buckets=_BUCKETS_S,
        )
        self._repeated = Counter("muster_steps_repeated", "Steps that were lost and done again.", registry=registry)
        self._ended = Counter("muster_jobs_ended", "Jobs that are over.", ["phase"], registry=registry)
        self._signals = Counter(
            "muster_signals", "Hardware signals of nodes.", ["kind", "code", "action"], registry=registry
        )
        self._losses = Counter(
            "muster_loss_findings", "Losses of jobs that are not finite, have a spike or are on a plateau.",
            ["kind", "response"], registry=registry,
        )  # fmt: skip
        for finding in (_NOT_FINITE, *LossKind):
            for response in LossResponse:
                self._losses.labels(str(finding), response.value)
        for cause in _CAUSES:
            for action in ACTIONS:
                self._recoveries.labels(cause, action)
        for kind in policy.kinds:
            for code in policy.codes(kind) or (0,):
                self._signals.labels(kind, str(code), policy.decide(kind, code).action)
        for phase in RecoveryPhase:
            self._recovery_s.labels(phase.value)
        for end in FINAL:
            self._ended.labels(end.value)

    def note_signal(self, kind: str, code: int, action: str) -> None:
        """A node has reported a signal, and the policy has answered with `action`."""
        if kind not in self._policy.kinds:
            kind, shown = _OTHER, _OTHER
        else:
            codes = self._policy.codes(kind)
            shown = str(code) if code in codes or not codes else _OTHER
        self._signals.labels(kind, shown, action).inc()

    def note_facts(self, decided: Sequence[facts.Fact]) -> None:
        """Count what these facts say. They are part of the state already."""
        for fact in decided:
            if gang := getattr(fact, "gang", ""):
                self._faults.setdefault(gang, FaultFinder()).note(fact, self._now())
            match fact:
                case facts.GenerationStarted():
                    self._note_start(fact, self._faults[fact.gang].taken())
                case facts.FirstStep() if fact.observed_live:
                    self._note_first_step(fact)
                case facts.GangEnded():
                    self._ended.labels(fact.phase.value).inc()
                case facts.NotFiniteReported():
                    self._losses.labels(_NOT_FINITE, fact.response.value).inc()
                case facts.LossNoted():
                    self._losses.labels(fact.kind.value, fact.response.value).inc()
                case facts.GangForgotten():
                    del self._faults[fact.gang]

    def _note_start(self, fact: facts.GenerationStarted, fault: Fault | None) -> None:
        if fact.action == "start":
            return
        self._recoveries.labels(fault.kind.value if fault is not None else _OTHER, fact.action).inc()
        if (recovery := self._recovery(fact)) is not None:
            self._repeated.inc(max(0, recovery.step_before - recovery.step_restored))

    def _note_first_step(self, fact: facts.FirstStep) -> None:
        recovery = self._recovery(fact)
        if recovery is None:
            return
        job = self._state.gangs[fact.gang].slurm.job
        exemplar = {"job_id": str(job), "generation": str(fact.generation)}
        for phase, seconds in recovery.phase_seconds():
            self._recovery_s.labels(phase.value).observe(seconds, exemplar)

    def _recovery(self, fact: facts.GenerationStarted | facts.FirstStep) -> Recovery | None:
        """The recovery that has led to this generation; None: there was none, or it is not known any more."""
        gang = self._state.gangs.get(fact.gang)
        last = gang.recovery.last if gang is not None else None
        return last if last is not None and last.generation == fact.generation else None
