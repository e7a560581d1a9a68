"""The whole world of one run: nodes, wires, Slurm, agents, and one coordinator after the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import Gang
from muster.daemon.coordinator.core.state.events import Silence
from muster.daemon.coordinator.core.state.fact_text import describe
from muster.daemon.coordinator.core.state.limits import Limits, Pool
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.simulator.coverage.counts import Coverage
from muster.simulator.environment.durations import Durations, DurationSampler
from muster.simulator.environment.machine import Machine
from muster.simulator.environment.network import COORDINATOR, Network, NetworkConditions
from muster.simulator.environment.schedule import Schedule
from muster.simulator.environment.unreliable_slurm import UnreliableSlurm
from muster.simulator.world.agent import Agent
from muster.simulator.world.coordinator import Coordinator
from muster.simulator.world.durable_storage import DurableStorage
from muster.simulator.world.kept_memory import KeptMemoryStores
from muster.simulator.world.node_daemon import NodeDaemon
from muster.simulator.world.observer import Observer
from muster.simulator.world.slurm_jobs import JobSubmission, SlurmJobs
from muster.simulator.world.training import Training
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.v1 import agent_pb2 as pb

START_S = 1000.0
DAEMON_RESTART_DELAY_S = 1.0
"""systemd starts a node's daemon again after this."""


POOL = Pool(("--partition=shared",), wait_s=12.0)
"""All nodes that carry no job."""
NO_LIMITS = Limits(nodes_per_hour=1000, fraction=1.0, nodes_at_least=1000, swaps_per_hour=1000, pool=POOL)


@dataclass(frozen=True, slots=True)
class Site:
    """What a world is made of: its nodes by leaf, weather and pace, and what the coordinator may do."""

    leaves: Sequence[tuple[str, str]]
    """(node, leaf)"""
    network_conditions: NetworkConditions = field(default_factory=NetworkConditions)
    durations: Durations = field(default_factory=Durations)
    limits: Limits = NO_LIMITS
    standby: bool = False
    """Two coordinators share the journal's folder, each life a term of the lease."""


