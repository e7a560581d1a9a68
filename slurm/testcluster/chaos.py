"""`make chaos MINUTES=10`: injects random faults at random times into two training jobs on a real Slurm.

Two users run one training job each, with one spare. The remaining nodes are a pool that both jobs share. Two
coordinators share a folder; one is the standby. A job that has ended is submitted again. Every few seconds one fault is
injected: into a node, a process, a service, or two nodes at once. Faulted nodes are repaired some time later. At the
end everything is repaired and the jobs finish. Then these promises are checked:

- Every job ended DONE, with exactly the weights of a run without faults.
- Every node that Muster drained or set DOWN had a recent fault, and the drain reason names a cause.
- No process and no memory of a job remains on any node, and no job remains in the queue.
- In a run of ten minutes or more, a node joined from the shared pool. Otherwise the run tested nothing of the pool.

The seed determines which faults are drawn. The machine's speed determines when they are injected.
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

from muster.slurm.image.engine import EngineError
from muster.slurm.testcluster.cluster import CONTROLLER, COORDINATOR, LOGIN, Cluster
from muster.slurm.testcluster.diagnostics import diagnostics
from muster.slurm.testcluster.leftovers import wait_nothing_left
from muster.slurm.testcluster.recent_faults import RecentFaults
from muster.slurm.testcluster.spec import USERS, ClusterSpec
from muster.slurm.testcluster.training import FATAL_XID_LINE, SMALL_MODEL, Training, TrainingSpec
from muster.slurm.testcluster.waiting import WaitTimeout, wait_until

MODEL = (*SMALL_MODEL, "--bucket-cap-mb", "0.05", "--dropout", "0.1")
PAUSE_S = 0.1
"""Seconds that each rank sleeps after a step, so that one job lives through several faults."""
STEPS, NODES, SPARES = 400, 3, 1
MAX_FAULTED_NODES = 3
"""No node is faulted while so many nodes are not repaired: two jobs of four nodes need the rest of the ten."""
FAULT_INTERVAL_S = (1.0, 6.0)
"""Seconds between two faults (least, most)."""
MAX_DRAWS = 10
"""Draws until a fault is possible now. For example, a job that is starting has no rank to kill."""
REPAIR_DELAY_S = (8.0, 30.0)
"""Seconds from a node's fault to its repair (least, most)."""
SLOW_S = (2.0, 5.0)
"""Seconds for which a rank computes slowly (least, most): too few for a site to leave a straggler's node."""
GLITCH_S = (0.2, 0.6)
"""Seconds of a glitch (least, most). No node may be evicted for a glitch. A cut link may last a second longer, until
its peers repeat their failed address lookup (ARP).
"""
JOB_END_TIMEOUT_S = 300.0
"""Seconds in which a job ends after the last fault."""
CLEANUP_TIMEOUT_S = 120.0
"""Seconds. slurmstepd alone waits a minute for its child steps after a node of the step has died."""
POOL_CHECK_MINUTES = 10.0
"""In a run of this length a node must join from the shared pool: a job has one spare and soon loses two nodes."""


class PromiseBroken(AssertionError):
    """A check of Muster's promises failed."""


@dataclass
class JobSequence:
    """The jobs of one user, one after another. `runs` counts the jobs that have ended."""

    user: str
    training: Training
    runs: int = 0
    killed_at: int = -1
    """The step at which a rank of the running job was last killed."""


