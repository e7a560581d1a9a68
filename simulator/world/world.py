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
from muster.simulator.coverage.counts import Tally
from muster.simulator.world.agent import Agent
from muster.simulator.world.coordinator import Coordinator
from muster.simulator.world.durable_storage import Flushes
from muster.simulator.world.kept_memory import Depots
from muster.simulator.world.machine import Machine
from muster.simulator.world.network import COORDINATOR, Network, Weather
from muster.simulator.world.node_daemon import Daemon
from muster.simulator.world.observer import Observer
from muster.simulator.world.schedule import Schedule
from muster.simulator.world.slurm import CapriciousSlurm
from muster.simulator.world.slurm_jobs import Jobs, Wanted
from muster.simulator.world.timing import Pace, Timing
from muster.simulator.world.training import Training
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.v1 import agent_pb2 as pb

START = 1000.0
DAEMON_RESTARTS_S = 1.0
"""systemd starts a node's daemon again after this."""


POOL = Pool(("--partition=shared",), wait_s=12.0)
"""All nodes that carry no job."""
NO_LIMITS = Limits(nodes_per_hour=1000, fraction=1.0, nodes_at_least=1000, swaps_per_hour=1000, pool=POOL)


@dataclass(frozen=True, slots=True)
class Site:
    """What a world is made of: its nodes by leaf, weather and pace, and what the coordinator may do."""

    leaves: Sequence[tuple[str, str]]
    """(node, leaf)"""
    weather: Weather = field(default_factory=Weather)
    pace: Pace = field(default_factory=Pace)
    limits: Limits = NO_LIMITS
    standby: bool = False
    """Two coordinators share the journal's folder, each life a term of the lease."""


