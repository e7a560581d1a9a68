"""What is seen at the moment: open streams, last contacts, statuses, probes. Nothing here is journaled; after a restart
it is seen again, because agents and daemons attach anew with whole statuses."""

from dataclasses import dataclass, field

from muster.daemon.coordinator.core import events as e
from muster.daemon.coordinator.core.events import Silence, Status

COORDINATOR = "coordinator"
"""The coordinator as a witness of a closed connection."""


@dataclass(slots=True)
class Probe:
    """One round of asking after a node. `asked` are the witnesses; `silences` their answers (None: it answered)."""

    number: int
    node: str
    witnesses: tuple[str, ...]
    asked_at: float
    step_at: int
    silences: dict[str, Silence | None] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Every witness has answered."""
        return set(self.witnesses) <= set(self.silences)


@dataclass(slots=True)
class AgentSight:
    """One agent. `fenced_at`: when it first reported the gang's current fence as done."""

    node: str
    incarnation: str
    attached: bool
    heard_at: float
    status: Status
    reported_at: float = 0.0
    gone_at: float = 0.0
    step: int = field(init=False)
    """Newest finished step that a rank here has declared."""

    def __post_init__(self) -> None:
        self._note_step()

    def report(self, status: Status, now: float) -> None:
        """A new whole status arrived."""
        self.status, self.reported_at, self.heard_at = status, now, now
        self._note_step()

    def _note_step(self) -> None:
        self.step = max((rank.step for rank in self.status.ranks), default=0)


@dataclass(slots=True)
class GangSight:
    """What is seen of a gang. `suspected` maps a node to when the suspicion arose, `closed` to the
    witnesses whose connection to its agent was ended by its own kernel: a proof that the process has ended."""

    agents: dict[str, AgentSight] = field(default_factory=dict)
    probes: dict[str, Probe] = field(default_factory=dict)
    suspected: dict[str, float] = field(default_factory=dict)
    cleared_at: dict[str, float] = field(default_factory=dict)
    closed: dict[str, set[str]] = field(default_factory=dict)
    job_ended: str | None = None
    failed_at: float = 0.0
    cancel: str = ""
    flush: str = ""
    newest: int | None = None
    """`step`, where no status has come since it was looked for."""

    def attached(self, node: str) -> bool:
        """The node's agent has an open stream."""
        agent = self.agents.get(node)
        return agent is not None and agent.attached

    def status(self, node: str) -> Status:
        """Newest status of the node's agent; an empty one where there is none."""
        agent = self.agents.get(node)
        return agent.status if agent else Status()

    @property
    def step(self) -> int:
        """Newest finished step that any rank has declared."""
        if self.newest is None:
            self.newest = max((agent.step for agent in self.agents.values()), default=0)
        return self.newest


@dataclass(slots=True)
class NodeSight:
    """One node's daemon, and the fatal signal that was last seen there, if any."""

    attached: bool = False
    incarnation: str = ""
    heard_at: float = 0.0
    judgement: str = ""
    reason: str = ""
    signalled_at: float = 0.0


@dataclass(slots=True)
class Sight:
    """All that is seen. `since`: when this coordinator began to look (contacts before that are unknown)."""

    since: float
    nodes: dict[str, NodeSight] = field(default_factory=dict)
    gangs: dict[str, GangSight] = field(default_factory=dict)
    probes: int = 0
    echoing: set[str] = field(default_factory=set)
    """Nodes with a signal that may be the echo of a peer's loss."""

    def node(self, name: str) -> NodeSight:
        """The sight of that node, made if there is none."""
        if (found := self.nodes.get(name)) is None:
            found = self.nodes[name] = NodeSight()
        return found

    def gang(self, gang: str) -> GangSight:
        """The sight of that gang, made if there is none."""
        if (found := self.gangs.get(gang)) is None:
            found = self.gangs[gang] = GangSight()
        return found

    def heard_at(self, gang: str, node: str) -> float:
        """When the coordinator last heard the agent of `gang` on `node`; not earlier than `since`."""
        agent = self.gang(gang).agents.get(node)
        return max(self.since, agent.heard_at if agent else 0.0)


def observe(sight: Sight, event: e.Event, now: float) -> None:
    """Note what `event` shows, at time `now` (seconds)."""
    match event:
        case e.AgentAttached():
            seen = sight.gang(event.gang)
            seen.agents[event.node] = AgentSight(event.node, event.incarnation, True, now, event.status, now)
            seen.newest = None
            clear(seen, event.node, now)
        case e.AgentReported() | e.AgentGone():
            _observe_agent(sight, event, now)
        case e.AgentHeard():
            agent = sight.gang(event.gang).agents.get(event.node)
            if agent:
                agent.heard_at = now
        case e.NeighbourAccused():
            _accused(sight.gang(event.gang), event, now)
        case e.Probed():
            _observe_probe(sight.gang(event.gang), event)
        case e.CancelAsked():
            sight.gang(event.gang).cancel = event.by
        case e.FlushAsked():
            sight.gang(event.gang).flush = event.by
        case e.JobSeen():
            sight.gang(event.gang).job_ended = event.ended
        case e.NodeAttached() | e.NodeGone() | e.NodeHeard() | e.NodeSignalled():
            _observe_node(sight.node(event.node), event, now)
            if isinstance(event, e.NodeSignalled) and event.judgement == "echo":
                sight.echoing.add(event.node)
        case _:
            pass


def _observe_agent(sight: Sight, event: e.AgentReported | e.AgentGone, now: float) -> None:
    seen = sight.gang(event.gang)
    agent = seen.agents.get(event.node)
    if agent is None or agent.incarnation != event.incarnation:
        return  # an earlier process of that node
    if isinstance(event, e.AgentGone):
        agent.attached, agent.gone_at = False, now
        seen.suspected.setdefault(event.node, now)
        seen.closed.setdefault(event.node, set()).add(COORDINATOR)
    else:
        agent.report(event.status, now)
        seen.newest = None


def _accused(seen: GangSight, event: e.NeighbourAccused, now: float) -> None:
    seen.suspected.setdefault(event.node, now)
    if event.silence is Silence.CLOSED:
        seen.closed.setdefault(event.node, set()).add(event.witness)


def _observe_probe(seen: GangSight, event: e.Probed) -> None:
    probe = seen.probes.get(event.node)
    if probe and probe.number == event.probe:
        probe.silences[event.witness] = event.silence


def _observe_node(node: NodeSight, event: e.NodeEvent, now: float) -> None:
    match event:
        case e.NodeAttached():
            node.attached, node.incarnation, node.heard_at = True, event.incarnation, now
        case e.NodeGone():
            if node.incarnation == event.incarnation:
                node.attached = False
        case e.NodeHeard():
            node.heard_at = now
        case e.NodeSignalled():
            if event.judgement in ("unfit", "echo"):
                node.judgement, node.reason, node.signalled_at = event.judgement, event.reason, now
        case _:
            pass


def clear(seen: GangSight, node: str, now: float) -> None:
    """Drop every suspicion of `node`: an agent that answers clears every accusation."""
    seen.suspected.pop(node, None)
    seen.probes.pop(node, None)
    seen.closed.pop(node, None)
    seen.cleared_at[node] = now
