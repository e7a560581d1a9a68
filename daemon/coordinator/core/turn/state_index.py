"""The indexes of all gangs; and for each node, its gangs and whether it is out of service.

An event or a fact only marks the nodes whose counts it may change. `of` counts the marked nodes again before anyone
reads. Nothing here is journaled: all of it follows from durable and observed state, and a restart counts again.
"""

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedState
from muster.daemon.coordinator.core.turn.gang_index import GangIndex
from muster.node_health import OUT_OF_SERVICE, NodeHealth


class StateIndex:
    """The index of `state` and `observed`, which change only by the events and facts that are noted here.

    `out_of_service`: names of the nodes that are out of service. `degraded`: names of the DEGRADED nodes. `drained`:
    names of the nodes that operators have drained. `drained_in_slurm`: names of the nodes on which Slurm starts nothing
    more.
    """

    def __init__(self, state: DurableState, observed: ObservedState) -> None:
        self._state = state
        self._observed = observed
        self._gangs: dict[str, GangIndex] = {}
        self._homes: dict[str, list[str]] = {}
        self.out_of_service = {node.name for node in state.nodes.values() if node.health in OUT_OF_SERVICE}
        self.degraded = {node.name for node in state.nodes.values() if node.health is NodeHealth.DEGRADED}
        self.drained = {node.name for node in state.nodes.values() if node.drain is not None}
        self.drained_in_slurm = {name for name, node in observed.nodes.items() if node.drain is not None}
        for gang in state.gangs.values():
            for node in () if gang.final else gang.roster.members:
                self._homes.setdefault(node, []).append(gang.id)

    def of(self, gang: Gang) -> GangIndex:
        """The index of the gang, up to date."""
        index = self._gangs.get(gang.id)
        if index is None:
            index = self._gangs[gang.id] = GangIndex.of_gang(gang)
        if index.to_recount:
            agents = self._observed.gang(gang.id).agents
            for node in index.to_recount:
                index.recount(gang, node, agents.get(node), node not in self.out_of_service)
            index.to_recount.clear()
        return index

    @property
    def unwanted(self) -> set[str]:
        """Names of the nodes in service that get ranks only if no other node is left."""
        return self.degraded | self.drained | self.drained_in_slurm

    def gangs_of(self, node: str) -> list[Gang]:
        """The gangs that are not final and have `node` as a member, removed members too; the oldest first."""
        gangs = (self._state.gangs.get(id) for id in self._homes.get(node, ()))
        found = [gang for gang in gangs if gang is not None and not gang.final and node in gang.roster.members]
        return sorted(found, key=lambda gang: gang.account.registered_at)

    def note_event(self, event: events.Event) -> None:
        """Mark what `event` changes. The observed state holds the event already."""
        if isinstance(event, events.AgentAttached | events.AgentReported | events.AgentDisconnected):
            self._mark(event.gang, event.node)
        if isinstance(event, events.FabricSeen):
            for index in self._gangs.values():
                index.forget_fabric()
        elif isinstance(event, events.SlurmJobChanged) and event.gang in self._gangs:
            self._gangs[event.gang].forget_fabric()  # its partition may use another topology
        elif isinstance(event, events.SlurmNodeChanged):
            (self.drained_in_slurm.discard if event.drain is None else self.drained_in_slurm.add)(event.node)
        if isinstance(event, events.AgentAttached | events.AgentReported) and event.gang in self._gangs:
            self._gangs[event.gang].reported_since.add(event.node)
        if isinstance(event, events.AgentDisconnected | events.PeerAccused) and event.gang in self._gangs:
            self._gangs[event.gang].time_fenced_at = 0.0  # a closed connection may prove that a process has ended

    def note_fact(self, fact: facts.Fact) -> None:
        """Mark what `fact` changes. The durable state holds the fact already."""
        match fact:
            case facts.MemberJoined():
                self._homes[fact.node] = [g.id for g in self.gangs_of(fact.node) if g.id != fact.gang] + [fact.gang]
                self._mark_membership(fact.gang, fact.node)
            case facts.MemberRemoved():
                self._mark_membership(fact.gang, fact.node)
            case facts.FabricNoted():
                if index := self._gangs.get(fact.gang):
                    index.forget_fabric()
            case facts.SlurmCallOwed() | facts.NodeChecked():
                self._mark(fact.gang, fact.node)
            case facts.NodeJudged():
                self._mark_health(fact)
            case facts.NodeDrainRequested():
                self.drained.add(fact.node)
            case facts.NodeDrainEnded():
                self.drained.discard(fact.node)
            case (
                facts.PhaseChanged() | facts.GenerationFenced() | facts.GenerationStarted() | facts.FlushOrdered()
                | facts.JobRestarted() | facts.GangEnded() | facts.GangForgotten() | facts.PoolRequestClosed()
            ):  # fmt: skip
                self._gangs.pop(fact.gang, None)
            case _:
                pass

    def _mark(self, gang: str, node: str) -> None:
        if node and (index := self._gangs.get(gang)):
            index.to_recount.add(node)

    def _mark_membership(self, gang: str, node: str) -> None:
        self._mark(gang, node)
        if index := self._gangs.get(gang):
            index.note_membership_change()

    def _mark_health(self, fact: facts.NodeJudged) -> None:
        if fact.health in OUT_OF_SERVICE:
            self.out_of_service.add(fact.node)
        else:
            self.out_of_service.discard(fact.node)
        if fact.health is NodeHealth.DEGRADED:
            self.degraded.add(fact.node)
        else:
            self.degraded.discard(fact.node)
        for gang in self.gangs_of(fact.node):
            self._mark(gang.id, fact.node)
