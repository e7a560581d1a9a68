"""`make chaos MINUTES=10`: random faults at random times against two training jobs on a real Slurm.

Two users' jobs train side by side, each with a spare; the nodes that neither has are a pool that both share. Two
coordinators share a folder, one standing by. A job that ends is submitted anew. Every few seconds one fault strikes: a
node, a process, a service, two nodes at once; what was broken is mended some time later. When the time is up all is
mended and the jobs end. Then it is asked whether every promise was kept:

- every job ended DONE, with the weights of a run without faults, to the bit;
- whoever was drained or set DOWN in Slurm had been struck not long before, and the reason says why;
- no process and no memory of a job is left on any node, no job in the queue;
- in a run of ten minutes or more a node joined from the shared pool: else nothing was seen of that.

Which faults are drawn follows from the seed; when they strike depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn

from muster.slurm.cluster.cluster import CONTROLLER, COORDINATOR, LOGIN, Cluster
from muster.slurm.cluster.leftovers import wait_nothing_left
from muster.slurm.cluster.spec import USERS, ClusterSpec
from muster.slurm.cluster.struck_nodes import Guilt
from muster.slurm.cluster.training import SMALL, XID, Training, TrainingSpec
from muster.slurm.cluster.waiting import WaitTimeout, wait_until
from muster.slurm.image.engine import EngineError

MODEL = (*SMALL, "--bucket-cap-mb", "0.05", "--dropout", "0.1")
PAUSE_S = 0.1
"""A job rests so long after each step, so that it lives through several faults."""
STEPS, NODES, SPARES = 400, 3, 1
BROKEN_AT_ONCE = 3
"""No more nodes are struck while so many are not mended: two jobs of four nodes need the rest of the ten."""
CALM_S = (1.0, 6.0)
"""From one fault to the next."""
TRIES = 10
"""So many faults are drawn until one can strike now: a job that is just starting has no rank to kill."""
BROKEN_S = (8.0, 30.0)
"""How long a node that was struck stays so."""
MOMENT_S = (0.2, 0.6)
"""What lasts so long is no fault: nobody may be blamed for it. (A link that was cut may take a second more, until those
who asked for an address in vain ask again.)"""
END_S = 300.0
"""A job ends within this when nothing strikes any more."""
NOTHING_LEFT_S = 120.0
"""slurmstepd alone waits a minute for the children of a step of which a node has died."""
POOL_USED_MIN = 10.0
"""In a run of so many minutes a node joins from the shared pool: a job has one spare, and loses two nodes soon."""


class Broken(AssertionError):
    """A promise was not kept."""


@dataclass
class Lane:
    """One user's job after another; `runs` counts those that have ended."""

    user: str
    steps: int
    training: Training
    runs: int = 0
    killed_at: int = -1
    """Step at which a rank of the running job was killed last."""


