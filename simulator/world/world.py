"""The whole simulated cluster of one run: nodes, network, Slurm, agents, and one coordinator after the other."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster.daemon.agent.ranks.rank_idleness import QUARTERS
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.events import Silence, Version
from muster.daemon.coordinator.core.state.fact_text import describe
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.limits import Limits, Pool
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.simulator.coverage.counts import Coverage
from muster.simulator.environment.machine import Machine
from muster.simulator.environment.network import (
    COORDINATOR,
    RELIABLE,
    Network,
    NetworkConditions,
    PeerCallConditions,
    PeerCalls,
)
from muster.simulator.environment.schedule import Durations, DurationSampler, Schedule
from muster.simulator.environment.unreliable_slurm import UnreliableSlurm
from muster.simulator.world.agent import Agent, Rank
from muster.simulator.world.coordinator import Coordinator
from muster.simulator.world.durable_storage import DurableStorage
from muster.simulator.world.kept_memory import KeptMemoryStores
from muster.simulator.world.node_daemon import NodeDaemon
from muster.simulator.world.observer import Observer
from muster.simulator.world.slurm_jobs import JobSubmission, SlurmJobs
from muster.simulator.world.snapshot_crashes import SnapshotCrashes
from muster.simulator.world.step_times import StepTimes
from muster.simulator.world.training import Training
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.v1 import agent_pb2 as pb

START_S = 1000.0
"""Virtual time at the start of a run, in seconds. It is far from 0.0, which means never."""
DAEMON_RESTART_DELAY_S = 1.0
"""Seconds until systemd starts a node daemon again."""


_MEMORY = Path("/dev/shm")
POOL = Pool(("--partition=shared",), wait_s=12.0)
"""The site's shared pool: every node that runs no job."""
NO_LIMITS = Limits(
    nodes_per_hour=1000, fraction=1.0, nodes_at_least=1000, reported_drains_per_hour_of_job=1000,
    reported_drains_per_hour_of_user=1000, swaps_per_hour=1000, pool=POOL,
)  # fmt: skip
"""Limits that no run reaches."""


def make_folder(prefix: str) -> Path:
    """Make the folder of one run: in memory, for a coordinator waits for the disk at each commit."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=_MEMORY if _MEMORY.is_dir() else None))


@dataclass(frozen=True, slots=True)
class Site:
    """What a simulated cluster consists of: its nodes, the network conditions, the durations, what becomes of calls
    between agents, and the limits of the site."""

    leaves: Sequence[tuple[str, str]]
    """(node, leaf) of every node."""
    network_conditions: NetworkConditions = field(default_factory=NetworkConditions)
    durations: Durations = field(default_factory=Durations)
    limits: Limits = NO_LIMITS
    fabric: events.FabricSeen | None = None
    """The network as Slurm and the site describe it; None: the coordinator knows the leaf of each agent only."""
    peer_calls: PeerCallConditions = RELIABLE
    standby: bool = False
    """Two coordinators share the journal's folder. Each life of a coordinator is a new term of the lease."""


