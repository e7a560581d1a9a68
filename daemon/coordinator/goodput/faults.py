"""With what the loss of a recovery is charged: found from the facts of the gang before and during it."""

from __future__ import annotations

from dataclasses import replace

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.goodput.intervals import Fault, FaultKind


class FaultFinder:
    """`current`: what the time is charged with from a fence, or from the end of a run, until a generation starts; None:
    nothing. `straggler`: the rank for which the others wait now."""

    def __init__(self) -> None:
        self.current: Fault | None = None
        self.straggler: Fault | None = None
        self._announced: list[Fault] = []
        """What was decided about the running generation and may end it. The cause of its fence then has these words."""
        self._stop: Fault | None = None
        self._removed: set[str] = set()
        self._seats: set[str] = set()

    def note(self, fact: facts.Fact, at: float) -> None:
        """A fact was decided at `at` (seconds)."""
        match fact:
            case facts.HangDetected():
                self._announced.append(Fault(FaultKind.HANG, fact.node, fact.reason, at))
            case facts.StragglerDetected():
                self.straggler = Fault(FaultKind.STRAGGLER, fact.node, fact.reason, at)
            case facts.ReplicasDisagreed():
                self._announced.append(Fault(FaultKind.CORRUPTION, fact.node, fact.reason, at))
            case facts.RolledBack():
                self._announced.append(Fault(FaultKind.LOSS, "", fact.reason, at))
            case facts.SwapPlanned():
                self._announced.append(Fault(self._kind_of_swap(fact), fact.node, fact.reason, at))
            case facts.GrowthPlanned():
                self._announced.append(Fault(FaultKind.GROWTH, "", fact.reason, at))
            case facts.StopPlanned():
                self._stop = Fault(FaultKind.STOP, "", fact.reason, at)
            case facts.GenerationFenced() if fact.cause != facts.PREFLIGHT_CAUSE:
                self.current = self._of_fence(fact, at)
                self._announced, self.straggler = [], None
            case facts.MemberRemoved():
                if fact.node not in self._removed:  # what becomes of a node later is no cause
                    self._note_removal(fact)
                self._removed.add(fact.node)
            case facts.MemberJoined():
                self._removed.discard(fact.node)
            case facts.GenerationStarted():
                self._announced, self._seats = [], {seat.node for seat in fact.seats}
            case facts.PhaseChanged(phase=Phase.DRAINING | Phase.REQUEUED):
                self.current = self.current or self._of_end(fact, at)
            case facts.JobRestarted():
                self._announced, self._stop, self.straggler, self._removed = [], None, None, set()
            case _:
                pass

    def taken(self) -> Fault | None:
        """`current`, for the generation that starts now. The fences after it have other faults."""
        found, self.current = self.current, None
        return found

    def of_removal(self, fact: facts.MemberRemoved, at: float) -> Fault:
        """Why the gang has left a node. `note` knows the fact already."""
        if self.current is not None and self.current.node == fact.node:
            return self.current
        kind = FaultKind.NODE if fact.attributed else FaultKind.CRASH
        if fact.undoes_growth or fact.surplus:
            kind = FaultKind.GROWTH
        elif fact.requested:
            kind = FaultKind.REQUEST
        return Fault(kind, fact.node, fact.reason, at)

    def _kind_of_swap(self, fact: facts.SwapPlanned) -> FaultKind:
        if fact.gives_way_to:
            return FaultKind.GROWTH
        if fact.requested_by:
            return FaultKind.REQUEST
        slow = self.straggler is not None and self.straggler.words == fact.reason
        return FaultKind.STRAGGLER if slow else FaultKind.PRECURSOR

    def _of_fence(self, fact: facts.GenerationFenced, at: float) -> Fault:
        """The core writes the words of what it has announced into the cause, perhaps with more behind them."""
        for known in reversed(self._announced):
            if known.words in fact.cause:
                return replace(known, words=fact.cause, node=known.node or fact.crashed_on, at=at)
        if self._stop is not None and (fact.crashed_on or self._stop.words in fact.cause):
            return replace(self._stop, words=fact.cause)  # a script that fails during a planned stop is not at fault
        if fact.crashed_on:
            return Fault(FaultKind.CRASH, fact.crashed_on, fact.cause, at)
        return Fault(FaultKind.NODE, "", fact.cause, at)

    def _note_removal(self, fact: facts.MemberRemoved) -> None:
        """A node was removed. Within a recovery it may be the cause, as in state_updates._note_node_out."""
        if self.current is None or fact.node not in self._seats or fact.undoes_growth:
            return
        found = self.current
        if found.kind is FaultKind.CRASH and fact.attributed and not fact.requested:
            self.current = replace(found, kind=FaultKind.NODE, node=fact.node, words=fact.reason)
        elif found.kind is FaultKind.CRASH and not fact.attributed:
            self.current = replace(found, node=fact.node)
        elif found.kind is FaultKind.NODE and not found.node:
            kind = FaultKind.REQUEST if fact.requested else FaultKind.NODE
            self.current = replace(found, kind=kind, node=fact.node)

    def _of_end(self, fact: facts.PhaseChanged, at: float) -> Fault | None:
        """Why a run ends without a fence."""
        if self._stop is not None:
            return self._stop
        if fact.given_back:
            return Fault(FaultKind.PLACEMENT, "", fact.reason, at)
        return Fault(FaultKind.SLURM, "", fact.reason, at) if fact.phase is Phase.REQUEUED else None
