"""The observed state: open streams, last contacts, statuses and probes.

Nothing here is journaled. After a restart the coordinator observes it again, because agents and daemons attach anew
with whole statuses. Times are seconds on the coordinator's clock; 0 means never.
"""

from dataclasses import dataclass, field

from muster.daemon.coordinator.core.losses.loss_watch import LossWatch
from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.block_times import GangBlocks
from muster.daemon.coordinator.core.state.events import AgentStatus, Silence, Version
from muster.daemon.coordinator.core.state.step_pace import FlushCosts, FlushPace, StepPace
from muster.fabric.model.level import Level
from muster.fabric.sources.node_reports import NodeReport

COORDINATOR = "coordinator"
"""The coordinator as a witness of a closed connection (ObservedGang.closed_by)."""
AGENT, MUSTERD = "agent", "musterd"
"""The coordinator's own two probes: of the agent, and of the node's daemon."""
NODE_HEARTBEAT_S = 5.0
"""Seconds between two heartbeats of a node's daemon, as every daemon is told."""
HEARTBEAT_TIMEOUT_S = 11.0
"""Seconds without a heartbeat after which an attached agent, or a node's daemon, counts as silent. An agent sends a
heartbeat every 5 s: two are missed, and a margin. Watched peers notice a silent agent sooner."""

LOSS = "loss"
"""The name under which a script reports its loss."""
HELD_AFTER_LAUNCH = "launch failed requeued held"
"""Slurm's reason for the hold of a job whose launch failed. Slurm writes it with blanks or with underscores."""


