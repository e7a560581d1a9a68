"""The tallies of all gangs, and what is found by a node's name: its gangs, and whether it is out of service.

An event or a fact only marks what it may have changed; `of` counts the marked nodes anew before anyone reads. Nothing
here is journaled: all of it follows from ledger and sight, and a restart counts it afresh.
"""

from muster.daemon.coordinator.core.state import events as e
from muster.daemon.coordinator.core.state import facts as f
from muster.daemon.coordinator.core.state.durable_state import Gang, Ledger
from muster.daemon.coordinator.core.state.gang_index import Tally
from muster.daemon.coordinator.core.state.observed_state import Sight
from muster.daemon.coordinator.core.state.state_tables import OUT_OF_SERVICE


class Tallies:
    """Of `ledger` and `sight`, which change by the events and facts that are noted here and in no other way.

    `out`: the nodes that are out of service.
    """

    def __init__(self, ledger: Ledger, sight: Sight) -> None:
        self._ledger = ledger
        self._sight = sight
        self._gangs: dict[str, Tally] = {}
        self._homes: dict[str, list[str]] = {}
        self.out = {node.name for node in ledger.nodes.values() if node.verdict in OUT_OF_SERVICE}
        for gang in ledger.gangs.values():
            for node in () if gang.final else gang.members:
                self._homes.setdefault(node, []).append(gang.id)

    def of(self, gang: Gang) -> Tally:
        """The gang's tally, as of now."""
        tally = self._gangs.get(gang.id)
        if tally is None:
            tally = self._gangs[gang.id] = Tally.begin(gang)
        if tally.marked:
            agents = self._sight.gang(gang.id).agents
            for node in tally.marked:
                tally.recount(gang, node, agents.get(node), node not in self.out)
            tally.marked.clear()
        return tally

    def homes(self, node: str) -> list[Gang]:
        """The gangs that go on and have `node` as a member, be it an outgoing one; the oldest first."""
        gangs = (self._ledger.gangs.get(id) for id in self._homes.get(node, ()))
        found = [gang for gang in gangs if gang is not None and not gang.final and node in gang.members]
        return sorted(found, key=lambda gang: gang.registered_at)

    def note(self, event: e.Event) -> None:
        """Mark what `event`, which was observed, changes."""
        if isinstance(event, e.AgentAttached | e.AgentReported | e.AgentGone):
            self._mark(event.gang, event.node)
        if isinstance(event, e.AgentAttached | e.AgentReported) and event.gang in self._gangs:
            self._gangs[event.gang].said.add(event.node)
        if isinstance(event, e.AgentGone | e.NeighbourAccused) and event.gang in self._gangs:
            self._gangs[event.gang].quiet_at = 0.0  # a closed connection may be the proof that was missing

    def note_fact(self, fact: f.Fact) -> None:
        """Mark what `fact`, which holds by now, changes."""
        match fact:
            case f.MemberJoined():
                self._homes[fact.node] = [g.id for g in self.homes(fact.node) if g.id != fact.gang] + [fact.gang]
                self._member(fact.gang, fact.node)
            case f.MemberOut():
                self._member(fact.gang, fact.node)
            case f.SlurmOwed():
                self._mark(fact.gang, fact.node)
            case f.NodeJudged():
                self._judged(fact)
            case (
                f.PhaseChanged() | f.GenerationFenced() | f.GenerationStarted() | f.Flushing() | f.JobRestarted()
                | f.GangEnded() | f.GangForgotten() | f.PoolClosed()
            ):  # fmt: skip
                self._gangs.pop(fact.gang, None)
            case _:
                pass

    def _mark(self, gang: str, node: str) -> None:
        if node and (tally := self._gangs.get(gang)):
            tally.marked.add(node)

    def _member(self, gang: str, node: str) -> None:
        self._mark(gang, node)
        if tally := self._gangs.get(gang):
            tally.forget_members()

    def _judged(self, fact: f.NodeJudged) -> None:
        if fact.verdict in OUT_OF_SERVICE:
            self.out.add(fact.node)
        else:
            self.out.discard(fact.node)
        for gang in self.homes(fact.node):
            self._mark(gang.id, fact.node)
