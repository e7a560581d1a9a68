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
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence

from muster.slurm.image.engine import EngineError
from muster.slurm.testcluster.chaos.faulted_nodes import FaultedNodes
from muster.slurm.testcluster.chaos.faults import FaultInjector
from muster.slurm.testcluster.chaos.jobs import JOB_END_TIMEOUT_S, JobSequence, PromiseBroken, reference_digest, submit
from muster.slurm.testcluster.cluster import Cluster
from muster.slurm.testcluster.diagnostics import diagnostics
from muster.slurm.testcluster.leftovers import wait_nothing_left
from muster.slurm.testcluster.spec import USERS, ClusterSpec
from muster.slurm.testcluster.waiting import WaitTimeout

FAULT_INTERVAL_S = (1.0, 6.0)
"""Seconds between two faults (least, most)."""
CLEANUP_TIMEOUT_S = 120.0
"""Seconds. slurmstepd alone waits a minute for its child steps after a node of the step has died."""
POOL_CHECK_MINUTES = 10.0
"""In a run of this length a node must join from the shared pool: a job has one spare and soon loses two nodes."""


def run_chaos(cluster: Cluster, minutes: float, seed: int, say: Callable[[str], None]) -> str:
    """Injects faults for `minutes`, then checks the promises. Returns what was injected, in words.

    Raises:
        PromiseBroken, WaitTimeout: a promise was not kept.
    """
    expected = reference_digest(cluster)
    say("a job without faults has ended")
    nodes = FaultedNodes(cluster, say)
    faults = FaultInjector(cluster, random.Random(seed), say, nodes)
    sequences = [JobSequence(user, submit(cluster, user, 0), say) for user in USERS]
    try:
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            time.sleep(faults.random.uniform(*FAULT_INTERVAL_S))
            nodes.repair_due()
            for sequence in sequences:
                if sequence.has_ended:
                    sequence.check_end(expected)
                    sequence.submit_next()
            faults.inject_fault(sequences)
        nodes.repair_due(everything=True)
        _wait_for_jobs(nodes, sequences)
        for sequence in sequences:
            sequence.check_end(expected)
        nodes.check_drained()
        wait_nothing_left(cluster, CLEANUP_TIMEOUT_S, in_queue=True)
        pool_joins = sum(sequence.pool_joins for sequence in sequences)
        if minutes >= POOL_CHECK_MINUTES and not pool_joins:
            raise PromiseBroken("no node has joined from the shared pool")
    except (PromiseBroken, WaitTimeout):
        say(diagnostics(cluster, lines=300, jobs=20))
        raise
    finally:
        for sequence in sequences:
            sequence.training.close()
    return f"{faults.summary()}; {pool_joins} nodes joined from the shared pool"


def _wait_for_jobs(nodes: FaultedNodes, sequences: Sequence[JobSequence]) -> None:
    """Waits until the jobs have ended. There are no more faults, so no further node may be drained."""
    deadline = time.monotonic() + JOB_END_TIMEOUT_S
    while not all(sequence.has_ended for sequence in sequences) and time.monotonic() < deadline:
        nodes.repair_due()
        time.sleep(1.0)


def main() -> int:
    """Exit status: 0 all promises were kept; 1 a promise was broken, or the cluster did not start; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m muster.slurm.testcluster.chaos", description=__doc__
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="determines which faults are drawn; default: random")
    args = parser.parse_args()
    seed = random.randrange(1_000_000) if args.seed is None else args.seed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()

    def say(words: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {words}", flush=True)

    say(f"seed {seed}")
    try:
        with Cluster.up(ClusterSpec(nodes=10, requeue_delay=1, standby=True)) as cluster:
            summary = run_chaos(cluster, args.minutes, seed, say)
    except KeyboardInterrupt:
        return 130
    except (PromiseBroken, EngineError, WaitTimeout) as error:
        print(f"seed {seed}: {error}", file=sys.stderr)
        return 1
    say(summary)
    say("all promises were kept")
    return 0


if __name__ == "__main__":
    sys.exit(main())
