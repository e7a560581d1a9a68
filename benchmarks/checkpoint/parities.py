"""What parities cost: four nodes whose ranks hold different states, with a parity and, in turn, with whole copies."""

from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import ExitStack

from benchmarks.checkpoint.equal_rank import EqualRank
from benchmarks.checkpoint.figures import RATE, Rows
from muster.checkpoint.format.layout import PIECE_BYTES
from muster.checkpoint.store.parity import exclusive_or
from muster.checkpoint.testing.gang_of_processes import Gang
from muster.checkpoint.testing.worker import Worker

NODES = ("n0", "n1", "n2", "n3")
LOST = 1
SPARE = "spare"

XOR = "XOR of a piece in memory, one core"
WITH_PARITY, WITH_COPIES = "commit on 4 nodes with a parity, all their bytes", "  the same with whole copies"
REBUILT = "restore of a lost node's rank from the parity"

_XOR_ROUNDS = 64


def measure(rows: Rows, size: int, rounds: int) -> None:
    """`size`: bytes of the state of all four nodes together."""
    rows.add(XOR, RATE, *_xor_rates(rounds))
    for with_parity, row in ((True, WITH_PARITY), (False, WITH_COPIES)):
        with Gang() as gang:
            gang.add(*NODES)
            _commits(rows, row, gang, size, rounds, with_parity)


def _xor_rates(rounds: int) -> list[float]:
    target, added = memoryview(bytearray(PIECE_BYTES)), memoryview(bytearray(os.urandom(PIECE_BYTES)))
    rates = []
    for _ in range(rounds):
        began = time.monotonic()
        for _ in range(_XOR_ROUNDS):
            exclusive_or.add(target, added)
        rates.append(_XOR_ROUNDS * PIECE_BYTES / (time.monotonic() - began) / 1e9)
    return rates


def _commits(rows: Rows, row: str, gang: Gang, size: int, rounds: int, with_parity: bool) -> None:
    """Commits, and with a parity restores of one rank on a node that has just come."""
    places, group = dict(enumerate(NODES)), NODES if with_parity else ()
    buddies = {} if with_parity else dict(zip(NODES, (*NODES[1:], NODES[0]), strict=True))
    with ExitStack() as workers:
        ranks = {rank: _rank(workers, rank, size) for rank in places}
        generation = gang.begin(places, buddies, parity_group=group)
        for rank, worker in ranks.items():
            _call_with_socket(gang, worker, "attach", generation, rank=rank, node=places[rank])
        for step in range(1, rounds + 2):
            for worker in ranks.values():
                worker.start("fill", step)
            began = max(worker.result() for worker in ranks.values())
            seconds = gang.committed_at(step) - began
            if step > 1:  # the first one touches its memory
                rows.add(row, RATE, size / seconds / 1e9)
    if with_parity:
        gang.remove(NODES[LOST])
        for _ in range(rounds):
            gang.add(SPARE)
            rows.add(REBUILT, RATE, size / len(NODES) / _restore_s(gang, places, size, rounds + 1) / 1e9)
            gang.remove(SPARE)


def _restore_s(gang: Gang, places: dict[int, str], size: int, step: int) -> float:
    """Seconds from the order until the verified bytes of the lost rank can be mapped."""
    with ExitStack() as workers:
        rank, plan = _rank(workers, LOST, size), gang.parity_plan(places, LOST)
        began = time.monotonic()
        generation = gang.begin({**places, LOST: SPARE}, {}, plan)
        restored: float = _call_with_socket(gang, rank, "restore", generation, step, rank=LOST, node=SPARE)
        return restored - began


def _rank(workers: ExitStack, rank: int, size: int) -> Worker:
    context = multiprocessing.get_context("spawn")
    worker = Worker(context, EqualRank, rank, len(NODES), size // len(NODES), True)
    workers.callback(worker.close)
    worker.call("is_up")
    return worker


def _call_with_socket(gang: Gang, worker: Worker, method: str, *arguments: int, rank: int, node: str) -> float:
    descriptor = gang.connect(rank, node)
    try:
        return worker.call(method, *arguments, descriptor=descriptor)  # type: ignore[no-any-return]
    finally:
        os.close(descriptor)