class World:
    """One run. `folder`: where the journal lies; `seed`: the source of all rng; `observer`: makes the watcher
    that is told of all that happens."""

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
        self.machines = {name: Machine(name, leaf) for name, leaf in site.leaves}
        self.coverage = Coverage()
        self.observer = observer(self)
        self.durable_storage = DurableStorage(self)
        self.jobs = SlurmJobs(self)
        self.kept_memory = KeptMemoryStores(self, seed)
        self.cluster = FakeCluster(
            list(self.machines),
            now=lambda: self.schedule.now,
            leaves=dict(site.leaves),
            on_change=self.jobs.job_changed,
        )
        self.slurm = UnreliableSlurm(self.cluster, self.rng)
        self.agents: dict[tuple[str, str], Agent] = {}
        self.daemons: dict[str, NodeDaemon] = {}
        self.armed_faults: list[tuple[Phase, Callable[[str], None]]] = []
        self.permanent_cuts: set[tuple[str, str]] = set()
        """Wires that stay cut for good."""
        self.slurmd_connected: set[str] = set()
        """Nodes whose slurmd reaches Slurm's controller by another way than the one to the coordinator."""
        self.correlated_signals: dict[str, tuple[str, str]] = {}
        """By node, of which gang's which node it has echoed the loss."""
        self.crash_countdown: int | None = None
        self.coordinator_restart_s = 1.0
        self.rank_opens_store = False
        """No agent finds torch: rank 0 opens the store itself."""
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
        """Something for the transcript."""
        self.notes.append((self.schedule.now, what))

    def transcript(self) -> list[str]:
        """All that was noted, one line each, times in seconds since the start."""
        words = ((at, describe(what) if isinstance(what, facts.Fact) else str(what)) for at, what in self.notes)
        return [f"{at - START_S:9.3f}  {text}" for at, text in words]

    # -- who reaches whom --

    def reachability(self, src: str, node: str, gang: str | None) -> Silence | None:
        """What a connection from `src` to the gang's agent on `node` meets (None: its daemon); None: an answer."""
        machine = self.machines[node]
        if not machine.powered or not (src == node or self.network.connected(src, node)):
            return Silence.NO_ANSWER
        process = self.daemons.get(node) if gang is None else self.agents.get((gang, node))
        if machine.frozen:
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
        """Wires, kernels or processes have changed: everybody feels it who would."""
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
        """An agent has started."""
        self.agents[agent.identity.gang, agent.node] = agent
        agent.attach()
        self.topology_changed()

    def end_agent(self, agent: Agent) -> None:
        """An agent's process ends, its kernel lives: every connection is closed."""
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
        life = self._daemon_lives[machine.name] = self._daemon_lives.get(machine.name, 0) + 1
        daemon = self.daemons[machine.name] = NodeDaemon(self, machine, f"d{life}")
        daemon.attach()

    def end_daemon(self, node: str) -> None:
        """A node's daemon ends; systemd starts it anew."""
        self.daemons[node].end(closes=True)
        self.schedule.call_later(DAEMON_RESTART_DELAY_S, self._restart_daemon, node)
        self.topology_changed()

    def _restart_daemon(self, node: str) -> None:
        if self.machines[node].powered and not self.daemons[node].alive:
            self._start_daemon(self.machines[node])
            self.topology_changed()

    def power_off(self, node: str, closes: bool) -> None:
        """The node's kernel is gone. `closes`: it closed every connection before."""
        machine = self.machines[node]
        mine = [agent for (_, name), agent in self.agents.items() if name == node and agent.alive]
        for agent in mine:
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
        """The node comes back, with nothing of what ran there."""
        machine = self.machines[node]
        if machine.powered:
            return
        machine.powered, machine.boot_count = True, machine.boot_count + 1
        self._start_daemon(machine)
        self.topology_changed()

    def set_frozen(self, node: str, frozen: bool) -> None:
        """All processes of a node stop, or go on; its kernel answers."""
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
        """One process stops, or goes on."""
        process.stopped = stopped
        if not stopped:
            self.observer.node_resumed(process.machine.name)
            process.resume()
        self.topology_changed()

    def notify_removed_nodes(self, agent: Agent) -> None:
        """`agent` has an order; who still has ranks and is no member in it will hear that when it pings."""
        order = agent.order
        members = {member.node for member in order.members} if order is not None else set()
        for (gang, node), other in self.agents.items():
            outcast = gang == agent.identity.gang and members and node not in members and other.alive
            if outcast and any(rank.is_active for rank in other.ranks.values()):
                other.peer_monitor.expect_rejection(agent)

    def training_for(self, gang: str, order: pb.Order) -> Training:
        """The training of an order's generation, made if there is none."""
        key = (gang, order.generation)
        if key not in self._trainings:
            self._trainings[key] = Training(self, gang, order)
        return self._trainings[key]

    def newest_training(self, gang: str) -> Training | None:
        """The training of the gang's newest generation that was started anywhere."""
        trainings = (training for training in self._trainings.values() if training.gang == gang)
        return max(trainings, key=lambda training: training.generation, default=None)

    def is_finished(self, gang: str) -> bool:
        """The script has made all its steps."""
        training = self.newest_training(gang)
        return training is not None and training.step >= self.final_steps.get(gang, 1 << 60)

    # -- the coordinator --

    def crash_coordinator(self, where: str) -> None:
        """Its process ends; another takes over after `coordinator_restart_s`."""
        self.note(f"the coordinator dies {where}")
        self.coverage.count("fault", "coordinator crashed")
        self.observer.coordinator_crashed(self.coordinator.core.state, not where.startswith("before the journal"))
        self.coordinator.die()
        self.schedule.call_later(self.coordinator_restart_s, self._restart_coordinator)

    def _restart_coordinator(self) -> None:
        self._lease_term += bool(self._lease_term)
        self.coordinator = Coordinator(self, self._journal_folder, self._lease_term)
        self.note(f"a coordinator starts, term {self.coordinator.journal.term}")
        self.observer.coordinator_restarted(self.coordinator.core.state, self.coordinator.journal)
        self.coordinator.start()

    def stall_coordinator(self, seconds: float) -> None:
        """The coordinator stands still for a while."""
        coordinator, since = self.coordinator, self.schedule.now
        if coordinator.is_running():
            coordinator.stopped = True
            self.schedule.call_later(seconds, self._resume_coordinator, coordinator, since)

    def _resume_coordinator(self, coordinator: Coordinator, since: float) -> None:
        if coordinator.alive:
            coordinator.resume_after_stall(since)
            self.topology_changed()

    def phase_entered(self, gang: str, phase: Phase) -> None:
        """A gang has entered a phase: whoever lies in wait for that strikes."""
        for waiting in [waiting for waiting in self.armed_faults if waiting[0] is phase]:
            self.armed_faults.remove(waiting)
            self.schedule.call_later(0.0, waiting[1], gang)

    def gang(self, id: str) -> Gang | None:
        """The gang as the coordinator's durable state has it."""
        return self.coordinator.core.state.gangs.get(id)

    # -- time --

    def run_until(self, moment: float) -> None:
        """Let everything happen that is due by `moment`."""
        self.schedule.run_until(moment)

    def submit(self, submission: JobSubmission) -> None:
        """A user submits a job, and registers it with the coordinator if that can be reached."""
        self.jobs.submit(submission)
        if self.coordinator.is_running():
            self.coordinator.post_event(self.jobs.registration(submission.gang))

    def close(self) -> None:
        """Let go of the journal."""
        if self.coordinator.alive:
            self.coordinator.journal.close()
