"""The way of gangs and nodes through their tables, fact by fact, and the rungs of the ladder that are taken on it.

It is counted in the `tally`, and whoever lies in wait for a phase hears of it. While a turn's facts are gone through,
the durable state is ahead: it holds all of them already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.state_tables import Phase, Verdict

if TYPE_CHECKING:
    from muster.simulator.world.world import World

_RUNG_OF_CODE = {
    93: "fail: the software",
    94: "fail: no nodes",
    95: "fail: never gathered",
    96: "fail: an agent's error",
    97: "fail: the last checkpoint",
    98: "stop, then end",
    99: "observed",
}


class Moves:
    """Where each gang and each node is, as of the newest fact that was taken."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._phases: dict[str, Phase] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._jobs: dict[str, int] = {}

    def phase(self, gang: str) -> Phase:
        """The gang's phase."""
        return self._phases[gang]

    def take(self, fact: facts.Fact) -> None:
        """The next fact."""
        match fact:
            case facts.GangRegistered():
                self._phases.setdefault(fact.gang, Phase.SUBMITTED)
                self._world.entered(fact.gang, Phase.SUBMITTED)
            case facts.PhaseChanged() | facts.GangEnded():
                self._move(fact.gang, fact.phase)
            case facts.GenerationFenced():
                gathering = self._phases[fact.gang] is Phase.GATHERING
                self._move(fact.gang, Phase.PREFLIGHT if gathering else Phase.RECOVERING)
            case facts.GenerationStarted():
                self._move(fact.gang, Phase.STARTING)
                if fact.action != "requeue":  # that was counted when the job went back
                    self._rung(fact.action)
                if fact.version is not None and fact.action in ("start", "requeue"):
                    self._rung("resume from memory")
            case facts.NodeJudged():
                self._judge(fact.node, fact.verdict)
            case facts.MemberJoined():
                if fact.job != self._jobs.setdefault(fact.gang, fact.job):
                    self._rung("a node of the shared pool")
            case facts.PoolClosed() if fact.refused:
                self._rung("no node of the shared pool")
            case facts.StopPlanned():
                self._rung("stop")
            case facts.HangFound():
                self._rung("end a hang")
            case facts.MemberOut() if not fact.proven:
                self._rung("doubt a node")
            case facts.MemberOut() if "go on elsewhere" in fact.reason:
                self._rung("blame a node that was doubted")
            case facts.Withheld():
                self._rung("withheld")
            case facts.SlurmOwed() if fact.verb == "requeue":
                self._requeue(fact)

    def ended(self, fact: facts.GangEnded) -> None:
        """The end that was taken just now broke no law: its rung counts."""
        self._rung(_RUNG_OF_CODE.get(fact.exit_code, fact.phase))

    def _move(self, gang: str, to: Phase) -> None:
        before = self._phases[gang]
        if before is not to:
            self._world.tally.count("gang", f"{before} → {to}")
            self._world.entered(gang, to)
        self._phases[gang] = to

    def _judge(self, node: str, verdict: Verdict) -> None:
        before = self._verdicts.get(node, Verdict.FIT)
        if before is not verdict:
            self._world.tally.count("node", f"{before} → {verdict}")
        self._verdicts[node] = verdict

    def _requeue(self, fact: facts.SlurmOwed) -> None:
        if "batch script" in fact.text:
            self._rung("requeue what nobody starts")
        flushed = self._phases.get(fact.gang) is Phase.DRAINING
        self._rung("flush, then requeue" if flushed else "requeue")

    def _rung(self, name: str) -> None:
        self._world.tally.count("rung", name)