class World:
    """One run.

    Args:
        site: the simulated cluster.
        seed: all random numbers follow from it.
        folder: the journal's folder.
        observer: makes the observer, which is told of everything that happens.
        trace: note every event of the core in the transcript.
    """

    def __init__(
        self, site: Site, seed: int, folder: Path, observer: Callable[[World], Observer], trace: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.trace = trace
        self.notes: list[tuple[float, object]] = []
        self.limits = site.limits
        self.schedule = Schedule(START_S)
        self.network = Network(self.schedule, self.rng, site.network_conditions)
        self.durations = DurationSampler(site.durations, self.rng)
        self.fabric = site.fabric
        """What the coordinator reads of the network, each time that it starts; None: nothing."""
        self.machines = {name: Machine(name, leaf) for name, leaf in site.leaves}
        self.coverage = Coverage()
        self.observer = observer(self)
        self.durable_storage = DurableStorage(self)
        self.jobs = SlurmJobs(self)
        self.kept_memory = KeptMemoryStores(self, seed)
        self.step_times = StepTimes(self.schedule, seed)
        self.cluster = FakeCluster(
            list(self.machines),
            now=lambda: self.schedule.now,
            leaves=dict(site.leaves),
            on_change=self.jobs.job_changed,
        )
        self.slurm = UnreliableSlurm(self.cluster, self.rng)
        self.agents: dict[tuple[str, str], Agent] = {}
        self.daemons: dict[str, NodeDaemon] = {}
        self.peer_calls = PeerCalls(site.peer_calls, random.Random(f"peer calls {seed}"))
        self.snapshot_crashes = SnapshotCrashes()
        self.armed_faults: list[tuple[Phase, Callable[[str], None]]] = []
        self.permanent_cuts: set[tuple[str, str]] = set()
        """Directed links that stay cut until the end of the run."""
        self.slurmd_connected: set[str] = set()
        """Nodes whose slurmd reaches slurmctld even while the node is cut off from the coordinator."""
        self.correlated_signals: dict[str, tuple[str, str]] = {}
        """For each node with a correlated signal: the gang and the lost peer that explain the signal."""
        self.requested_swaps: set[tuple[str, str]] = set()
        """Gang and node of each swap that a user has requested."""
        self.requested_drains: set[str] = set()
        """Nodes for which an operator has requested a drain."""
        self.flips_written: dict[tuple[str, int, Version], int] = {}
        """Gang, rank and version of each shard that was written: the number of the bit flip in it; 0: none."""
        self.sharded_gangs: set[str] = set()
        """Gangs whose ranks hold different parts of one state. All other gangs have replicas."""
        self.bad_batches: dict[str, range] = {}
        """Gangs that report losses, and for which batches these are high. A batch is known by the step that reads it if
        none is skipped."""
        self.batches_read: dict[tuple[str, Version], int] = {}
        """By gang and version: how many batches its state has read or skipped."""
        self.skipping_gangs: set[str] = set()
        """Gangs whose sampler can skip batches."""
        self.flips = 0
        """How many bits have flipped so far."""
        self.crash_countdown: int | None = None
        self.coordinator_restart_s = 1.0
        self.rank_opens_store = False
        """No agent can open a rendezvous store: rank 0 opens it itself."""
        self.final_steps: dict[str, int] = {}
        self._trainings: dict[tuple[str, int], Training] = {}
        self._slurmd_states: dict[str, tuple[bool, bool]] = {}
        self._daemon_lives: dict[str, int] = {}
        self._journal_folder = folder
        self._lease_term = int(site.standby)
        self.coordinator = Coordinator(self, folder, self._lease_term)
        self.coordinator.start()
        for machine in self.machines.values():
            self._start_daemon(machine)
        self._settle_slurm()

    # -- the transcript --

    def note(self, what: object) -> None:
        """Add an entry to the transcript."""
        self.notes.append((self.schedule.now, what))

    def transcript(self) -> list[str]:
        """The transcript, one line for each entry. Times are in seconds since the start."""
        words = ((at, describe(what) if isinstance(what, facts.Fact) else str(what)) for at, what in self.notes)
        return [f"{at - START_S:9.3f}  {text}" for at, text in words]

    # -- the network --

    def describe_network(self, described: events.FabricSeen) -> None:
        """Slurm and the site describe the network so from now on. A coordinator that runs reads it at once."""
        self.note("the site has re-cabled its network")
        self.fabric = described
        if self.coordinator.is_running():
            self.coordinator.post_event(described)

    # -- bits --

    def flip_bit(self, rank: Rank) -> None:
        """A bit of the rank's state flips."""
        self.note(f"FAULT: a bit of rank {rank.rank} flips on {rank.agent.node}")
        self.flips += 1
        rank.flip = self.flips
        rank.agent.machine.has_flipped_bit = True

    def replicas_agree(self, gang: str, version: Version, ranks: int) -> bool:
        """The first `ranks` ranks have written the same state at `version`, or hold no replicas."""
        flips = {self.flips_written.get((gang, rank, version), 0) for rank in range(ranks)}
        return len(flips) == 1 or gang in self.sharded_gangs

    # -- reachability --

    def reachability(self, src: str, node: str, gang: str | None) -> Silence | None:
        """What a connection from `src` to the gang's agent on `node` meets; to its node daemon, if `gang` is None.

        None: an answer.
        """
        machine = self.machines[node]
        if not machine.powered or not (src == node or self.network.connected(src, node)):
            return Silence.NO_ANSWER
        process = self.daemons.get(node) if gang is None else self.agents.get((gang, node))
        if machine.frozen or (gang is None and machine.daemon_port_exhausted):
            return Silence.KERNEL_ONLY
        if process is None or not process.alive:
            return Silence.CLOSED
        return Silence.KERNEL_ONLY if process.stopped else None

    def reachable_peer(self, agent: Agent, node: str) -> Agent | None:
        """The gang's agent on `node`, if `agent` reaches it and it answers."""
        other = self.agents.get((agent.identity.gang, node))
        if other is None or not other.is_running():
            return None
        return other if other is agent or self.network.connected(agent.node, node) else None

    def topology_changed(self) -> None:
        """Links, kernels or processes have changed: tell everyone who would notice."""
        for (gang, _), agent in self.agents.items():
            if not agent.alive:
                continue
            for (other_gang, node), other in self.agents.items():
                if other_gang == gang and other is not agent:
                    agent.peer_monitor.reachability_changed(
                        node, agent.is_running() and self.reachable_peer(agent, node) is not None
                    )
        self._update_slurm()
        self.observer.topology_changed()
        self.network.retry_waiting()

    def _update_slurm(self) -> None:
        for machine in self.machines.values():
            reached = machine.name in self.slurmd_connected or self.network.connected(COORDINATOR, machine.name)
            answers = machine.powered and not machine.frozen and reached
            state = (answers, machine.powered)
            before = self._slurmd_states.get(machine.name, (True, True))
            if state == before:
                continue
            self._slurmd_states[machine.name] = state
            if answers:
                self.cluster.recover_node(machine.name)
            elif before[0] or not machine.powered:
                self.cluster.fail_node(machine.name, powered_off=not machine.powered)

    def _settle_slurm(self) -> None:
        self.cluster.apply_due_changes()
        self.schedule.call_later(5.0, self._settle_slurm)

    # -- processes --

    def add_agent(self, agent: Agent) -> None:
        """An agent's process has started."""
        self.agents[agent.identity.gang, agent.node] = agent
        if self.jobs.wants_preflight(agent.identity.job):
            agent.start_node_check()
        if hang_after_idle_s := self.jobs.hang_after_idle_s(agent.identity.job):
            agent.measure_idleness(hang_after_idle_s / QUARTERS)
        agent.attach()
        self.topology_changed()

    def end_agent(self, agent: Agent) -> None:
        """An agent's process ends while its kernel runs: the kernel closes every connection."""
        if not agent.alive:
            return
        agent.end(closes=True)
        self._report_closed_connections(agent)
        self.topology_changed()

    def _report_closed_connections(self, agent: Agent) -> None:
        for (gang, node), other in list(self.agents.items()):
            if gang == agent.identity.gang and other.is_running() and self.network.connected(agent.node, node):
                other.call_later(self.network.message_delay_s(), other.peer_monitor.connection_closed, agent.node)

    def _start_daemon(self, machine: Machine) -> None:
        life_number = self._daemon_lives[machine.name] = self._daemon_lives.get(machine.name, 0) + 1
        daemon = self.daemons[machine.name] = NodeDaemon(self, machine, f"d{life_number}")
        daemon.attach()

    def end_daemon(self, node: str) -> None:
        """A node daemon ends; systemd starts it again."""
        self.daemons[node].end(closes=True)
        self.schedule.call_later(DAEMON_RESTART_DELAY_S, self._restart_daemon, node)
        self.topology_changed()

    def _restart_daemon(self, node: str) -> None:
        if self.machines[node].powered and not self.daemons[node].alive:
            self._start_daemon(self.machines[node])
            self.topology_changed()

    def power_off(self, node: str, closes: bool) -> None:
        """The node goes down. `closes`: its kernel closes every connection first."""
        machine = self.machines[node]
        node_agents = [agent for (_, name), agent in self.agents.items() if name == node and agent.alive]
        for agent in node_agents:
            agent.end(closes)
            if closes:
                self._report_closed_connections(agent)
            for rank in agent.ranks.values():
                rank.alive = rank.running = False
            for training in self._trainings.values():
                if training.gang == agent.identity.gang and not training.over:
                    training.reset_connections(node, 0.6 if closes else 0.0)
        self.daemons[node].end(closes)
        machine.powered, machine.frozen = False, False
        self.kept_memory.node_lost(node)
        self.topology_changed()

    def boot(self, node: str) -> None:
        """The node boots. None of its earlier processes exists any more."""
        machine = self.machines[node]
        if machine.powered:
            return
        machine.powered, machine.boot_count = True, machine.boot_count + 1
        self._start_daemon(machine)
        self.topology_changed()

    def set_frozen(self, node: str, frozen: bool) -> None:
        """Stop or resume all processes of a node. Its kernel answers."""
        machine = self.machines[node]
        machine.frozen = frozen
        if not frozen:
            self.observer.node_resumed(node)
            self.daemons[node].resume()
            for (_, name), agent in self.agents.items():
                if name == node:
                    agent.resume()
        self.topology_changed()

    def set_stopped(self, process: Agent | NodeDaemon, stopped: bool) -> None:
        """Stop or resume one process."""
        process.stopped = stopped
        if not stopped:
            self.observer.node_resumed(process.machine.name)
            process.resume()
        self.topology_changed()

    def notify_removed_nodes(self, agent: Agent) -> None:
        """`agent` has a new order: every node that still has ranks and is no member in this order learns of it at its
        next ping."""
        order = agent.order
        members = {member.node for member in order.members} if order is not None else set()
        for (gang, node), other in self.agents.items():
            outcast = gang == agent.identity.gang and members and node not in members and other.alive
            if outcast and any(rank.is_active for rank in other.ranks.values()):
                other.peer_monitor.expect_rejection(agent)

    def training_for(self, gang: str, order: pb.Order) -> Training:
        """The training of the generation that `order` starts. It is created if it does not exist."""
        key = (gang, order.generation)
        if key not in self._trainings:
            self._trainings[key] = Training(self, gang, order)
        return self._trainings[key]

    def newest_training(self, gang: str) -> Training | None:
        """The training of the gang's newest generation of which any rank was started."""
        trainings = (training for training in self._trainings.values() if training.gang == gang)
        return max(trainings, key=lambda training: training.generation, default=None)

    def written_ranks(self, gang: str, version: Version) -> int:
        """How many ranks the generation had that wrote a version."""
        return self._trainings[gang, version.generation].world_size

    def is_finished(self, gang: str) -> bool:
        """The script has made all its steps."""
        training = self.newest_training(gang)
        return training is not None and training.step >= self.final_steps.get(gang, 1 << 60)

    # -- the coordinator --

    def crash_coordinator(self, crash_point: str) -> None:
        """The coordinator's process ends. Another coordinator starts after `coordinator_restart_s`."""
        self.note(f"the coordinator crashes {crash_point}")
        self.coverage.count("fault", "coordinator crashed")
        self.observer.coordinator_crashed(self.coordinator.core, not crash_point.startswith("before the journal"))
        self.coordinator.die()
        self.schedule.call_later(self.coordinator_restart_s, self._restart_coordinator)

    def _restart_coordinator(self) -> None:
        self._lease_term += bool(self._lease_term)
        self.coordinator = Coordinator(self, self._journal_folder, self._lease_term)
        self.note(f"a coordinator starts, term {self.coordinator.journal.term}")
        self.observer.coordinator_restarted(self.coordinator.core, self.coordinator.journal)
        self.coordinator.start()

    def stall_coordinator(self, seconds: float) -> None:
        """The coordinator's process stands still for this time."""
        coordinator, since = self.coordinator, self.schedule.now
        if coordinator.is_running():
            coordinator.stopped = True
            self.schedule.call_later(seconds, self._resume_coordinator, coordinator, since)

    def _resume_coordinator(self, coordinator: Coordinator, since: float) -> None:
        if coordinator.alive:
            coordinator.resume_after_stall(since)
            self.topology_changed()

    def phase_entered(self, gang: str, phase: Phase) -> None:
        """A gang has entered a phase: inject every fault that is armed for this phase."""
        for armed_fault in [armed_fault for armed_fault in self.armed_faults if armed_fault[0] is phase]:
            self.armed_faults.remove(armed_fault)
            self.schedule.call_later(0.0, armed_fault[1], gang)

    def gang(self, id: str) -> Gang | None:
        """The gang in the coordinator's durable state."""
        return self.coordinator.core.state.gangs.get(id)

    # -- time --

    def run_until(self, moment: float) -> None:
        """Run everything that is due by `moment`."""
        self.schedule.run_until(moment)

    def submit(self, submission: JobSubmission) -> None:
        """A user submits a job. If the coordinator is reachable, the job is registered with it."""
        self.jobs.submit(submission)
        if self.coordinator.is_running():
            self.coordinator.post_event(self.jobs.registration(submission.gang))

    def close(self) -> None:
        """Close the journal."""
        if self.coordinator.alive:
            self.coordinator.journal.close()
