"""Records each gang's and each node's way through its state table, fact by fact, and counts it in the coverage.

While the facts of one turn are recorded, the durable state is ahead: it already holds all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.exit_codes import (
    EXIT_AGENT,
    EXIT_FAILED_AGAIN,
    EXIT_NEVER_GATHERED,
    EXIT_NO_NODES,
    EXIT_NOT_DURABLE,
    EXIT_OBSERVED,
    EXIT_STOPPED,
)
from muster.node_health import NodeHealth
from muster.simulator.coverage.counts import Coverage
from muster.simulator.coverage.reason_phrases import ReasonPhrase

_RECOVERY_OF_EXIT_CODE = {
    EXIT_FAILED_AGAIN: "fail: software",
    EXIT_NO_NODES: "fail: no nodes",
    EXIT_NEVER_GATHERED: "fail: never gathered",
    EXIT_AGENT: "fail: agent error",
    EXIT_NOT_DURABLE: "fail: last checkpoint",
    EXIT_STOPPED: "planned stop, then end",
    EXIT_OBSERVED: "fail: observe mode",
}


class TransitionRecorder:
    """The state of each gang and each node as of the newest recorded fact.

    `phase_entered` is called with the gang and its phase whenever a gang enters a phase.
    """

    def __init__(self, coverage: Coverage, phase_entered: Callable[[str, Phase], None]) -> None:
        self._coverage = coverage
        self._phase_entered = phase_entered
        self._phases: dict[str, Phase] = {}
        self._healths: dict[str, NodeHealth] = {}
        self._jobs: dict[str, int] = {}

    def phase(self, gang: str) -> Phase:
        """The gang's phase."""
        return self._phases[gang]

    def record(self, fact: facts.Fact) -> None:
        """Record the next fact."""
        match fact:
            case facts.GangRegistered():
                self._phases.setdefault(fact.gang, Phase.SUBMITTED)
                self._phase_entered(fact.gang, Phase.SUBMITTED)
            case facts.PhaseChanged() | facts.GangEnded():
                self._change_phase(fact.gang, fact.phase)
            case facts.GenerationFenced():
                gathering = self._phases[fact.gang] is Phase.GATHERING
                self._change_phase(fact.gang, Phase.PREFLIGHT if gathering else Phase.RECOVERING)
            case facts.GenerationStarted():
                self._change_phase(fact.gang, Phase.STARTING)
                if fact.action != "requeue":  # it was counted when the job was requeued
                    self._count(fact.action)
                if fact.version is not None and fact.action in ("start", "requeue"):
                    self._count("resume from kept memory")
                if any(source.combined_ranks for source in fact.sources):
                    self._count("restore rebuilt shards")
            case facts.FlushOrdered() if any(source.combined_ranks for source in fact.sources):
                self._count("flush rebuilt shards")
            case facts.NodeJudged():
                self._change_health(fact.node, fact.health)
            case facts.MemberJoined():
                if fact.job != self._jobs.setdefault(fact.gang, fact.job):
                    self._count("pool node joined")
            case facts.PoolRequestClosed() if fact.refused:
                self._count("pool request failed")
            case facts.StopPlanned():
                self._count("planned stop")
            case facts.HangDetected():
                self._count("hang found")
            case facts.StragglerDetected():
                self._count("straggler found" if fact.response is None else "straggler lasts")
            case facts.MemberRemoved() if not fact.attributed:
                self._count("remove a node before attribution")
            case facts.MemberRemoved() if ReasonPhrase.CAUSE_PROVEN in fact.reason:
                self._count("attribute crashes to a removed node")
            case facts.ActionWithheld():
                self._count("withheld by the circuit breaker")
            case facts.SlurmCallOwed() if fact.verb == "requeue":
                self._count_requeue(fact)

    def gang_ended(self, fact: facts.GangEnded) -> None:
        """Count how the gang ended. The caller has checked that the end violates no invariant."""
        self._count(_RECOVERY_OF_EXIT_CODE.get(fact.exit_code, fact.phase))

    def _change_phase(self, gang: str, to: Phase) -> None:
        before = self._phases[gang]
        if before is not to:
            self._coverage.count("gang", f"{before} → {to}")
            self._phase_entered(gang, to)
        self._phases[gang] = to

    def _change_health(self, node: str, health: NodeHealth) -> None:
        before = self._healths.get(node, NodeHealth.FIT)
        if before is not health:
            self._coverage.count("node", f"{before} → {health}")
        self._healths[node] = health

    def _count_requeue(self, fact: facts.SlurmCallOwed) -> None:
        if ReasonPhrase.LAUNCH_FAILED in fact.text:
            self._count("release after a failed launch")
            return
        if ReasonPhrase.BATCH_PROCESS_LOST in fact.text:
            self._count("requeue: batch process lost")
        flushed = self._phases.get(fact.gang) is Phase.DRAINING
        self._count("flush, then requeue" if flushed else "requeue")

    def _count(self, name: str) -> None:
        self._coverage.count("recovery", name)