@dataclass(slots=True)
class Probe:
    """One round of probes of a node.

    `silence_by_witness`: the answer of each witness so far; None if the node answered that witness.
    """

    number: int
    node: str
    witnesses: tuple[str, ...]
    asked_at: float
    silence_by_witness: dict[str, Silence | None] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Every witness has answered."""
        return set(self.witnesses) <= set(self.silence_by_witness)


@dataclass(slots=True)
class Stall:
    """A gang that finishes no step.

    `asked_at`: when its agents were probed. `unanswered`: agents that have not answered yet. `answered_at`: when the
    last of them had answered; 0 while some have not.
    """

    asked_at: float
    unanswered: set[str]
    answered_at: float = 0.0


@dataclass(slots=True)
class ObservedAgent:
    """One agent. `attached_at`: when its stream was opened and its order sent. `gone_at`: when its stream ended.
    `reported_at`: when its newest status came."""

    node: str
    incarnation: str
    attached: bool
    heard_at: float
    status: AgentStatus
    reported_at: float = 0.0
    gone_at: float = 0.0
    attached_at: float = 0.0


@dataclass(frozen=True, slots=True)
class ObservedBatch:
    """The batch process of one run of a job. `heard_at`: when it last sent a heartbeat. `unlaunched`,
    `failed`, `interrupted`, `split_segments`: see events.BatchHeartbeat."""

    job: int
    restart_count: int
    heard_at: float
    unlaunched: tuple[str, ...] = ()
    failed: tuple[tuple[str, int], ...] = ()
    interrupted: str = ""
    split_segments: str = ""

    def is_of(self, job: int, restart_count: int) -> bool:
        """The batch process belongs to this run of this job."""
        return (self.job, self.restart_count) == (job, restart_count)


@dataclass(slots=True)
class ObservedGang:
    """What is observed of one gang.

    `suspected_since`: node → when the suspicion arose. `closed_by`: node → witnesses whose connection to the agent was
    closed by the node's own kernel, which proves that the process has ended. `reachability`: node → whether the
    coordinator's own probes reach the agent, and since when.
    """

    agents: dict[str, ObservedAgent] = field(default_factory=dict)
    probes: dict[str, Probe] = field(default_factory=dict)
    suspected_since: dict[str, float] = field(default_factory=dict)
    kernel_only_since: dict[str, float] = field(default_factory=dict)
    """Node → start of the first round of probes that only the kernel has answered."""
    cleared_at: dict[str, float] = field(default_factory=dict)
    """Node → when an answer last cleared a suspicion."""
    closed_by: dict[str, set[str]] = field(default_factory=dict)
    reachability: dict[str, tuple[bool, float]] = field(default_factory=dict)
    growth_looked_at: float = 0.0
    """When it was last looked whether the gang can grow."""
    job_ended: str | None = None
    job_end_words: str = ""
    """Why Slurm could not start the job that has ended, in words; empty: nothing is known of that."""
    job_restarts: int = 0
    job_nodes: tuple[str, ...] = ()
    held_nodes: dict[int, frozenset[str]] = field(default_factory=dict)
    """Job → the nodes that it has, as Slurm says: the gang's job while it runs, and pool jobs."""
    limit_at: float | None = None
    limit_s: float = 0.0
    """When the time limit ends the job (seconds), and how long the whole limit is."""
    start_at: float | None = None
    """When this run of the job started; while the job waits, when Slurm expects it to start. None: not known."""
    committed: tuple[Version, float] | None = None
    """The newest committed version that was reported, and when this coordinator saw it become the newest (seconds; 0:
    it was committed before)."""
    pending_reason: str = ""
    """Slurm's word for why the job does not start."""
    completing: tuple[str, ...] = ()
    """The nodes on which the last run of a job that waits has not ended."""
    job_pending: bool = False
    """Slurm says that the job is pending."""
    own_nodes: tuple[str, ...] = ()
    """`GangSpec.own_nodes` in the newest run of the job, as its agents say."""
    batch_host: str = ""
    """The node of the batch script, as Slurm says, also after the job has lost it; empty: not known."""
    suspended_jobs: set[int] = field(default_factory=set)
    """Jobs of which Slurm has stopped all processes, and will let them go on: their silence is no evidence."""
    released_at_restarts: int | None = None
    """Restart count of the job when it was last released after a launch that failed."""
    job_running: tuple[int, float] | None = None
    """Restart count of the running job, and since when it was observed; None while the job does not run."""
    partition: str = ""
    """That of the job, as Slurm says; empty: Slurm has not said it yet."""
    batch: ObservedBatch | None = None
    first_attach_at: float = 0.0
    """When the first agent of this run of the job attached."""
    last_attach_at: float = 0.0
    """When any agent last attached."""
    dead_node_seen_at: float = 0.0
    """When a node of the job was last found silent before its agent attached."""
    relaunched_at: float = 0.0
    """When an agent of this run was started again: srun had ended, and was launched again without the dead node."""
    ranks_ended_at: float = 0.0
    """When the last rank had ended that this preflight or recovery has fenced; before its phase began: not known."""
    last_step_at: float = 0.0
    """When a step that was new to the gang was last reported."""
    last_step: tuple[int, int] = (0, 0)
    """The newest reported step: (generation, step)."""
    pace: StepPace = field(default_factory=StepPace)
    blocks: GangBlocks = field(default_factory=GangBlocks)
    """Step times of the ranks, split in compute and wait."""
    losses: LossWatch = field(default_factory=LossWatch)
    stall: Stall | None = None
    agent_failure_since: float = 0.0
    """Since when agents report errors that no order mends, or SIGTERM; 0: none does."""
    cancel_requested_by: str = ""
    """Who has asked to cancel the gang; empty: nobody, or the request is carried out."""
    flush_costs: FlushCosts = field(default_factory=FlushCosts)
    flush_pace: FlushPace = field(default_factory=FlushPace)
    flush_requested_by: str = ""
    """Who has asked for a durable checkpoint; empty: nobody, or the request is carried out."""
    many_stuck_at: float = 0.0
    """When ranks were last seen to outlive SIGKILL on most of its nodes at once."""
    flushed_for: set[str] = field(default_factory=set)
    """DEGRADED nodes for which a durable checkpoint was asked for."""

    def is_attached(self, node: str) -> bool:
        """The node's agent has an open stream."""
        agent = self.agents.get(node)
        return agent is not None and agent.attached

    def status(self, node: str) -> AgentStatus:
        """Newest status of the node's agent; an empty one if there is none."""
        agent = self.agents.get(node)
        return agent.status if agent else AgentStatus()

    @property
    def is_held_after_launch(self) -> bool:
        """Slurm holds the job because its launch failed."""
        return self.job_pending and self.pending_reason.replace("_", " ") == HELD_AFTER_LAUNCH

    def note_answer(self, node: str) -> None:
        """The node's agent has sent something, or was reached."""
        if self.stall is not None:
            self.stall.unanswered.discard(node)

    def end_of_run(self, run: int) -> str:
        """Slurm's word for how the job ended in the run after `run` restarts, or in a later one; empty: it has not."""
        return (self.job_ended or "") if self.job_restarts >= run else ""

    def is_requeued_after(self, run: int) -> bool:
        """Slurm has put the job back into its queue after the run of `run` restarts, or has started it again."""
        return self.job_restarts > run and not self.job_ended

    @property
    def step_number(self) -> int:
        """Newest finished step of the newest generation that has finished one."""
        return self.last_step[1]