@dataclass
class ChaosRun:
    """Injects faults, repairs nodes, and records what happened."""

    cluster: Cluster
    random: random.Random
    say: Callable[[str], None]
    faulted: dict[str, float] = field(default_factory=dict)
    """The nodes that are not repaired yet, with the time of their repair."""
    recent_faults: RecentFaults = field(default_factory=RecentFaults)
    rank_killed_on: dict[str, Training] = field(default_factory=dict)
    """Nodes on which a rank was killed, with the job. While the job runs, Muster may blame the node for a second
    crash."""
    counts: Counter[str] = field(default_factory=Counter)
    pool_joins: int = 0
    """How many nodes joined from the shared pool, over all jobs that have ended."""

    def summary(self) -> str:
        """The faults that were injected, and how many nodes joined from the pool."""
        faults = ", ".join(f"{name} {n}" for name, n in sorted(self.counts.items()))
        return f"{self.counts.total()} faults: {faults}; {self.pool_joins} nodes joined from the shared pool"

    # Faults

    def inject_fault(self, sequences: Sequence[JobSequence]) -> None:
        """Injects one fault, drawn at random from those that are possible now."""
        room = len(self.faulted) < MAX_FAULTED_NODES
        actions = [(action, weight) for action, weight, faults_node in self._actions() if room or not faults_node]
        for _ in range(MAX_DRAWS):
            action = self.random.choices([action for action, _ in actions], [weight for _, weight in actions])[0]
            name = action.__name__.strip("_").replace("_", " ")
            if target := action(self.random.choice(sequences)):
                self.counts[name] += 1
                self.say(f"{name}: {target}")
                return

    def _actions(self) -> list[tuple[Callable[[JobSequence], str], int, bool]]:
        """Each fault's function, its weight in the draw, and whether it faults nodes."""
        return [
            (self._power_off, 4, True),
            (self._crash, 4, True),
            (self._reboot, 2, True),
            (self._partition, 4, True),
            (self._pause, 3, True),
            (self._xid, 4, True),
            (self._link_down, 2, True),
            (self._throttle, 2, True),
            (self._gpu_ecc, 2, True),
            (self._memory_error, 2, True),
            (self._drain, 2, True),
            (self._two_at_once, 4, True),
            (self._kill_rank, 4, False),
            (self._slow_rank, 2, False),
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

    def _power_off(self, sequence: JobSequence) -> str:
        return self._fault_node(sequence, self.cluster.power_off)

    def _crash(self, sequence: JobSequence) -> str:
        return self._fault_node(sequence, self.cluster.crash)

    def _reboot(self, sequence: JobSequence) -> str:
        """The node may be back before Muster detects the fault. After the reboot it knows no job."""

        def reboot(node: str) -> float:
            at = self.cluster.crash(node)
            self.cluster.start_node(node)
            return at

        return self._fault_node(sequence, reboot)

    def _partition(self, sequence: JobSequence) -> str:
        return self._fault_node(sequence, self.cluster.partition)

    def _pause(self, sequence: JobSequence) -> str:
        return self._fault_node(sequence, self.cluster.pause)

    def _xid(self, sequence: JobSequence) -> str:
        return self._fault_node(sequence, lambda node: self.cluster.kmsg(node, FATAL_XID_LINE))

    def _link_down(self, sequence: JobSequence) -> str:
        return self._fault_node(sequence, self.cluster.link_down)

    def _throttle(self, sequence: JobSequence) -> str:
        return self._fault_node(sequence, lambda node: self.cluster.throttle(node, 0))

    def _gpu_ecc(self, sequence: JobSequence) -> str:
        return self._fault_node(sequence, lambda node: self.cluster.gpu_ecc(node, 0))

    def _memory_error(self, sequence: JobSequence) -> str:
        return self._fault_node(sequence, self.cluster.memory_error)

    def _drain(self, sequence: JobSequence) -> str:
        """An operator drains a node. If no coordinator answers, the node is only repaired later."""
        command = ("muster", "drain", "--reason", "chaos")

        def drain(node: str) -> float:
            self.cluster.exec(CONTROLLER, *command, node, check=False)
            return time.time()

        return self._fault_node(sequence, drain)

    def _two_at_once(self, sequence: JobSequence) -> str:
        """Faults two nodes, at once or one soon after the other, in the middle of a recovery."""
        first = self._fault_node(sequence, self.cluster.crash)
        if not first or len(self.faulted) >= MAX_FAULTED_NODES:
            return first
        gap = self.random.choice((0.0, self.random.uniform(*GLITCH_S)))
        time.sleep(gap)
        return f"{first}, {gap:.1f} s later {self._fault_node(sequence, self.cluster.power_off)}"

    def _kill_rank(self, sequence: JobSequence) -> str:
        """Kills a rank only after the job has made progress: Muster blames three crashes without progress on the
        script.
        """
        step = int(sequence.training.view.get("step", 0))
        if sequence.training.view.get("phase") != "RUNNING" or step <= sequence.killed_at + 5:
            return ""
        rank = self.random.randrange(NODES)
        node = sequence.training.node_of(rank)
        if node in self.faulted:
            return ""
        try:
            sequence.training.kill_rank(rank)
        except EngineError:
            return ""  # the rank has just ended, because of a fault that the view does not show yet
        self.recent_faults.record(node, time.monotonic())  # Muster blames the node for two consecutive crashes
        self.rank_killed_on[node] = sequence.training
        sequence.killed_at = step
        return f"rank {rank} of {sequence.user}'s job"

    def _slow_rank(self, sequence: JobSequence) -> str:
        """A rank computes slowly for some seconds. No node may be evicted for that."""
        rank = self.random.randrange(NODES)
        if (
            sequence.training.view.get("phase") != "RUNNING"
            or (node := sequence.training.node_of(rank)) in self.faulted
        ):
            return ""
        try:
            self.cluster.slow_rank(node, rank)
            time.sleep(self.random.uniform(*SLOW_S))
            self.cluster.slow_rank(node, rank, clear=True)
        except EngineError:
            return ""  # the node has just failed
        return f"rank {rank} of {sequence.user}'s job"

    def _kill_agent(self, sequence: JobSequence) -> str:
        node = self._healthy_node(sequence)
        return node and self._end_process(node, f"pkill -KILL -u {sequence.user} -f 'python3 [^ ]*/muster-agent run'")

    def _restart_musterd(self, sequence: JobSequence) -> str:
        node = self._healthy_node(sequence)
        if node:
            self.cluster.restart_service(node, "musterd", "KILL")
        return node

    def _restart_coordinator(self, _: JobSequence) -> str:
        host = self._management()
        self.cluster.restart_coordinator(host=host)
        return f"SIGKILL on {host}"

    def _stop_coordinator(self, _: JobSequence) -> str:
        host, pause_s = self._management(), self.random.uniform(2, 8)
        self.cluster.kill_coordinator(host)
        time.sleep(pause_s)
        self.cluster.start_service(host, COORDINATOR)
        return f"SIGKILL on {host}, stopped for {pause_s:.1f} s"

    def _freeze_coordinator(self, _: JobSequence) -> str:
        """Sometimes long enough for the standby, if there is one, to take over."""
        host, pause_s = self._management(), self.random.uniform(1, 12)
        self.cluster.freeze_service(host, COORDINATOR)
        time.sleep(pause_s)
        self.cluster.thaw_service(host, COORDINATOR)
        return f"coordinator of {host} frozen for {pause_s:.1f} s"

    def _management(self) -> str:
        return self.random.choice(self.cluster.spec.coordinators)

    def _restart_slurmctld(self, _: JobSequence) -> str:
        self.cluster.restart_slurmctld()
        return "SIGTERM"

    def _restart_slurmd(self, sequence: JobSequence) -> str:
        node = self._healthy_node(sequence)
        if node:
            self.cluster.restart_slurmd(node)
        return node

    def _short_partition(self, sequence: JobSequence) -> str:
        return self._glitch(sequence, self.cluster.partition, self.cluster.heal)

    def _short_pause(self, sequence: JobSequence) -> str:
        return self._glitch(sequence, self.cluster.pause, self.cluster.unpause)

    def _fault_node(self, sequence: JobSequence, how: Callable[[str], float]) -> str:
        node = self._healthy_node(sequence)
        if node:
            self.recent_faults.record(node, time.monotonic())
            how(node)
            self.faulted[node] = time.monotonic() + self.random.uniform(*REPAIR_DELAY_S)
        return node

    def _glitch(self, sequence: JobSequence, begin: Callable[[str], float], end: Callable[[str], float]) -> str:
        node = self._healthy_node(sequence)
        if not node:
            return ""
        moment = self.random.uniform(*GLITCH_S)
        begin(node)
        time.sleep(moment)
        end(node)
        return f"{node} for {moment:.1f} s"

    def _end_process(self, node: str, command: str) -> str:
        done = self.cluster.exec(node, "sh", "-c", command, check=False)
        return node if done.rc == 0 else ""

    def _healthy_node(self, sequence: JobSequence) -> str:
        """A node of the job that is not faulted; "" if there is none."""
        nodes = [str(node["node"]) for node in sequence.training.view.get("nodes", ())]
        whole = [node for node in nodes if node not in self.faulted]
        return self.random.choice(whole) if whole else ""

    # Repairs

    def repair_due(self, everything: bool = False) -> None:
        """Checks all nodes, and repairs those that are due."""
        drained = self.check_drained()
        self._expire_faults(drained)
        now = time.monotonic()
        due = [node for node, at in self.faulted.items() if everything or at <= now]
        due += [node for node in drained if node not in self.faulted]
        if due:
            self.cluster.repair(*due)
            for node in due:
                self.faulted.pop(node, None)
            self.say(f"repaired: {', '.join(due)}")

    def check_drained(self) -> list[str]:
        """Checks that every node that Muster has drained had a recent fault and has a reason. Returns the drained
        nodes.

        Raises:
            PromiseBroken: a drained node had no recent fault, or has no reason.
        """
        drained = []
        for node, state in self.cluster.node_states().items():
            if not re.search("drain|down", state):
                continue
            shown = self.cluster.sh(CONTROLLER, f"scontrol show node {node}")
            reason = re.search(r"Reason=(.*)", shown)
            if reason is None:
                raise PromiseBroken(f"{node} is {state} without a reason")
            if "muster:" in reason[1] and node not in self.recent_faults:
                raise PromiseBroken(f"{node} is {state}, but had no recent fault: {reason[1]}")
            drained.append(node)
        return drained

    def _expire_faults(self, drained: Sequence[str]) -> None:
        """Removes the records of nodes that have been healthy long enough. Muster may no longer drain these nodes."""
        self.rank_killed_on = {node: job for node, job in self.rank_killed_on.items() if not job.view.get("final")}
        healthy = self._fit_nodes() - {*drained, *self.faulted, *self.rank_killed_on}
        if expired := self.recent_faults.expire(healthy, time.monotonic()):
            self.say(f"must not be drained any more: {', '.join(expired)}")

    def _fit_nodes(self) -> set[str]:
        """The nodes that Muster calls FIT; empty if no coordinator answers."""
        result = self.cluster.exec(LOGIN, "muster", "nodes", "--json", check=False)
        nodes = [json.loads(line) for line in result.stdout.splitlines()] if result.rc == 0 else []
        return {str(node["node"]) for node in nodes if node["verdict"] == "FIT"}


def job_spec(name: str, user: str, spares: int = SPARES, pause_s: float = PAUSE_S) -> TrainingSpec:
    """A job that may be requeued, and that writes a digest of its weights at its end."""
    folder = f"/shared/jobs/{name}"
    arguments = (*MODEL, "--pause", str(pause_s), "--digest", f"{folder}/digest")
    settings = (f'durable_dir = "{folder}/durable"', "[slurm]", 'time = "01:00:00"')
    return TrainingSpec(name, NODES, spares, STEPS, arguments, settings, user)


def digest(training: Training) -> str:
    """The digest of the weights, which all ranks must agree on.

    Raises:
        PromiseBroken: the ranks have different weights.
    """
    digests = {(training.folder / f"digest.{rank}").read_text().strip() for rank in range(NODES)}
    if len(digests) != 1:
        raise PromiseBroken(f"{training.spec.name}: the ranks ended with different weights")
    return digests.pop()


def reference_digest(cluster: Cluster) -> str:
    """The digest of the weights after a job without faults."""
    with Training(cluster, job_spec("reference_digest", "alice", spares=0, pause_s=0.0)) as training:
        training.submit()
        wait_done(training)
        return digest(training)


def wait_done(training: Training) -> None:
    """Waits until the job has ended DONE.

    Raises:
        PromiseBroken: the job ended in another phase, or not in time.
    """
    try:
        view = training.wait_final(JOB_END_TIMEOUT_S)
        training.wait_job_ended(120)
    except (TimeoutError, WaitTimeout) as error:
        raise PromiseBroken(str(error)) from error
    if view["phase"] != "DONE":
        raise PromiseBroken(f"{training.spec.name} ended {view['phase']}: {view.get('reason')}")


def count_pool_joins(training: Training) -> int:
    """How many nodes of the shared pool joined the job, from the job's journal."""
    words = ("muster", "events", "--json", str(training.job))

    def read_events() -> list[str]:
        result = training.cluster.exec(LOGIN, *words, user=training.spec.user, check=False)
        return result.stdout.splitlines() if result.rc == 0 else []

    records = [
        json.loads(line) for line in wait_until(read_events, 60, f"the events of {training.spec.name}", every=0.5)
    ]
    jobs = {name: [json.loads(r["json"])["job"] for r in records if r["name"] == name] for name in _POOL_FACTS}
    return sum(job in jobs["PoolQueued"] for job in jobs["MemberJoined"])


_POOL_FACTS = ("PoolQueued", "MemberJoined")
"""PoolQueued: a pool job has its number. MemberJoined: an agent of that job has joined."""


def submit(cluster: Cluster, user: str, run: int) -> Training:
    """Submits the next job of the sequence."""
    training = Training(cluster, job_spec(f"{user}-{run}", user))
    wait_until(lambda: _submitted(training), 60, f"{user}'s job is taken", every=0.5)
    return training


def _submitted(training: Training) -> bool:
    try:
        return training.submit() > 0
    except EngineError as error:
        if re.search("coordinator|slurm", str(error), re.I):
            return False  # the coordinator or slurmctld is restarting: a user would retry as well
        raise


def run_chaos(cluster: Cluster, minutes: float, seed: int, say: Callable[[str], None]) -> ChaosRun:
    """Injects faults for `minutes`. Then checks the promises.

    Raises:
        PromiseBroken, WaitTimeout: a promise was not kept.
    """
    expected = reference_digest(cluster)
    say("a job without faults has ended")
    chaos = ChaosRun(cluster, random.Random(seed), say)
    sequences = [JobSequence(user, submit(cluster, user, 0)) for user in USERS]
    try:
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            time.sleep(chaos.random.uniform(*FAULT_INTERVAL_S))
            chaos.repair_due()
            for sequence in sequences:
                _next_job(chaos, sequence, expected)
            chaos.inject_fault(sequences)
        chaos.repair_due(everything=True)
        _wait_for_jobs(chaos, sequences)
        for sequence in sequences:
            _check_end(chaos, sequence, expected)
        chaos.check_drained()
        wait_nothing_left(cluster, CLEANUP_TIMEOUT_S, in_queue=True)
        if minutes >= POOL_CHECK_MINUTES and not chaos.pool_joins:
            raise PromiseBroken("no node has joined from the shared pool")
    except (PromiseBroken, WaitTimeout):
        say(diagnostics(cluster, lines=300, jobs=20))
        raise
    finally:
        for sequence in sequences:
            sequence.training.close()
    return chaos


def _wait_for_jobs(chaos: ChaosRun, sequences: Sequence[JobSequence]) -> None:
    """Waits until the jobs have ended. There are no more faults, so no further node may be drained."""
    deadline = time.monotonic() + JOB_END_TIMEOUT_S
    while not all(sequence.training.view.get("final") for sequence in sequences) and time.monotonic() < deadline:
        chaos.repair_due()
        time.sleep(1.0)


def _next_job(chaos: ChaosRun, sequence: JobSequence, expected: str) -> None:
    if not sequence.training.view.get("final"):
        return
    _check_end(chaos, sequence, expected)
    sequence.training.close()
    sequence.training = submit(chaos.cluster, sequence.user, sequence.runs)
    sequence.killed_at = -1


def _check_end(chaos: ChaosRun, sequence: JobSequence, expected: str) -> None:
    wait_done(sequence.training)
    if digest(sequence.training) != expected:
        raise PromiseBroken(f"{sequence.training.spec.name} ended with other weights than a run without faults")
    sequence.runs += 1
    recoveries = len(sequence.training.view.get("recoveries", ()))
    joins = count_pool_joins(sequence.training)
    chaos.pool_joins += joins
    chaos.say(
        f"{sequence.training.spec.name}: done after {recoveries} recoveries, {joins} nodes joined from the pool, "
        "with the weights of a run without faults"
    )


def main() -> int:
    """Exit status: 0 all promises were kept; 1 a promise was broken, or the cluster did not start; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m muster.slurm.testcluster.chaos", description=__doc__
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="determines which faults are drawn; default: random")
    args = parser.parse_args()
    seed = random.randrange(1_000_000) if args.seed is None else args.seed
    signal.signal(signal.SIGTERM, _interrupt)
    began = time.monotonic()

    def say(words: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {words}", flush=True)

    say(f"seed {seed}")
    try:
        with Cluster.up(ClusterSpec(nodes=10, requeue_delay=1, standby=True)) as cluster:
            chaos = run_chaos(cluster, args.minutes, seed, say)
    except KeyboardInterrupt:
        return 130
    except (PromiseBroken, EngineError, WaitTimeout) as error:
        print(f"seed {seed}: {error}", file=sys.stderr)
        return 1
    say(chaos.summary())
    say("all promises were kept")
    return 0


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
