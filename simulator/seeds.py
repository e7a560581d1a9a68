"""One seed: a site, one or two jobs, some faults, and a check that everything settles in the end."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from muster.daemon.coordinator.core.losses.loss_rule import LossChoice, LossResponse
from muster.daemon.coordinator.core.state.events import GangSpec, Version
from muster.daemon.coordinator.core.state.limits import Limits, StragglerRule
from muster.daemon.coordinator.core.state.state_tables import Phase, Response
from muster.simulator.coverage.counts import Coverage
from muster.simulator.environment.network import COORDINATOR, RELIABLE, NetworkConditions, PeerCallConditions
from muster.simulator.environment.schedule import Durations
from muster.simulator.environment.site_network import describe_network, recable
from muster.simulator.faults import hardware_faults, injection, network_faults, process_faults, service_faults
from muster.simulator.invariants.invariants import Invariants
from muster.simulator.invariants.liveness import awaits_release
from muster.simulator.world.agent import Agent
from muster.simulator.world.observer import InvariantViolation
from muster.simulator.world.slurm_jobs import JobSubmission
from muster.simulator.world.snapshot_crashes import SnapshotCrash, SnapshotPoint
from muster.simulator.world.world import NO_LIMITS, POOL, START_S, Site, World, make_folder
from muster.slurm.client.states import JobState

SETTLE_TIMEOUT_S = 900.0
"""Seconds after the last fault within which everything settles. It includes Slurm's delay of a requeue and all
timeouts."""
TIGHT_LIMITS = Limits(nodes_per_hour=2, fraction=1.0, nodes_at_least=1000, swaps_per_hour=2, pool=POOL)
"""Limits that some runs reach soon."""
SMALL_JOURNAL = replace(NO_LIMITS, journal_mib_per_job=0.1)
"""A part of the journal that a gang uses up with its start and some recoveries."""
STRAGGLER_RULE = StragglerRule(share=0.9, window_s=20.0, response=Response.SWAP)
"""Shorter than any site's: a run lasts a minute or two."""
CALM_EVERY = 15
"""Every so many seeds one is calm. A gang without a spare loses a node that is repaired soon, and little else happens:
it trains with fewer ranks, or on a node of the shared pool, until the node is back. Elsewhere gangs end too soon."""
CALM_S = 25.0
"""Seconds until something else happens in a calm seed."""
SECOND_LOSS_S, SECOND_GROWTH_S = 60.0, 400.0
"""Seconds after which a calm seed loses another node, and by which its gang has had the time to grow for a second
time."""
FAILED_LAUNCHES_SHARE = 0.1
"""The share of seeds in which launches fail for some time."""
SCRIPTS_SHARE = 0.06
"""The share of seeds with a script that ends without a launch."""
EARLIER_RUN, EARLIER_VERSION = "/durable/step_00000007_g5_train-u0-0123456789ab", Version(5, 7)
"""The newest checkpoint of an earlier run, from which the gangs of some seeds go on, and what it holds."""
BAD_BATCHES_SHARE, BAD_BATCHES = 0.06, range(13, 21)
"""The share of seeds whose gangs report losses and go back from a spike, and the batches that cause it."""
LOSS = LossChoice(spike=LossResponse.ROLL_BACK, in_a_row=2, window=16, margin_steps=2, roll_backs=1)
HEAL_TIME_S = 70.0
"""Seconds after the last fault by which every temporary fault has healed."""


def _limits(seed: int) -> Limits:
    """Most sites have no limits that matter. Some reach their limits soon, and some run in observe mode."""
    if seed % 14 == 7:
        return Limits(observe=True)
    if seed % 14 == 9:
        return SMALL_JOURNAL
    return TIGHT_LIMITS if seed % 4 == 2 else NO_LIMITS


def _resumes_nodes(seed: int) -> bool:
    """Some sites let Muster resume nodes."""
    return random.Random(f"resumes {seed}").random() < 0.3  # as in `_step_s`