@dataclass(slots=True)
class ObservedNode:
    """One node's daemon. `heard_at`: when its stream last brought something. `answered_at`: when it last answered a
    probe. `unanswered_at`: when a probe last met no process. `down`: Slurm has the node DOWN. `in_slurm`: Slurm has
    said what it has of the node. `drain`: Slurm starts nothing more there. `report`: the hardware that its daemon has
    reported; None: it has not."""

    attached: bool = False
    incarnation: str = ""
    heard_at: float = 0.0
    answered_at: float = 0.0
    unanswered_at: float = 0.0
    down: bool = False
    in_slurm: bool = False
    drain: events.SlurmDrain | None = None
    report: NodeReport | None = None


@dataclass(slots=True)
class ObservedState:
    """All that is observed. `observing_since`: when this coordinator began to observe; earlier contacts are unknown."""

    observing_since: float
    nodes: dict[str, ObservedNode] = field(default_factory=dict)
    gangs: dict[str, ObservedGang] = field(default_factory=dict)
    last_probe_number: int = 0
    fabric: events.FabricSeen | None = None
    """What Slurm and the site say of the network; None: it was not read yet."""
    many_stuck_at: float = 0.0
    """When ranks were last seen to outlive SIGKILL on more nodes of the site at once than fail by chance."""

    def node(self, name: str) -> ObservedNode:
        """What is observed of that node; a new record if there is none."""
        if (found := self.nodes.get(name)) is None:
            found = self.nodes[name] = ObservedNode()
        return found

    def gang(self, gang: str) -> ObservedGang:
        """The observed state of that gang, made if there is none."""
        if (found := self.gangs.get(gang)) is None:
            found = self.gangs[gang] = ObservedGang()
        return found

    def leaf(self, node: str) -> str:
        """The name of the leaf switch of `node`; empty if there is none, or if it is not known."""
        return self._domain_name(node, Level.LEAF)

    def pod(self, node: str) -> str:
        """The name of the pod of `node`; empty if there is none, or if it is not known."""
        return self._domain_name(node, Level.POD)

    def _domain_name(self, node: str, level: Level) -> str:
        topologies = self.fabric.topologies if self.fabric is not None else ()
        names = (one.fabric.name_at(node, level) for one in sorted(topologies, key=lambda one: not one.default))
        return next(filter(None, names), "")

    def agent_heard_at(self, gang: str, node: str) -> float:
        """When the coordinator last heard the agent of `gang` on `node`; never earlier than `observing_since`."""
        agent = self.gang(gang).agents.get(node)
        return max(self.observing_since, agent.heard_at if agent else 0.0)


