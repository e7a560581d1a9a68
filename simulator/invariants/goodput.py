"""Invariant 14: the ledger of each gang adds up, and charges each loss with what was injected.

Every moment of a node that the gang holds is in categories that together take it once, and a node of the job is held
while ranks run. What a loss is charged with has happened in the simulated cluster.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.state_tables import ACTIVE
from muster.daemon.coordinator.goodput.intervals import Category, Fault, FaultKind, Interval
from muster.daemon.coordinator.goodput.ledger import Ledger
from muster.simulator.world.observer import require

if TYPE_CHECKING:
    from muster.simulator.world.world import World

_OF_FAULTS = frozenset({Category.DETECT, Category.FENCE, Category.PLACE, Category.STEPS_AGAIN})
"""Categories of time that only a fault or a plan can take."""


class GoodputInvariant:
    """The ledger of each gang, which of its generations have crashed or hung, and which nodes it had at least."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ledgers: dict[str, Ledger] = defaultdict(Ledger)
        self._crashed: dict[tuple[str, int], set[str]] = defaultdict(set)
        self._hung: set[tuple[str, int]] = set()
        self._hangs: set[tuple[str, int]] = set()
        """The generations of which the core has found that they hang."""
        self._fenced: dict[tuple[str, float], int] = {}
        self._held: dict[str, tuple[float, frozenset[str]]] = {}
        self._held_s: dict[tuple[str, str], float] = defaultdict(float)
        self._steps: dict[str, _Steps] = defaultdict(_Steps)

    def journaled(self, core: Core, decided: Collection[facts.Fact], at: float) -> None:
        """The journal holds these facts from now on."""
        for fact in decided:
            if gang := getattr(fact, "gang", ""):
                self._ledgers[gang].note(fact, at)
                self._note_held(core, gang, at)
                self._steps[gang].note(fact, at)
            if isinstance(fact, facts.GenerationFenced):
                self._fenced[fact.gang, at] = fact.generation
            elif isinstance(fact, facts.HangDetected):
                self._hangs.add((fact.gang, fact.generation))

    def _note_held(self, core: Core, id: str, at: float) -> None:
        since, nodes = self._held.get(id, (at, frozenset[str]()))
        for node in nodes if at > since else ():
            self._held_s[id, node] += at - since
        gang = core.state.gangs.get(id)
        if gang is None or gang.phase not in ACTIVE:
            self._held[id] = at, frozenset()
        elif at > since or id not in self._held or nodes != frozenset(gang.slurm.job_nodes):
            self._held[id] = at, frozenset(gang.slurm.job_nodes)

    def rank_crashed(self, gang: str, generation: int, node: str) -> None:
        """A rank has exited with an error."""
        self._crashed[gang, generation].add(node)

    def rank_hung(self, gang: str, generation: int) -> None:
        """A rank hangs."""
        self._hung.add((gang, generation))

    def run_settled(self) -> None:
        """The run is over: all accounts are made up."""
        for gang, ledger in self._ledgers.items():
            intervals = [*ledger.take(), *ledger.unsettled(self._world.schedule.now)]
            self._check_sums(gang, intervals)
            for fault in {one.fault for one in intervals if one.fault is not None}:
                self._check_fault(gang, fault)
            self._check_charges(gang, intervals)

    def _check_sums(self, gang: str, intervals: Iterable[Interval]) -> None:
        taken: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
        for one in intervals:
            require(one.since <= one.until and 0 <= one.share <= 1, f"invariant 14: {gang} has a negative part: {one}")
            for node in one.nodes:
                taken[node][one.since] += one.share
                taken[node][one.until] -= one.share
        for node, changes in taken.items():
            _check_node(gang, node, changes, self._held_s[gang, node])

    def _check_fault(self, gang: str, fault: Fault) -> None:
        """What the loss is charged with has happened."""
        world, fenced = self._world, (gang, self._fenced.get((gang, fault.at), 0))
        machine = world.machines.get(fault.node)
        happened = {
            FaultKind.CRASH: bool(self._crashed[fenced]),
            FaultKind.HANG: fenced in self._hung or self._is_struck("", "cut"),
            FaultKind.CORRUPTION: world.flips > 0 and (machine is None or machine.has_flipped_bit),
            FaultKind.STRAGGLER: machine is not None and machine.has_slow_rank,
            FaultKind.PRECURSOR: machine is not None and machine.has_precursor,
            FaultKind.REQUEST: (gang, fault.node) in world.requested_swaps or fault.node in world.requested_drains,
            FaultKind.NODE: self._is_struck(fault.node) and (fault.node or fenced not in self._hangs),
        }.get(fault.kind, True)
        require(happened, f"invariant 14: {gang} charges {fault}, and nothing of that kind has happened")

    def _is_struck(self, node: str, word: str = "") -> bool:
        """A fault was injected that names the node, or none in particular. A node may be struck while the ranks recover
        from something else, and be the reason for the longer part of the recovery."""
        for _, words in self._world.notes:
            if isinstance(words, str) and words.startswith("FAULT") and word in words:
                named = re.findall(r"\bn\d+\b", words)
                if node in named or not named or not node:
                    return True
        return bool(node) and self._world.machines[node].check_outcome != "passed"

    def _check_charges(self, gang: str, intervals: Collection[Interval]) -> None:
        for one in intervals:
            charged = one.fault is not None or one.category not in _OF_FAULTS
            require(charged, f"invariant 14: nothing is charged with a part of {gang}: {one}")
        done_again = {one.generation for one in intervals if one.category is Category.STEPS_AGAIN}
        missing = self._steps[gang].again - done_again
        require(not missing, f"invariant 14: generations {missing} of {gang} have done steps again, and took no time")


class _Steps:
    """`again`: the generations that have finished a step after their first one that an earlier one had finished."""

    def __init__(self) -> None:
        self.again: set[int] = set()
        self._furthest = self._before = self._generation = 0
        self._first: tuple[int, float] | None = None

    def note(self, fact: facts.Fact, at: float) -> None:
        """A fact of the gang."""
        match fact:
            case facts.GenerationStarted():
                self._generation, self._before, self._first = fact.generation, self._furthest, None
            case facts.FirstStep():
                self._first = fact.step, at
            case facts.GenerationFenced() | facts.PhaseChanged() | facts.GangEnded() if fact.progress:
                step = fact.progress.step
                until = fact.suspected_at if isinstance(fact, facts.GenerationFenced) else at
                if step is None or self._first is None or step.generation != self._generation:
                    return
                if min(step.step, self._before) > self._first[0] and until > self._first[1]:
                    self.again.add(self._generation)
                self._furthest = max(self._furthest, step.step)
            case _:
                pass


def _check_node(gang: str, node: str, changes: dict[float, float], held_s: float) -> None:
    """At each moment, the node is taken once or not at all; and as long as the gang is known to have had it."""
    moments, taken, total_s = sorted(changes), 0.0, 0.0
    for moment, following in zip(moments, [*moments[1:], moments[-1]], strict=True):
        taken += changes[moment]
        require(
            min(abs(taken), abs(taken - 1.0)) < 1e-6,
            f"invariant 14: {node} of {gang} is taken {taken:.6f} times from {moment} on",
        )
        total_s += (following - moment) * round(taken)
    require(
        total_s > held_s - 1e-6,
        f"invariant 14: {gang} had {node} for {held_s:.3f} s while ranks ran, and the ledger has {total_s:.3f} s",
    )
