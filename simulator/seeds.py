"""One seed: a site, one or two jobs, some faults, and whether all settles in the end. Many seeds: in processes."""

from __future__ import annotations

import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from muster.daemon.coordinator.core.state.events import GangSpec
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.simulator.coverage.counts import Tally
from muster.simulator.faults import faults, network_faults, process_faults
from muster.simulator.invariants.laws import Laws
from muster.simulator.world.agent import Agent
from muster.simulator.world.network import COORDINATOR, Weather
from muster.simulator.world.slurm_jobs import Wanted
from muster.simulator.world.timing import Pace
from muster.simulator.world.violation import Violation
from muster.simulator.world.world import NO_LIMITS, POOL, START, Site, World
from muster.slurm.client.states import JobState

SETTLE_S = 900.0
"""Everything settles within this after the last fault: Slurm's own delay of a requeue, and whatever waits, included."""
TIGHT = Limits(nodes_per_hour=2, fraction=1.0, nodes_at_least=1000, swaps_per_hour=2, pool=POOL)
CALM_S = 70.0
"""So long after the last fault all that mends itself has mended."""
_MEMORY = Path("/dev/shm")


def _limits(seed: int) -> Limits:
    """Most sites need none; some are reached soon, and some only watch."""
    if seed % 14 == 7:
        return Limits(observe=True)
    return TIGHT if seed % 4 == 2 else NO_LIMITS


def _step_s(seed: int, usual: float) -> float:
    """Most gangs finish a step sooner than a round of probes is over; some don't."""
    chance = random.Random(f"long steps {seed}")  # of its own: the other seeds stay as they are
    return chance.choice([2.0, 3.0]) if chance.random() < 0.1 else usual


@dataclass(slots=True)
class Result:
    """What became of a seed. `broken`: the law that was broken, or the error; empty: all is well."""

    seed: int
    tally: Tally
    broken: str
    transcript: list[str]


