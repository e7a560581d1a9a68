"""How long an account of goodput takes over a quarter of a year of a large site."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from muster.daemon.coordinator.accounting.account_store import FILE, KEYS, AccountStore, Job, make_tables, span_row
from muster.daemon.coordinator.diagnosis.side_database import SideDatabase
from muster.daemon.coordinator.goodput.intervals import Category, Fault, FaultKind, Interval, Wait

NODES, DAYS, DAY_S = 12_500, 90, 86400.0
LONG_JOBS, FAULTS_A_DAY, SHORT_JOBS_A_DAY = 20, 60, 1_000
"""Large jobs that share all nodes, faults of the whole fleet (one a node in seven months), and jobs of one node."""
_OF_RECOVERY = (
    Category.DETECT, Category.FENCE, Category.PLACE, Category.RENDEZVOUS, Category.LOAD, Category.FIRST_STEP,
    Category.STEPS_AGAIN,
)  # fmt: skip


def goodput() -> dict[str, float]:
    """Seconds of the slowest of all groupings, also those of a processor: a busy machine has neighbours."""
    with tempfile.TemporaryDirectory(prefix="bench-see-") as folder:
        spans = _fill(Path(folder), random.Random(7))
        store, took, processor_s = AccountStore(Path(folder)), {}, 0.0
        for by in KEYS:
            began, processor_began = time.perf_counter(), time.process_time()
            store.summary(0.0, DAYS * DAY_S, by, None)
            took[f"goodput_by_{by}_s"] = time.perf_counter() - began
            processor_s = max(processor_s, time.process_time() - processor_began)
    return {"goodput_intervals": spans, **took, "goodput_processor_s": processor_s, "goodput_s": max(took.values())}


def _fill(folder: Path, rng: random.Random) -> int:
    """Writes the jobs of all days in one transaction. Returns how many intervals they have."""
    spans = 0
    with SideDatabase(folder / FILE, make_tables).opened() as database:
        for job, leaves, intervals, waits in (*_long_jobs(rng), *_short_jobs(rng)):
            database.table("jobs").insert(asdict(job))
            database.table("spans").insert_all(span_row(job.gang, one, leaves) for one in intervals)
            database.table("waits").insert_all({"gang": job.gang, **asdict(one)} for one in waits)
            spans += len(intervals)
    return spans


_Used = tuple[Job, dict[str, str], list[Interval], list[Wait]]


def _long_jobs(rng: random.Random) -> Iterator[_Used]:
    each, faults = NODES // LONG_JOBS, FAULTS_A_DAY * DAYS // LONG_JOBS
    for number in range(LONG_JOBS):
        nodes = [f"n{number * each + at}" for at in range(each)]
        between_s = DAYS * DAY_S / faults
        intervals = [one for at in range(faults) for one in _recovery(nodes, at * between_s, between_s, rng)]
        swaps = [Wait(at * between_s, 12.0, each, swap=True) for at in range(faults)]
        leaves = {node: f"s{int(node[1:]) // 32}" for node in nodes}
        job = Job(f"long{number}", number, "pretrain", number % 7, f"a{number % 5}", 8, complete=True)
        yield job, leaves, intervals, [Wait(0.0, 900.0, each, swap=False), *swaps]


def _recovery(nodes: list[str], begins: float, lasts: float, rng: random.Random) -> Iterator[Interval]:
    """A fault on one of the nodes, and the training until the next one."""
    held, fault = frozenset(nodes), Fault(rng.choice(list(FaultKind)), rng.choice(nodes), "words", begins)
    for at, category in enumerate(_OF_RECOVERY):
        yield Interval(category, 1, begins + 5.0 * at, begins + 5.0 * at + 5.0, held, fault)
    yield Interval(Category.USEFUL, 1, begins + 5.0 * len(_OF_RECOVERY), begins + lasts, held)
    yield Interval(Category.SPARE, 1, begins, begins + lasts, frozenset(nodes[:8]))


def _short_jobs(rng: random.Random) -> Iterator[_Used]:
    for number in range(SHORT_JOBS_A_DAY * DAYS):
        begins, node = number * DAY_S / SHORT_JOBS_A_DAY, frozenset((f"n{rng.randrange(NODES)}",))
        parts = (Category.START, Category.FIRST_STEP, Category.USEFUL)
        intervals = [Interval(one, 1, begins + 60 * at, begins + 60 * at + 60, node) for at, one in enumerate(parts)]
        job = Job(f"short{number}", 1000 + number, "tune", number % 50, f"a{number % 20}", 8, complete=True)
        yield job, {}, intervals, [Wait(begins, 60.0, 1, swap=False)]