def observe(observed: ObservedState, event: events.Event, now: float) -> None:
    """Note what `event` shows, at time `now` (seconds)."""
    match event:
        case events.AgentAttached():
            _observe_attachment(observed.gang(event.gang), event, now)
        case events.AgentReported() | events.AgentDisconnected():
            _observe_agent(observed, event, now)
        case events.AgentHeartbeat():
            gang = observed.gang(event.gang)
            if agent := gang.agents.get(event.node):
                agent.heard_at = now
                gang.note_answer(event.node)
        case events.BatchHeartbeat(unsupervised=""):
            gang = observed.gang(event.gang)
            known = gang.batch
            if known is None or known.job != event.job or known.restart_count <= event.restart_count:
                gang.batch = ObservedBatch(
                    event.job,
                    event.restart_count,
                    now,
                    event.unlaunched,
                    event.failed,
                    event.interrupted,
                    event.split_segments,
                )  # otherwise the process belongs to an earlier run
        case events.PeerAccused():
            _observe_accusation(observed.gang(event.gang), event, now)
        case events.ProbeAnswered():
            _observe_probe(observed.gang(event.gang), event, now)
            if event.witness == MUSTERD:
                _observe_probe_of_daemon(observed.node(event.node), event.silence, now)
        case events.CancelRequested():
            observed.gang(event.gang).cancel_requested_by = event.by
        case events.FlushRequested():
            observed.gang(event.gang).flush_requested_by = event.by
        case events.SlurmJobChanged():
            _observe_job(observed.gang(event.gang), event, now)
        case events.PoolJobChanged():
            gang = observed.gang(event.gang)
            gang.held_nodes[event.job] = frozenset(event.nodes)
            _observe_suspension(gang, event.job, event.suspended, now)
        case events.NodeHardwareReported():
            observed.node(event.node).report = event.report
        case events.NodeAttached() | events.NodeDisconnected() | events.NodeHeartbeat() | events.SlurmNodeChanged():
            _observe_node(observed.node(event.node), event, now)
        case events.FabricSeen():
            observed.fabric = event
        case _:
            pass


def _observe_attachment(gang: ObservedGang, event: events.AgentAttached, now: float) -> None:
    gang.pace.note_status(gang.status(event.node), event.status, now)
    gang.blocks.note_status(event.status)
    gang.last_step = max(gang.last_step, _newest_step(event.status))  # an old step: it proves no progress now
    gang.agents[event.node] = ObservedAgent(
        event.node, event.incarnation, True, now, event.status, now, attached_at=now
    )
    gang.last_attach_at = now
    _note_committed(gang, event.status.committed, 0.0)
    clear_suspicion(gang, event.node, now)


def _observe_job(gang: ObservedGang, event: events.SlurmJobChanged, now: float) -> None:
    gang.job_ended, gang.job_restarts = event.ended, event.restart_count
    gang.limit_at, gang.limit_s, gang.start_at = event.limit_at, event.limit_s, event.start_at
    gang.pending_reason, gang.partition = event.pending_reason, event.partition
    gang.job_end_words, gang.completing = event.end_words, event.completing
    gang.job_nodes = event.nodes
    gang.job_pending = not event.ended and not event.nodes
    gang.held_nodes.pop(event.job, None)
    if event.nodes and not event.ended:
        gang.held_nodes[event.job] = frozenset(event.nodes)
    if event.ended or not event.nodes:
        gang.job_running = None
    elif gang.job_running is None or gang.job_running[0] != event.restart_count or event.job in gang.suspended_jobs:
        gang.job_running = (event.restart_count, now)
    gang.batch_host = event.batch_host
    _observe_suspension(gang, event.job, event.suspended, now)


def _observe_suspension(gang: ObservedGang, job: int, suspended: bool, now: float) -> None:
    if suspended is (job in gang.suspended_jobs):
        return
    gang.suspended_jobs ^= {job}
    for node in gang.agents:
        clear_suspicion(gang, node, now)