def _step_s(seed: int, usual_step_s: float) -> float:
    """In most gangs a step takes less time than a round of probes; in some gangs it takes more."""
    rng = random.Random(f"long steps {seed}")  # a generator of its own leaves all other seeds as they are
    return rng.choice([2.0, 3.0]) if rng.random() < 0.1 else usual_step_s


def _peer_calls(seed: int) -> PeerCallConditions:
    """In some seeds, what agents tell each other about copies is lost, late or doubled."""
    rng = random.Random(f"peer calls {seed}")  # as in `_step_s`
    if rng.random() >= 0.4:
        return RELIABLE
    lost, unanswered, late, doubled = (rng.choice([0.0, 0.05, 0.2]) for _ in range(4))
    return PeerCallConditions(lost, unanswered, late, doubled, longest_s=rng.choice([0.5, 4.0, 20.0]))


def _gets_back(seed: int) -> str:
    """What the gangs of a calm seed get back; empty: the seed is not calm."""
    if seed % CALM_EVERY != CALM_EVERY - 1:
        return ""
    return "ranks" if seed // CALM_EVERY % 2 else "a node in place of one of the pool"


@dataclass(slots=True)
class Result:
    """The result of a seed. `violation`: the violated invariant or the error. It is empty if there was none."""

    seed: int
    coverage: Coverage
    violation: str
    transcript: list[str]