class Run:
    """The world of one seed, and its faults."""

    def __init__(self, seed: int, folder: Path, trace: bool = False) -> None:
        chance = random.Random(f"plan {seed}")
        self._chance = chance
        self._gangs = ["g1"] if chance.random() < 0.85 else ["g1", "g2"]
        specs = [self._spec() for _ in self._gangs]
        count = sum(spec.nodes + spec.spares for spec in specs) + chance.choice([0, 0, 1, 2])
        leaves = chance.randint(1, 3)
        self.world = World(
            Site(
                [(f"n{i}", f"s{i % leaves}") for i in range(count)],
                Weather(
                    lost=chance.choice([0.0, 0.0, 0.002, 0.01]),
                    doubled=chance.choice([0.0, 0.01, 0.05]),
                    late=chance.choice([0.0, 0.01, 0.05]),
                ),
                Pace(step=_step_s(seed, chance.choice([0.3, 0.4, 0.5]))),
                _limits(seed),
                standby=seed % 4 == 1,
            ),
            seed,
            folder,
            Laws,
            trace,
        )
        self.world.jobs.sbatch_fails = 0.2
        self.world.depots.damage = 0.02
        self.world.reserves = chance.random() < 0.2
        self.world.jobs.kill_wait_s = chance.choice([0.0, 30.0])
        self._lie_in_wait(seed)
        for phases, often in ((faults.EARLY, 0.8), (faults.EARLY, 0.7), (faults.LATE, 0.9), (faults.LATE, 0.8)):
            if chance.random() < often:
                faults.ambush(self.world, phases)
        for gang, spec in zip(self._gangs, specs, strict=True):
            self._submit(gang, spec)

    def _lie_in_wait(self, seed: int) -> None:
        """What would come about too seldom. Each of a chance of its own: the other seeds stay as they are."""
        for phase, shares in faults.SOON.items():
            left = random.Random(f"{phase} {seed}").random()
            for (fault, after_s), share in shares.items():
                if 0 <= left < share:
                    faults.soon(self.world, fault, after_s, phase)
                left -= share
        if len(self._gangs) > 1 and random.Random(f"row {seed}").random() < 0.7:
            faults.soon(self.world, network_faults.row, 4.0)
        if self.world.timing.step() > 1.0:
            faults.soon(self.world, process_faults.stop_services, 8.0)
            faults.soon(self.world, process_faults.stop_services, 20.0)

    def _submit(self, gang: str, spec: GangSpec) -> None:
        world, chance = self.world, self._chance
        if chance.random() < 0.4:
            world.finish_at[gang] = chance.randint(10, 60)
        if chance.random() < 0.06:
            world.jobs.never_start.add(chance.choice(list(world.machines)))
        limit_s = chance.choice([60, 200]) if chance.random() < 0.2 else None
        if limit_s and not spec.durable_dir:
            limit_s = 200  # it begins afresh each time, and would never come to its end within a minute
        world.submit(Wanted(gang, spec, limit_s))
        if chance.random() < 0.15:
            world.cluster.update("take the requeue flag off", world.jobs.ids[gang], requeue=False)

    def _spec(self) -> GangSpec:
        chance = self._chance
        nodes = chance.choice([1, 2, 2, 2, 3, 3, 4, 5])
        return GangSpec(
            nodes=nodes,
            spares=chance.choice([0, 0, 1, 1, 2, 3]),
            min_nodes=max(1, nodes - chance.choice([1, 2])) if chance.random() < 0.24 else 0,
            ranks_per_node=chance.choice([1, 1, 1, 2]),
            gather_timeout_s=chance.choice([20.0, 40.0]),
            requeue=chance.random() < 0.8,
            durable_dir=chance.choice(["", "/durable", "/durable"]),
            stop_before_s=chance.choice([0.0, 10.0, 30.0]),
            requeue_at_limit=chance.random() < 0.5,
            pool_nodes=chance.choice([0, 0, 0, 1, 2]),
            hang_after_s=chance.choice([0.0, 5.0, 5.0, 8.0]),
        )

    def go(self) -> None:
        """All of it.

        Raises:
            Violation: a law was broken.
        """
        world, chance = self.world, self._chance
        at = START + 1.0 + 8.0 * chance.random()
        for _ in range(min(10, 2 + int(chance.expovariate(0.4)))):
            world.schedule.at(at, self._strike)
            at += chance.choice([0.3, 2.0, 8.0, 15.0]) * chance.random()
        for every, action, until in ((15.0, self._operator, at + 60.0), (4.0, self._users, at + 15.0)):
            moment = START + every
            while moment < until:
                world.schedule.at(moment, action)
                moment += every
        self.world.run_until(at + 20.0 + 50.0 * chance.random())
        end = at + CALM_S + SETTLE_S
        while not self._settled():
            if world.schedule.now > end:
                raise Violation(f"law 4: {', '.join(map(self._words, self._gangs))}: nothing settles")
            self.world.run_until(world.schedule.now + 1.0)
        world.laws.end_of_run()

    def _strike(self) -> None:
        live = [id for id in self._gangs if (gang := self.world.gang(id)) is None or not gang.final]
        faults.strike(self.world, self._chance.choice(live or self._gangs))

    def _users(self) -> None:
        """Where a gang has ended early, the next job is submitted."""
        gang = self.world.gang(self._gangs[-1])
        spec = self._spec()
        if gang and gang.final and len(self._gangs) < 4 and spec.nodes + spec.spares <= len(self.world.machines):
            self._gangs.append(f"g{len(self._gangs) + 1}")
            self._submit(self._gangs[-1], spec)

    def _operator(self) -> None:
        """Somebody repairs what is drained, and puts it back."""
        world = self.world
        for name, node in world.cluster.nodes().items():
            machine = world.machines[name]
            if node.drained and machine.kernel and not machine.frozen and self._chance.random() < 0.8:
                machine.stuck_until = 0.0
                world.note(f"an operator resumes {name}")
                world.cluster.resume(name)

    # -- the end --

    def _words(self, gang: str) -> str:
        known = self.world.gang(gang)
        return f"{gang} is {known.phase}" if known else f"{gang} is unknown"

    def _settled(self) -> bool:
        world = self.world
        coordinator = world.coordinator
        return (
            coordinator.awake()
            and self._mended()
            and not world.slurm.unavailable_reason
            and not coordinator.core.state.owed
            and not coordinator.core.state.echoes
            and all(map(self._gang_settled, self._gangs))
        )

    def _mended(self) -> bool:
        """No wire is cut, nothing is stopped: what is dead is dead for good, or back."""
        world = self.world
        processes = [*world.agents.values(), *world.daemons.values()]
        frozen = any(machine.frozen for machine in world.machines.values())
        return (
            not frozen
            and world.network.cuts.keys() <= world.lasting
            and not any(p.alive and p.stopped for p in processes)
        )

    def _gang_settled(self, id: str) -> bool:
        world = self.world
        gang, job = world.gang(id), world.jobs.job(id)
        if gang is None:
            # A job whose agents died before any coordinator had heard of it is Slurm's to end.
            return job.state is not JobState.RUNNING or not any(
                a.alive for (g, _), a in world.agents.items() if g == id
            )
        small = [pooled for pooled in world.jobs.pooled(id) if not pooled.state.ended]
        if gang.final:
            return (
                job.state.ended
                and not small
                and not any(self._lingers(a) for (g, _), a in world.agents.items() if g == id)
            )
        if any(pooled.id not in {m.job for m in gang.present()} for pooled in small):
            return False  # one that nobody wants is still there
        if gang.phase in (Phase.SUBMITTED, Phase.REQUEUED):
            return job.state is JobState.PENDING
        training = world.newest_training(id)
        if (
            id in world.finish_at
            or gang.phase is not Phase.RUNNING
            or training is None
            or training.generation != gang.generation
        ):
            return False
        return (
            world.schedule.now - training.last_step_at < 0.5 + world.timing.step() and gang.stepped == gang.generation
        )

    def _lingers(self, agent: Agent) -> bool:
        """It could be told to leave, and is still there."""
        return agent.awake() and self.world.network.both(agent.node, COORDINATOR)


def run(seed: int, trace: bool = False) -> Result:
    """One seed. The same seed gives the same run."""
    folder = Path(tempfile.mkdtemp(prefix="muster-sim-", dir=_MEMORY if _MEMORY.is_dir() else None))
    try:
        one = Run(seed, folder, trace)
        broken = ""
        try:
            one.go()
        except Violation as violation:
            broken = str(violation)
        except Exception as error:  # whatever the core raises is a finding of this seed
            broken = f"{type(error).__name__}: {error}"
            if trace:
                raise
        finally:
            one.world.close()
        return Result(seed, one.world.tally, broken, one.world.transcript() if broken or trace else [])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