def _observe_agent(observed: ObservedState, event: events.AgentReported | events.AgentDisconnected, now: float) -> None:
    gang = observed.gang(event.gang)
    agent = gang.agents.get(event.node)
    if agent is None or agent.incarnation != event.incarnation:
        return  # a message of an earlier process
    if isinstance(event, events.AgentDisconnected):
        agent.attached, agent.gone_at = False, now
        gang.suspected_since.setdefault(event.node, now)
        gang.closed_by.setdefault(event.node, set()).add(COORDINATOR)
    else:
        gang.pace.note_status(agent.status, event.status, now)
        gang.blocks.note_status(event.status)
        _note_loss(gang.losses, event.node, event.status)
        gang.flush_pace.note(event.node, event.status.flush_progress, now)
        if (newest := _newest_step(event.status)) > gang.last_step:
            gang.pace.note_step(gang.last_step, newest, now)
            gang.last_step_at, gang.last_step = now, newest
        gang.note_answer(event.node)
        _note_committed(gang, event.status.committed, now)
        agent.status, agent.reported_at, agent.heard_at = event.status, now, now


def _note_loss(losses: LossWatch, node: str, status: AgentStatus) -> None:
    """The median of the node's ranks counts."""
    if status.training is not None:
        for number in status.training.numbers:
            if number.name == LOSS:
                losses.add(status.training.generation, node, number.step, number.median)


def _note_committed(gang: ObservedGang, version: Version | None, at: float) -> None:
    if version is not None and (gang.committed is None or version > gang.committed[0]):
        gang.committed = version, at


def _newest_step(status: AgentStatus) -> tuple[int, int]:
    """(generation, step): a generation may start again below the last step of the one before."""
    return max(((rank.generation, rank.step) for rank in status.ranks if rank.progressed), default=(0, 0))


def _observe_accusation(gang: ObservedGang, event: events.PeerAccused, now: float) -> None:
    gang.suspected_since.setdefault(event.node, now)
    if event.silence is Silence.CLOSED:
        gang.closed_by.setdefault(event.node, set()).add(event.witness)


def _observe_probe(gang: ObservedGang, event: events.ProbeAnswered, now: float) -> None:
    reaches = event.silence is None
    if event.witness == AGENT and gang.reachability.get(event.node, (not reaches, now))[0] != reaches:
        gang.reachability[event.node] = (reaches, now)
    if event.witness == AGENT and reaches:
        gang.note_answer(event.node)
    probe = gang.probes.get(event.node)
    if probe and probe.number == event.probe:
        probe.silence_by_witness[event.witness] = event.silence


def _observe_probe_of_daemon(node: ObservedNode, silence: Silence | None, now: float) -> None:
    if silence is None:
        node.answered_at = now
    elif silence is not Silence.KERNEL_ONLY:  # strangers may hold all connections of a daemon that lives
        node.unanswered_at = now


def _observe_node(node: ObservedNode, event: events.NodeEvent, now: float) -> None:
    match event:
        case events.NodeAttached():
            node.attached, node.incarnation, node.heard_at = True, event.incarnation, now
        case events.NodeDisconnected():
            if node.incarnation == event.incarnation:
                node.attached = False
        case events.NodeHeartbeat():
            node.heard_at = now
        case events.SlurmNodeChanged():
            node.down, node.in_slurm, node.drain = event.down, True, event.drain
        case _:
            pass


def clear_suspicion(gang: ObservedGang, node: str, now: float) -> None:
    """Drop every suspicion and accusation of `node`: its agent has answered."""
    stop_suspecting(gang, node)
    gang.closed_by.pop(node, None)
    gang.cleared_at[node] = now


def stop_suspecting(gang: ObservedGang, node: str) -> None:
    """Drop the suspicion of `node` and its probes."""
    for found in (gang.suspected_since, gang.probes, gang.kernel_only_since):
        found.pop(node, None)