class World:
    """One run. `folder`: where the journal lies; `seed`: the source of all chance; `observer`: makes the watcher
    that is told of all that happens."""

    def __init__(
        self, site: Site, seed: int, folder: Path, observer: Callable[[World], Observer], trace: bool = False
    ) -> None:
        self.chance = random.Random(seed)
        self.trace = trace
        self.notes: list[tuple[float, object]] = []
        self.limits = site.limits
        self.schedule = Schedule(START)
        self.network = Network(self.schedule, self.chance, site.weather)
        self.timing = Timing(site.pace, self.chance)
        self.machines = {name: Machine(name, leaf) for name, leaf in site.leaves}
        self.tally = Tally()
        self.laws = observer(self)
        self.flushes = Flushes(self)
        self.jobs = Jobs(self)
        self.depots = Depots(self, seed)
        self.cluster = FakeCluster(
            list(self.machines), now=lambda: self.schedule.now, leaves=dict(site.leaves), on_change=self.jobs.changed
        )
        self.slurm = CapriciousSlurm(self.cluster, self.chance)
        self.agents: dict[tuple[str, str], Agent] = {}
        self.daemons: dict[str, Daemon] = {}
        self.ambushes: list[tuple[Phase, Callable[[str], None]]] = []
        self.lasting: set[tuple[str, str]] = set()
        """Wires that stay cut for good."""
        self.slurm_sees: set[str] = set()
        """Nodes whose slurmd reaches Slurm's controller by another way than the one to the coordinator."""
        self.echoes: dict[str, tuple[str, str]] = {}
        """By node, of which gang's which node it has echoed the loss."""
        self.crash_after: int | None = None
        self.restart_s = 1.0
        self.reserves = False
        """No agent finds torch: rank 0 opens the store itself."""
        self.finish_at: dict[str, int] = {}
        self._trainings: dict[tuple[str, int], Training] = {}
        self._slurmd: dict[str, tuple[bool, bool]] = {}
        self._lives: dict[str, int] = {}
        self._folder = folder
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
        return [f"{at - START:9.3f}  {text}" for at, text in words]

    # -- who reaches whom --

    def door(self, src: str, node: str, gang: str | None) -> Silence | None:
        """What a connection from `src` to the gang's agent on `node` meets (None: its daemon); None: an answer."""
        machine = self.machines[node]
        if not machine.kernel or not (src == node or self.network.both(src, node)):
            return Silence.NO_ANSWER
        process = self.daemons.get(node) if gang is None else self.agents.get((gang, node))
        if machine.frozen:
            return Silence.KERNEL_ONLY
        if process is None or not process.alive:
            return Silence.CLOSED
        return Silence.KERNEL_ONLY if process.stopped else None

    def peer(self, agent: Agent, node: str) -> Agent | None:
        """The gang's agent on `node`, if `agent` reaches it and it answers."""
        other = self.agents.get((agent.post.gang, node))
        if other is None or not other.awake():
            return None
        return other if other is agent or self.network.both(agent.node, node) else None

    def changed(self) -> None:
        """Wires, kernels or processes have changed: everybody feels it who would."""
        for (gang, _), agent in self.agents.items():
            if not agent.alive:
                continue
            for (other_gang, node), other in self.agents.items():
                if other_gang == gang and other is not agent:
                    agent.uneasy.reach(node, agent.awake() and self.peer(agent, node) is not None)
        self._tell_slurm()
        self.laws.changed()
        self.network.changed()

    def _tell_slurm(self) -> None:
        for machine in self.machines.values():
            reached = machine.name in self.slurm_sees or self.network.both(COORDINATOR, machine.name)
            answers = machine.kernel and not machine.frozen and reached
            state = (answers, machine.kernel)
            before = self._slurmd.get(machine.name, (True, True))
            if state == before:
                continue
            self._slurmd[machine.name] = state
            if answers:
                self.cluster.recover_node(machine.name)
            elif before[0] or not machine.kernel:
                self.cluster.fail_node(machine.name, powered_off=not machine.kernel)

    def _settle_slurm(self) -> None:
        self.cluster.apply_due_changes()
        self.schedule.later(5.0, self._settle_slurm)

    # -- processes --

    def add_agent(self, agent: Agent) -> None:
        """An agent has started."""
        self.agents[agent.post.gang, agent.node] = agent
        agent.attach()
        self.changed()

    def end_agent(self, agent: Agent) -> None:
        """An agent's process ends, its kernel lives: every connection is closed."""
        if not agent.alive:
            return
        agent.end(closes=True)
        self._closed(agent)
        self.changed()

    def _closed(self, agent: Agent) -> None:
        for (gang, node), other in list(self.agents.items()):
            if gang == agent.post.gang and other.awake() and self.network.both(agent.node, node):
                other.later(self.network.delay(), other.uneasy.lose, agent.node)

    def _start_daemon(self, machine: Machine) -> None:
        life = self._lives[machine.name] = self._lives.get(machine.name, 0) + 1
        daemon = self.daemons[machine.name] = Daemon(self, machine, f"d{life}")
        daemon.attach()

    def end_daemon(self, node: str) -> None:
        """A node's daemon ends; systemd starts it anew."""
        self.daemons[node].end(closes=True)
        self.schedule.later(DAEMON_RESTARTS_S, self._revive_daemon, node)
        self.changed()

    def _revive_daemon(self, node: str) -> None:
        if self.machines[node].kernel and not self.daemons[node].alive:
            self._start_daemon(self.machines[node])
            self.changed()

    def power_off(self, node: str, closes: bool) -> None:
        """The node's kernel is gone. `closes`: it closed every connection before."""
        machine = self.machines[node]
        mine = [agent for (_, name), agent in self.agents.items() if name == node and agent.alive]
        for agent in mine:
            agent.end(closes)
            if closes:
                self._closed(agent)
            for rank in agent.ranks.values():
                rank.alive = rank.running = False
            for training in self._trainings.values():
                if training.gang == agent.post.gang and not training.over:
                    training.feel_reset(node, 0.6 if closes else 0.0)
        self.daemons[node].end(closes)
        machine.kernel, machine.frozen = False, False
        self.depots.lose(node)
        self.changed()

    def boot(self, node: str) -> None:
        """The node comes back, with nothing of what ran there."""
        machine = self.machines[node]
        if machine.kernel:
            return
        machine.kernel, machine.boot = True, machine.boot + 1
        self._start_daemon(machine)
        self.changed()

    def freeze(self, node: str, frozen: bool) -> None:
        """All processes of a node stop, or go on; its kernel answers."""
        machine = self.machines[node]
        machine.frozen = frozen
        if not frozen:
            self.laws.goes_on(node)
            self.daemons[node].go_on()
            for (_, name), agent in self.agents.items():
                if name == node:
                    agent.go_on()
        self.changed()

    def stop(self, process: Agent | Daemon, stopped: bool) -> None:
        """One process stops, or goes on."""
        process.stopped = stopped
        if not stopped:
            self.laws.goes_on(process.machine.name)
            process.go_on()
        self.changed()

    def cast_out(self, agent: Agent) -> None:
        """`agent` has an order; who still has ranks and is no member in it will hear that when it pings."""
        order = agent.order
        members = {member.node for member in order.members} if order is not None else set()
        for (gang, node), other in self.agents.items():
            outcast = gang == agent.post.gang and members and node not in members and other.alive
            if outcast and any(rank.able for rank in other.ranks.values()):
                other.uneasy.hear_of(agent)

    def training(self, gang: str, order: pb.Order) -> Training:
        """The training of an order's generation, made if there is none."""
        key = (gang, order.generation)
        if key not in self._trainings:
            self._trainings[key] = Training(self, gang, order)
        return self._trainings[key]

    def newest_training(self, gang: str) -> Training | None:
        """The training of the gang's newest generation that was started anywhere."""
        trainings = (training for training in self._trainings.values() if training.gang == gang)
        return max(trainings, key=lambda training: training.generation, default=None)

    def finished(self, gang: str) -> bool:
        """The script has made all its steps."""
        training = self.newest_training(gang)
        return training is not None and training.step >= self.finish_at.get(gang, 1 << 60)

    # -- the coordinator --

    def coordinator_dies(self, where: str) -> None:
        """Its process ends; another takes over after `restart_s`."""
        self.note(f"the coordinator dies {where}")
        self.tally.count("fault", "coordinator crashed")
        self.laws.crashed(self.coordinator.core.state, not where.startswith("before the journal"))
        self.coordinator.die()
        self.schedule.later(self.restart_s, self._next_coordinator)

    def _next_coordinator(self) -> None:
        self._lease_term += bool(self._lease_term)
        self.coordinator = Coordinator(self, self._folder, self._lease_term)
        self.note(f"a coordinator starts, term {self.coordinator.journal.term}")
        self.laws.restarted(self.coordinator.core.state, self.coordinator.journal)
        self.coordinator.start()

    def stall_coordinator(self, seconds: float) -> None:
        """The coordinator stands still for a while."""
        coordinator, since = self.coordinator, self.schedule.now
        if coordinator.awake():
            coordinator.stopped = True
            self.schedule.later(seconds, self._coordinator_goes_on, coordinator, since)

    def _coordinator_goes_on(self, coordinator: Coordinator, since: float) -> None:
        if coordinator.alive:
            coordinator.resume(since)
            self.changed()

    def entered(self, gang: str, phase: Phase) -> None:
        """A gang has entered a phase: whoever lies in wait for that strikes."""
        for waiting in [waiting for waiting in self.ambushes if waiting[0] is phase]:
            self.ambushes.remove(waiting)
            self.schedule.later(0.0, waiting[1], gang)

    def gang(self, id: str) -> Gang | None:
        """The gang as the coordinator's durable state has it."""
        return self.coordinator.core.state.gangs.get(id)

    # -- time --

    def run_until(self, moment: float) -> None:
        """Let everything happen that is due by `moment`."""
        self.schedule.run_until(moment)

    def submit(self, wanted: Wanted) -> None:
        """A user submits a job, and registers it with the coordinator if that can be reached."""
        self.jobs.submit(wanted)
        if self.coordinator.awake():
            self.coordinator.post(self.jobs.submitted(wanted.gang))

    def close(self) -> None:
        """Let go of the journal."""
        if self.coordinator.alive:
            self.coordinator.journal.close()