@dataclass
class Chaos:
    """What is struck and mended, and what was seen."""

    cluster: Cluster
    random: random.Random
    say: Callable[[str], None]
    struck: dict[str, float] = field(default_factory=dict)
    """Nodes that are not mended yet, and when they will be."""
    guilt: Guilt = field(default_factory=Guilt)
    crashed: dict[str, Training] = field(default_factory=dict)
    """Nodes on which a rank was killed, and the job: while it lives, a second crash there may be held against them."""
    counts: Counter[str] = field(default_factory=Counter)
    pool_joins: int = 0
    """Nodes that came to a job from the shared pool, of those jobs that have ended."""

    def summary(self) -> str:
        """What struck, and what was seen of the pool."""
        faults = ", ".join(f"{name} {n}" for name, n in sorted(self.counts.items()))
        return f"{self.counts.total()} faults: {faults}; {self.pool_joins} nodes joined from the shared pool"

    # What strikes

    def strike(self, lanes: Sequence[Lane]) -> None:
        """One fault, drawn at random among those that can strike now."""
        room = len(self.struck) < BROKEN_AT_ONCE
        acts = [(act, weight) for act, weight, of_node in self._acts() if room or not of_node]
        for _ in range(TRIES):
            act = self.random.choices([act for act, _ in acts], [weight for _, weight in acts])[0]
            name = act.__name__.strip("_").replace("_", " ")
            if words := act(self.random.choice(lanes)):
                self.counts[name] += 1
                self.say(f"{name}: {words}")
                return

    def _acts(self) -> list[tuple[Callable[[Lane], str], int, bool]]:
        """Acts, how often each is drawn, whether it breaks nodes."""
        return [
            (self._power_off, 4, True),
            (self._crash, 4, True),
            (self._reboot, 2, True),
            (self._partition, 4, True),
            (self._pause, 3, True),
            (self._xid, 4, True),
            (self._two_at_once, 4, True),
            (self._kill_rank, 4, False),
            (self._kill_agent, 2, False),
            (self._restart_musterd, 2, False),
            (self._restart_coordinator, 3, False),
            (self._stop_coordinator, 1, False),
            (self._freeze_coordinator, 2, False),
            (self._restart_slurmctld, 1, False),
            (self._restart_slurmd, 1, False),
            (self._short_partition, 2, False),
            (self._short_pause, 2, False),
        ]

    def _power_off(self, lane: Lane) -> str:
        return self._break(lane, self.cluster.power_off)

    def _crash(self, lane: Lane) -> str:
        return self._break(lane, self.cluster.crash)

    def _reboot(self, lane: Lane) -> str:
        """It is there again before anybody has missed it, perhaps, and knows nothing of a job."""

        def reboot(node: str) -> float:
            at = self.cluster.crash(node)
            self.cluster.start_node(node)
            return at

        return self._break(lane, reboot)

    def _partition(self, lane: Lane) -> str:
        return self._break(lane, self.cluster.partition)

    def _pause(self, lane: Lane) -> str:
        return self._break(lane, self.cluster.pause)

    def _xid(self, lane: Lane) -> str:
        return self._break(lane, lambda node: self.cluster.kmsg(node, XID))

    def _two_at_once(self, lane: Lane) -> str:
        """Or one soon after the other: in the middle of a recovery."""
        first = self._break(lane, self.cluster.crash)
        if not first or len(self.struck) >= BROKEN_AT_ONCE:
            return first
        gap = self.random.choice((0.0, self.random.uniform(*MOMENT_S)))
        time.sleep(gap)
        return f"{first}, {gap:.1f} s later {self._break(lane, self.cluster.power_off)}"

    def _kill_rank(self, lane: Lane) -> str:
        """Only where the job has come further since: three crashes without progress are the script's."""
        step = int(lane.training.view.get("step", 0))
        if lane.training.view.get("phase") != "RUNNING" or step <= lane.killed_at + 5:
            return ""
        rank = self.random.randrange(NODES)
        node = lane.training.node_of(rank)
        if node in self.struck:
            return ""
        try:
            lane.training.kill_rank(rank)
        except EngineError:
            return ""  # it had just ended, for a fault that the view does not show yet
        self.guilt.strike(node, time.monotonic())  # of two crashes running on one node it is to blame
        self.crashed[node] = lane.training
        lane.killed_at = step
        return f"rank {rank} of {lane.user}'s job"

    def _kill_agent(self, lane: Lane) -> str:
        node = self._whole(lane)
        return node and self._end_process(node, f"pkill -KILL -u {lane.user} -f 'python3 [^ ]*/muster-agent run'")

    def _restart_musterd(self, lane: Lane) -> str:
        node = self._whole(lane)
        if node:
            self.cluster.restart_service(node, "musterd", "KILL")
        return node

    def _restart_coordinator(self, _: Lane) -> str:
        host = self._management()
        self.cluster.restart_coordinator(host=host)
        return f"SIGKILL on {host}"

    def _stop_coordinator(self, _: Lane) -> str:
        host, rest = self._management(), self.random.uniform(2, 8)
        self.cluster.kill_coordinator(host)
        time.sleep(rest)
        self.cluster.start_service(host, COORDINATOR)
        return f"SIGKILL on {host}, away for {rest:.1f} s"

    def _freeze_coordinator(self, _: Lane) -> str:
        """Long enough for the other one to take over, where there is one, now and then."""
        host, rest = self._management(), self.random.uniform(1, 12)
        self.cluster.freeze_service(host, COORDINATOR)
        time.sleep(rest)
        self.cluster.thaw_service(host, COORDINATOR)
        return f"{host}'s stood still for {rest:.1f} s"

    def _management(self) -> str:
        return self.random.choice(self.cluster.spec.coordinators)

    def _restart_slurmctld(self, _: Lane) -> str:
        self.cluster.restart_slurmctld()
        return "SIGTERM"

    def _restart_slurmd(self, lane: Lane) -> str:
        node = self._whole(lane)
        if node:
            self.cluster.restart_slurmd(node)
        return node

    def _short_partition(self, lane: Lane) -> str:
        return self._for_a_moment(lane, self.cluster.partition, self.cluster.heal)

    def _short_pause(self, lane: Lane) -> str:
        return self._for_a_moment(lane, self.cluster.pause, self.cluster.unpause)

    def _break(self, lane: Lane, how: Callable[[str], float]) -> str:
        node = self._whole(lane)
        if node:
            self.guilt.strike(node, time.monotonic())
            how(node)
            self.struck[node] = time.monotonic() + self.random.uniform(*BROKEN_S)
        return node

    def _for_a_moment(self, lane: Lane, begin: Callable[[str], float], end: Callable[[str], float]) -> str:
        node = self._whole(lane)
        if not node:
            return ""
        moment = self.random.uniform(*MOMENT_S)
        begin(node)
        time.sleep(moment)
        end(node)
        return f"{node} for {moment:.1f} s"

    def _end_process(self, node: str, command: str) -> str:
        done = self.cluster.exec(node, "sh", "-c", command, check=False)
        return node if done.rc == 0 else ""

    def _whole(self, lane: Lane) -> str:
        """A node of the job that is not struck; empty where there is none."""
        nodes = [str(node["node"]) for node in lane.training.view.get("nodes", ())]
        whole = [node for node in nodes if node not in self.struck]
        return self.random.choice(whole) if whole else ""

    # What mends

    def mend(self, everything: bool = False) -> None:
        """Look at all nodes, and bring back those whose time has come."""
        drained = self.check_drained()
        self._let_off(drained)
        now = time.monotonic()
        due = [node for node, at in self.struck.items() if everything or at <= now]
        due += [node for node in drained if node not in self.struck]
        if due:
            self.cluster.repair(*due)
            for node in due:
                self.struck.pop(node, None)
            self.say(f"mended: {', '.join(due)}")

    def check_drained(self) -> list[str]:
        """Whoever Muster has taken out of service was struck not long before, and the reason says why. Returns them.

        Raises:
            Broken: a node is out that nothing had struck of late, or without a reason.
        """
        drained = []
        for node, state in self.cluster.node_states().items():
            if not re.search("drain|down", state):
                continue
            shown = self.cluster.sh(CONTROLLER, f"scontrol show node {node}")
            reason = re.search(r"Reason=(.*)", shown)
            if reason is None:
                raise Broken(f"{node} is {state}, without a reason")
            if "muster:" in reason[1] and node not in self.guilt:
                raise Broken(f"{node} is {state}, and nothing had struck it of late: {reason[1]}")
            drained.append(node)
        return drained

    def _let_off(self, drained: Sequence[str]) -> None:
        """Nodes against which nothing has been held for long enough may not be drained any more."""
        self.crashed = {node: job for node, job in self.crashed.items() if not job.view.get("final")}
        blameless = self._fit() - {*drained, *self.struck, *self.crashed}
        if let_off := self.guilt.look(blameless, time.monotonic()):
            self.say(f"may not be drained any more: {', '.join(let_off)}")

    def _fit(self) -> set[str]:
        """The nodes against which Muster has nothing; none where no coordinator answers."""
        said = self.cluster.exec(LOGIN, "muster", "nodes", "--json", check=False)
        nodes = [json.loads(line) for line in said.stdout.splitlines()] if said.rc == 0 else []
        return {str(node["node"]) for node in nodes if node["verdict"] == "FIT"}