class SeedRun:
    """The simulated cluster of one seed, and its faults."""

    def __init__(self, seed: int, folder: Path, trace: bool = False) -> None:
        rng = random.Random(f"plan {seed}")
        self._rng = rng
        self._closer_looks = random.Random(f"closer looks {seed}")
        self._gets_back = _gets_back(seed)
        self._grows_twice = False
        self._gangs = ["g1"] if rng.random() < 0.85 else ["g1", "g2"]
        specs = [self._spec() for _ in self._gangs]
        count = sum(spec.nodes + spec.spares for spec in specs) + rng.choice([0, 0, 1, 2]) + bool(self._gets_back)
        switches = rng.randint(1, 3)
        leaves = [(f"n{i}", f"s{i % switches}") for i in range(count)]
        network = random.Random(f"network {seed}")  # as in `_step_s`
        self.world = World(
            Site(
                leaves,
                NetworkConditions(
                    loss_rate=rng.choice([0.0, 0.0, 0.002, 0.01]),
                    duplicate_rate=rng.choice([0.0, 0.01, 0.05]),
                    delay_rate=rng.choice([0.0, 0.01, 0.05]),
                ),
                Durations(step_s=_step_s(seed, rng.choice([0.3, 0.4, 0.5]))),
                replace(_limits(seed), straggler=STRAGGLER_RULE, resume_after_check=_resumes_nodes(seed)),
                fabric=describe_network(leaves, network) if network.random() < 0.6 else None,
                standby=seed % 4 == 1,
                peer_calls=_peer_calls(seed),
            ),
            seed,
            folder,
            Invariants,
            trace,
        )
        self.world.jobs.sbatch_failure_rate = 0.0 if self._gets_back else 0.2
        self.world.kept_memory.damage_rate = 0.02
        self.world.rank_opens_store = rng.random() < 0.2
        self.world.jobs.kill_wait_s = rng.choice([0.0, 30.0])
        if self._gets_back:
            self._arm_loss_and_repair(seed)
        else:
            self._arm_faults(seed)
            if any(spec.spares for spec in specs) and random.Random(f"only version {seed}").random() < 0.3:
                injection.arm(self.world, hardware_faults.flip_bit_in_only_version, 2.0)
            self._arm_snapshot_crashes(seed)
        self._recable(dict(leaves), network)
        self._spoil_node_checks(seed)
        self._slow_down(seed)
        self._fail_launches(seed)
        self._allow_idleness(seed)
        self._has_groups = random.Random(f"groups {seed}").random() < 0.3  # as in `_step_s`
        self._more_holders = random.Random(f"copies {seed}").choice([0, 0, 0, 0, 1, 2])  # likewise
        self._group_nodes = random.Random(f"parity {seed}").choice([0, 0, 0, 3, 4])  # likewise
        self._is_sharded = random.Random(f"sharded {seed}").random() < 0.5  # likewise
        self._has_no_folder = random.Random(f"folder {seed}").random() < 0.05  # likewise
        self._rolls_back = random.Random(f"high loss {seed}").random() < BAD_BATCHES_SHARE  # likewise
        self._goes_on = random.Random(f"earlier run {seed}").random() < 0.06  # likewise
        if not self._gets_back and random.Random(f"script {seed}").random() < SCRIPTS_SHARE:  # likewise
            self.world.submit(JobSubmission("script", GangSpec(1, 0, requeue=False, awaits_launch=True)))
        for gang, spec in zip(self._gangs, specs, strict=True):
            self._submit(gang, self._with_newer_keys(spec))

    def _with_newer_keys(self, spec: GangSpec) -> GangSpec:
        """`spec` with the keys that generators of their own decide, which leaves all other seeds as they are."""
        ranks = spec.nodes * spec.ranks_per_node
        tensor = 2 if self._has_groups and ranks % 2 == 0 and not spec.min_nodes else 1
        spec = replace(spec, preflight=self._preflight, hang_after_idle_s=self._hang_after_idle_s, tensor=tensor)
        spec = replace(spec, more_holders=self._more_holders)
        if spec.nodes >= 3 and self._group_nodes:
            spec = replace(spec, more_holders=0, group_nodes=self._group_nodes)
        if self._rolls_back:
            spec = replace(spec, durable_dir="/durable", durable_every_steps=2, loss=LOSS)
        elif self._has_no_folder:
            return replace(spec, durable_dir="")
        return replace(spec, resume_from=EARLIER_RUN) if self._goes_on and spec.durable_dir else spec

    def _allow_idleness(self, seed: int) -> None:
        """In some seeds agents measure for how long their ranks are idle."""
        rng = random.Random(f"idleness {seed}")  # as in `_step_s`
        self._hang_after_idle_s = rng.choice([4.0, 12.0]) if rng.random() < 0.12 else 0.0

    def _recable(self, leaves: Mapping[str, str], network: random.Random) -> None:
        """In some seeds the site moves nodes to other leaf switches, racks and power feeds while jobs run."""
        if self.world.fabric is None or network.random() < 0.5:
            return
        for _ in range(network.randint(1, 3)):
            leaves = recable(leaves, network)
            described, at = describe_network(leaves.items(), network), START_S + 60.0 * network.random()
            self.world.schedule.call_at(at, lambda described=described: self.world.describe_network(described))

    def _spoil_node_checks(self, seed: int) -> None:
        """In some seeds agents check their nodes, and some nodes fail."""
        rng = random.Random(f"node checks {seed}")  # as in `_step_s`
        self._preflight = rng.random() < 0.15
        for machine in self.world.machines.values():
            bad = rng.random() < 0.25
            machine.check_outcome = rng.choice(["wrong", "failed", "silent", "slow"]) if bad else "passed"

    def _fail_launches(self, seed: int) -> None:
        """In some seeds launches fail on a node or two, most often the first one of a job."""
        rng = random.Random(f"failed launches {seed}")  # as in `_step_s`
        if self._gets_back or rng.random() >= FAILED_LAUNCHES_SHARE:
            return
        nodes = rng.sample(sorted(self.world.machines), min(len(self.world.machines), rng.choice([1, 1, 2])))
        begin_s, for_s = rng.choice([0.0, 0.0, 40.0 * rng.random()]), 3.0 + 12.0 * rng.random()
        strike = partial(service_faults.fail_launches, self.world, nodes, for_s)
        if begin_s:
            self.world.schedule.call_at(START_S + begin_s, strike)
        else:
            strike()

    def _slow_down(self, seed: int) -> None:
        """In some seeds a node or a rank is slow, and the site leaves nodes for that."""
        rng = random.Random(f"stragglers {seed}")  # as in `_step_s`
        if rng.random() < 0.36:
            fault = rng.choice([hardware_faults.slow_node, process_faults.slow_rank])
            injection.arm(self.world, fault, 2.0 * rng.random())

    def _arm_loss_and_repair(self, seed: int) -> None:
        """In a calm seed a node is lost and repaired. In some it comes back broken. In some another one follows, and
        the gang has time for a second growth."""
        rng = random.Random(f"repair {seed}")  # as in `_step_s`
        badly = rng.random() < 0.4
        fault = hardware_faults.lose_node_until_badly_repaired if badly else hardware_faults.lose_node_until_repaired
        injection.arm(self.world, fault, 3.0)
        self._grows_twice = not badly and rng.random() < 0.3
        if self._grows_twice:
            injection.arm(self.world, hardware_faults.lose_node_until_repaired, SECOND_LOSS_S)

    def _arm_faults(self, seed: int) -> None:
        """Arm faults that would otherwise be too rare, and random ones."""
        for draw in injection.ARMED_FAULTS:
            draw.arm(self.world, seed)
        if len(self._gangs) > 1 and random.Random(f"row {seed}").random() < 0.7:
            injection.arm(self.world, network_faults.isolate_nodes_of_every_gang, 4.0)
        if self.world.durations.step_s() > 1.0:
            injection.arm(self.world, process_faults.stop_agent_and_daemon, 8.0)
            injection.arm(self.world, process_faults.stop_agent_and_daemon, 20.0)
        for phases, probability in (
            (injection.EARLY_PHASES, 0.8),
            (injection.EARLY_PHASES, 0.7),
            (injection.LATE_PHASES, 0.9),
            (injection.LATE_PHASES, 0.8),
        ):
            if self._rng.random() < probability:
                injection.arm_random(self.world, phases)

    def _arm_snapshot_crashes(self, seed: int) -> None:
        """In some seeds agents are killed, or their nodes lose power, at named points around snapshots."""
        rng = random.Random(f"snapshot crashes {seed}")  # as in `_step_s`
        while rng.random() < 0.4:
            point, gang = rng.choice(list(SnapshotPoint)), rng.choice(self._gangs)
            crash = SnapshotCrash(gang, point, rng.randint(1, 8), powers_off=rng.random() < 0.3)
            self.world.snapshot_crashes.arm(crash)

    def _submit(self, gang: str, spec: GangSpec) -> None:
        world, rng = self.world, self._rng
        if rng.random() < (0.0 if self._gets_back else 0.4):
            world.final_steps[gang] = rng.randint(10, 60)
        if rng.random() < 0.06:
            world.jobs.unstartable_nodes.add(rng.choice(list(world.machines)))
        limit_s = rng.choice([60, 200]) if rng.random() < 0.2 and not self._gets_back else None
        if limit_s and (not spec.durable_dir or spec.preflight):
            limit_s = 200  # a minute never suffices where every run starts afresh, or waits for a check without an end
        if spec.min_nodes and self._is_sharded:  # others restore the same, whether they are or not
            world.sharded_gangs.add(gang)
        if spec.resume_from:
            world.durable_storage.add(gang, EARLIER_RUN, EARLIER_VERSION)
        if self._rolls_back:
            world.bad_batches[gang] = BAD_BATCHES
            world.skipping_gangs.add(gang)
        world.submit(JobSubmission(gang, spec, limit_s))
        if rng.random() < 0.15:
            world.cluster.update("take the requeue flag off", world.jobs.job_ids[gang], requeue=False)

    def _spec(self) -> GangSpec:
        spec = self._random_spec()
        nodes = max(2, spec.nodes)
        if self._gets_back == "ranks":
            return replace(spec, nodes=nodes, min_nodes=nodes - 1, spares=0, pool_nodes=0)
        return replace(spec, nodes=nodes, spares=0, pool_nodes=1) if self._gets_back else spec

    def _random_spec(self) -> GangSpec:
        rng = self._rng
        nodes = rng.choice([1, 2, 2, 2, 3, 3, 4, 5])
        return GangSpec(
            nodes=nodes,
            spares=rng.choice([0, 0, 1, 1, 2, 3]),
            min_nodes=max(1, nodes - rng.choice([1, 2])) if rng.random() < 0.24 else 0,
            ranks_per_node=rng.choice([1, 1, 1, 2]),
            gather_timeout_s=rng.choice([20.0, 40.0]),
            requeue=rng.random() < 0.8,
            durable_dir=rng.choice(["", "/durable", "/durable"]),
            stop_before_s=rng.choice([0.0, 10.0, 30.0]),
            requeue_at_limit=rng.random() < 0.5,
            pool_nodes=rng.choice([0, 0, 0, 1, 2]),
            hang_after_s=rng.choice([0.0, 5.0, 5.0, 8.0]),
        )

    def run(self) -> None:
        """Run the seed to its end.

        Raises:
            InvariantViolation: an invariant was violated.
        """
        world, rng = self.world, self._rng
        at = START_S + 1.0 + 8.0 * rng.random() + (CALM_S if self._gets_back else 0.0)
        for _ in range(1 if self._gets_back else min(10, 2 + int(rng.expovariate(0.4)))):
            world.schedule.call_at(at, self._inject_fault)
            at += rng.choice([0.3, 2.0, 8.0, 15.0]) * rng.random()
        for interval_s, action, until in (
            (15.0, self._repair_nodes, at + 60.0),
            (4.0, self._submit_next_job, at + 15.0),
        ):
            moment = START_S + interval_s
            while moment < until:
                world.schedule.call_at(moment, action)
                moment += interval_s
        self.world.run_until(at + 20.0 + 50.0 * rng.random() + (SECOND_GROWTH_S if self._grows_twice else 0.0))
        end = at + HEAL_TIME_S + SETTLE_TIMEOUT_S
        while not self._is_settled():
            if world.schedule.now > end:
                words = [*map(self._describe, self._gangs), *self._ended_unnoticed()]
                raise InvariantViolation(f"invariant 4: {', '.join(words)}: did not settle")
            self.world.run_until(world.schedule.now + 1.0)
        world.observer.run_settled()

    def _inject_fault(self) -> None:
        unfinished = [id for id in self._gangs if (gang := self.world.gang(id)) is None or not gang.final]
        injection.inject(self.world, self._rng.choice(unfinished or self._gangs))

    def _submit_next_job(self) -> None:
        """If a gang has ended early, submit the next job."""
        gang = self.world.gang(self._gangs[-1])
        spec = self._spec()
        if gang and gang.final and len(self._gangs) < 4 and spec.nodes + spec.spares <= len(self.world.machines):
            self._gangs.append(f"g{len(self._gangs) + 1}")
            self._submit(self._gangs[-1], self._with_newer_keys(spec))

    def _repair_nodes(self) -> None:
        """An operator repairs drained nodes and resumes them in Slurm. Where Muster may resume nodes, too, the operator
        often keeps some for a closer look instead."""
        world = self.world
        if world.limits.resume_after_check and self._closer_looks.random() < 0.7:
            self._keep_nodes()
            return
        for name, node in world.cluster.nodes().items():
            machine = world.machines[name]
            if node.drained and machine.powered and not machine.frozen and self._rng.random() < 0.8:
                machine.ranks_unkillable_until = min(machine.ranks_unkillable_until, world.schedule.now)
                world.note(f"an operator resumes {name}")
                world.cluster.resume(name)

    def _keep_nodes(self) -> None:
        """An operator writes another reason for the drain of some nodes."""
        for name, node in self.world.cluster.nodes().items():
            if node.drained and self._closer_looks.random() < 0.4:
                self.world.note(f"an operator writes another reason for the drain of {name}")
                self.world.cluster.drain(name, "fan broken, ticket 7")

    # -- the end --

    def _describe(self, gang: str) -> str:
        gang_state = self.world.gang(gang)
        return f"{gang} is {gang_state.phase}" if gang_state else f"{gang} is unknown"

    def _is_settled(self) -> bool:
        world = self.world
        coordinator = world.coordinator
        return (
            coordinator.is_running()
            and self._is_healed()
            and not world.slurm.unavailable_reason
            and not coordinator.core.state.owed
            and not coordinator.core.state.correlated_faults
            and not self._ended_unnoticed()
            and all(map(self._is_gang_settled, self._gangs))
        )

    def _ended_unnoticed(self) -> list[str]:
        """Nodes of which the core believes what is over: an operator's drain, though Slurm has the node in service; or
        a precursor, though the node has reported its end."""
        world, machines = self.world, self.world.machines
        known = world.coordinator.core.state.nodes.values()
        drained = (node.name for node in known if node.drain is not None)
        drains = [name for name in drained if world.coordinator.sees_in_service(name)]
        return drains + [node.name for node in known if machines[node.name].ended_signals & node.precursors.keys()]

    def _is_healed(self) -> bool:
        """No link is cut and no process is stopped. Ended processes may stay ended."""
        world = self.world
        processes = [*world.agents.values(), *world.daemons.values()]
        frozen = any(machine.frozen for machine in world.machines.values())
        return (
            not frozen
            and world.network.cuts.keys() <= world.permanent_cuts
            and not any(p.alive and p.stopped for p in processes)
        )

    def _is_gang_settled(self, id: str) -> bool:
        world = self.world
        gang, job = world.gang(id), world.jobs.job(id)
        if gang is None:
            # If all agents ended before a coordinator knew the job, Slurm ends it. An agent that is cut off for ever
            # makes no coordinator know the job.
            return job.state is not JobState.RUNNING or not any(
                self._should_exit(a) for (g, _), a in world.agents.items() if g == id
            )
        pool_jobs = [pool_job for pool_job in world.jobs.pool_jobs(id) if not pool_job.state.ended]
        if gang.final:
            return (
                job.state.ended
                and not pool_jobs
                and not any(self._should_exit(a) for (g, _), a in world.agents.items() if g == id)
            )
        wanted = {member.job for member in gang.roster.present()} | {
            request.job for request in gang.growth.pool.values()
        }
        if any(pool_job.id not in wanted for pool_job in pool_jobs):
            return False  # a pool job that no gang needs is still there
        if gang.phase in (Phase.SUBMITTED, Phase.REQUEUED):
            return job.state is JobState.PENDING and not awaits_release(gang, job, world.limits)
        training = world.newest_training(id)
        if (
            id in world.final_steps
            or gang.phase is not Phase.RUNNING
            or training is None
            or training.generation != gang.newest.generation
        ):
            return False
        return (
            world.schedule.now - training.last_step_at < 0.5 + world.durations.step_s()
            and gang.newest.stepped_generation == gang.newest.generation
        )

    def _should_exit(self, agent: Agent) -> bool:
        """The agent is reachable, so it could be told to exit, and it is still there."""
        return agent.is_running() and self.world.network.connected(agent.node, COORDINATOR)


def run(seed: int, trace: bool = False) -> Result:
    """Run one seed. The same seed gives the same run."""
    folder = make_folder("muster-sim-")
    try:
        seed_run = SeedRun(seed, folder, trace)
        violation_text = ""
        try:
            seed_run.run()
        except InvariantViolation as violation:
            violation_text = str(violation)
        except Exception as error:  # any exception of the core is a failure of this seed
            violation_text = f"{type(error).__name__}: {error}"
            if trace:
                raise
        finally:
            seed_run.world.close()
        return Result(
            seed,
            seed_run.world.coverage,
            violation_text,
            seed_run.world.transcript() if violation_text or trace else [],
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
