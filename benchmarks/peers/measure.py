"""Injects each fault into each alternative, and measures the time to the first step finished after the restart.

One run is one job: it is submitted, trains past step 25, gets one fault, and is watched until it trains again or its
deadline passes. If an alternative does not survive a fault, that fault is measured once. Other faults are measured as
often as requested and as fits into `CASE_S`.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.catalogue import PEERS
from benchmarks.peers.job import Job
from benchmarks.peers.peer import Peer
from benchmarks.peers.steplog import Recovery
from muster.slurm.image.engine import EngineError
from muster.slurm.testcluster.cluster import CONTROLLER, COORDINATOR, Cluster
from muster.slurm.testcluster.waiting import WaitTimeout

Say = Callable[[object], None]

CASE_S = 60.0  # seconds after which no further run of the same alternative and fault starts
TIME_LIMIT_S = 1500.0  # seconds in which the last run must be able to end
START_S = 200.0  # seconds until a new job must have finished step 25; about 10 s on an idle host
STEPS_BEFORE = 25


@dataclass(frozen=True)
class Fault:
    """The first node of a job is the batch host, and runs torchrun's store."""

    name: str
    inject: Callable[[Job], float]


FAULTS = (
    Fault("rank_killed", Job.kill_rank),
    Fault("node_crash", lambda job: job.cluster.crash(job.other_node())),
    Fault("power_loss", lambda job: job.cluster.power_off(job.other_node())),
    Fault("node0_crash", lambda job: job.cluster.crash(job.first_node())),
)


@dataclass(frozen=True)
class Run:
    """The result of one fault: the recovery, or None and the reason."""

    recovery: Recovery | None
    why: str = ""


def measure_peers(
    cluster: Cluster,
    runs: int,
    say: Say,
    *,
    peers: Collection[str] = (),
    faults: Collection[str] = (),
    budget_s: float = TIME_LIMIT_S,
) -> dict[str, Any]:
    """Returns `{peer: {fault: {"median_s", "worst_s", "runs", "recovered", "steps_redone", "note"}}}`.

    Times are in seconds; null if the alternative did not recover, with the reason in the note. `peers` and `faults`
    select by name; empty selects all. Cases that could exceed `budget_s` are left out, with a note. The cluster gets
    each alternative's Slurm settings, and its own settings back at the end.
    """
    deadline = time.monotonic() + budget_s
    found: dict[str, Any] = {}
    for peer in (p for p in PEERS if not peers or p.name in peers):
        with site_of(cluster, peer):
            for fault in (f for f in FAULTS if f.name in peer.faults and (not faults or f.name in faults)):
                cell = measure(cluster, peer, fault, runs, say, deadline)
                found.setdefault(peer.name, {})[fault.name] = cell
    return found


@contextmanager
def site_of(cluster: Cluster, peer: Peer) -> Iterator[None]:
    """The cluster with the settings of `peer`. Without Muster it has no coordinator, which would react to the dead
    nodes too. Restores the cluster afterwards.
    """
    spec = cluster.spec
    stopped = spec.daemons and not peer.is_supervised
    if stopped:
        cluster.stop_service(CONTROLLER, COORDINATOR)
    cluster.reconfigure(dataclasses.replace(spec, **peer.settings))
    try:
        yield
    finally:
        cluster.reconfigure(spec)
        cluster.restore_all()
        if stopped:
            cluster.start_service(CONTROLLER, COORDINATOR)


def measure(cluster: Cluster, peer: Peer, fault: Fault, runs: int, say: Say, deadline: float) -> dict[str, Any]:
    """The figures of `peer` and `fault`. `deadline` is a time of `time.monotonic`."""
    done: list[Run] = []
    began = time.monotonic()
    while len(done) < runs and (not done or time.monotonic() - began < CASE_S):
        if time.monotonic() + peer.deadline_s > deadline:
            break
        done.append(measure_fault(cluster, peer, fault, f"{peer.name}-{fault.name}-{len(done)}"))
        say(f"{peer.name}, {fault.name}: {describe_run(done[-1])}")
        if done[-1].recovery is None:
            break
    return summarize(done, runs, f"{peer.about}. {peer.notes.get(fault.name, '')}".strip())


def measure_fault(cluster: Cluster, peer: Peer, fault: Fault, name: str) -> Run:
    """One job, one fault. An error is part of the result and does not stop the other measurements."""
    try:
        cluster.restore_all()
        with Job(cluster, peer, name) as job:
            job.wait_step(STEPS_BEFORE, START_S)
            at = fault.inject(job)
            return Run(*job.wait_recovery(at, peer.deadline_s))
    except (EngineError, WaitTimeout) as error:
        return Run(None, f"not measured: {error}")


def describe_run(run: Run) -> str:
    """A run in words."""
    if run.recovery is None:
        return f"no recovery: {run.why}"
    recovery = run.recovery
    return f"{recovery.after_s:.1f} s, {recovery.redone} steps done again, {recovery.ranks} ranks"


def summarize(done: list[Run], wanted: int, note: str) -> dict[str, Any]:
    """The figures of `done`. A run without a recovery counts as infinitely long."""
    times = [run.recovery.after_s if run.recovery else math.inf for run in done]
    recoveries = [run.recovery for run in done if run.recovery]
    why = [run.why for run in done if run.why]
    if len(done) < wanted and not why:
        why = [f"{len(done)} of {wanted} runs: the time for the peers allows no more"]
    return {
        "median_s": _seconds(statistics.median(times) if times else math.inf),
        "worst_s": _seconds(max(times, default=math.inf)),
        "runs": len(done),
        "recovered": len(recoveries),
        "steps_redone": max((r.redone for r in recoveries), default=None),
        "ranks_after": min((r.ranks for r in recoveries), default=None),
        "note": " ".join([note, *(f"Measured: {reason}." for reason in why)]).strip(),
    }


def _seconds(value: float) -> float | None:
    return round(value, 1) if math.isfinite(value) else None