def job_spec(name: str, user: str, steps: int, spares: int = SPARES, pause_s: float = PAUSE_S) -> TrainingSpec:
    """A job that may be requeued, and says at its end what its weights are."""
    folder = f"/shared/jobs/{name}"
    arguments = (*MODEL, "--pause", str(pause_s), "--digest", f"{folder}/digest")
    settings = (f'durable_dir = "{folder}/durable"', "[slurm]", 'time = "01:00:00"')
    return TrainingSpec(name, NODES, spares, steps, arguments, settings, user)


def digest(training: Training) -> str:
    """What all ranks say of their weights.

    Raises:
        Broken: they do not say the same.
    """
    said = {(training.folder / f"digest.{rank}").read_text().strip() for rank in range(NODES)}
    if len(said) != 1:
        raise Broken(f"{training.spec.name}: the ranks end with different weights")
    return said.pop()


def undisturbed(cluster: Cluster, steps: int) -> str:
    """The digest of the weights that a job ends with where nothing goes wrong."""
    with Training(cluster, job_spec("undisturbed", "alice", steps, spares=0, pause_s=0.0)) as training:
        training.submit()
        end_well(training)
        return digest(training)


def end_well(training: Training) -> None:
    """Wait for its end.

    Raises:
        Broken: it did not end DONE, or not at all.
    """
    try:
        view = training.wait_final(END_S)
        training.wait_gone(120)
    except (TimeoutError, WaitTimeout) as error:
        raise Broken(str(error)) from error
    if view["phase"] != "DONE":
        raise Broken(f"{training.spec.name} ended {view['phase']}: {view.get('reason')}")


def pool_joins(training: Training) -> int:
    """How often a node of the shared pool came to the job, as its journal tells."""
    words = ("muster", "events", "--json", str(training.job))

    def told() -> list[str]:
        said = training.cluster.exec(LOGIN, *words, user=training.spec.user, check=False)
        return said.stdout.splitlines() if said.rc == 0 else []

    records = [json.loads(line) for line in wait_until(told, 60, f"the events of {training.spec.name}", every=0.5)]
    jobs = {name: [json.loads(r["json"])["job"] for r in records if r["name"] == name] for name in _JOINING}
    return sum(job in jobs["PoolQueued"] for job in jobs["MemberJoined"])


_JOINING = ("PoolQueued", "MemberJoined")
"""A node is asked for and has a small job's number; an agent joins from that job."""


def submit(cluster: Cluster, user: str, steps: int, run: int) -> Training:
    """The lane's next job."""
    training = Training(cluster, job_spec(f"{user}-{run}", user, steps))
    wait_until(lambda: _submitted(training), 60, f"{user}'s job is taken", every=0.5)
    return training


def _submitted(training: Training) -> bool:
    try:
        return training.submit() > 0
    except EngineError as error:
        if re.search("coordinator|slurm", str(error), re.I):
            return False  # one of them is just being started again: a user would try again as well
        raise


def play(
    cluster: Cluster, minutes: float, seed: int, say: Callable[[str], None], steps: int = STEPS, faults: int = 0
) -> Chaos:
    """Strike for `minutes`, and until `faults` have struck; then ask. `steps`: of each job.

    Raises:
        Broken, WaitTimeout: a promise was not kept.
    """
    wanted = undisturbed(cluster, steps)
    say("a job without faults has ended")
    chaos = Chaos(cluster, random.Random(seed), say)
    lanes = [Lane(user, steps, submit(cluster, user, steps, 0)) for user in USERS]
    try:
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end or chaos.counts.total() < faults:
            time.sleep(chaos.random.uniform(*CALM_S))
            chaos.mend()
            for lane in lanes:
                _next_job(chaos, lane, wanted)
            chaos.strike(lanes)
        chaos.mend(everything=True)
        _look_on(chaos, lanes)
        for lane in lanes:
            _check_end(chaos, lane, wanted)
        chaos.check_drained()
        wait_nothing_left(cluster, NOTHING_LEFT_S, in_queue=True)
        if minutes >= POOL_USED_MIN and not chaos.pool_joins:
            raise Broken("no node has joined from the shared pool")
    except (Broken, WaitTimeout):
        say(evidence(cluster))
        raise
    finally:
        for lane in lanes:
            lane.training.close()
    return chaos


def evidence(cluster: Cluster) -> str:
    """What tells how a promise came to be broken: what Slurm and the coordinators logged, and the jobs' own output."""
    said = [cluster.sh(CONTROLLER, "sinfo -N; squeue -a; tail -n 300 /var/log/muster/slurmctld.log")]
    said += [f"==> {host} <==\n{cluster.logs(host, COORDINATOR)[-40_000:]}" for host in cluster.spec.coordinators]
    outputs = sorted(cluster.shared.glob("jobs/*/slurm-*.out"))
    said += [f"==> {output} <==\n{output.read_text(errors='replace')[-6000:]}" for output in outputs]
    return "\n".join(said)


def _look_on(chaos: Chaos, lanes: Sequence[Lane]) -> None:
    """While the jobs come to their end: nothing strikes any more, and nobody new may be drained."""
    deadline = time.monotonic() + END_S
    while not all(lane.training.view.get("final") for lane in lanes) and time.monotonic() < deadline:
        chaos.mend()
        time.sleep(1.0)


def _next_job(chaos: Chaos, lane: Lane, wanted: str) -> None:
    if not lane.training.view.get("final"):
        return
    _check_end(chaos, lane, wanted)
    lane.training.close()
    lane.training = submit(chaos.cluster, lane.user, lane.steps, lane.runs)
    lane.killed_at = -1


def _check_end(chaos: Chaos, lane: Lane, wanted: str) -> None:
    end_well(lane.training)
    if digest(lane.training) != wanted:
        raise Broken(f"{lane.training.spec.name} ends with other weights than a run without faults")
    lane.runs += 1
    recoveries, joins = len(lane.training.view.get("recoveries", ())), pool_joins(lane.training)
    chaos.pool_joins += joins
    chaos.say(
        f"{lane.training.spec.name}: done after {recoveries} recoveries, {joins} nodes came from the shared pool, with "
        "the weights of a run without faults"
    )


def main() -> int:
    """Exit status: 0 every promise was kept; 1 one was not, or the cluster could not be had; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m muster.slurm.cluster.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="which faults are drawn; default: others each time")
    args = parser.parse_args()
    seed = random.randrange(1_000_000) if args.seed is None else args.seed
    signal.signal(signal.SIGTERM, _interrupt)
    began = time.monotonic()

    def say(words: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {words}", flush=True)

    say(f"seed {seed}")
    try:
        with Cluster.up(ClusterSpec(nodes=10, requeue_delay=1, standby=True)) as cluster:
            chaos = play(cluster, args.minutes, seed, say)
    except KeyboardInterrupt:
        return 130
    except (Broken, EngineError, WaitTimeout) as error:
        print(f"seed {seed}: {error}", file=sys.stderr)
        return 1
    say(chaos.summary())
    say("every promise was kept")
    return 0


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
