"""The phases of the benchmark for one size of state. Each takes turns with what it is compared with."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import parities, plans
from benchmarks.checkpoint.equal_rank import EqualRank
from benchmarks.checkpoint.figures import COUNT, MEBIBYTES, PERCENT, RATE, SECONDS, Rows, ratio
from benchmarks.checkpoint.peak_memory import PeakMemory, held_bytes
from benchmarks.checkpoint.plain_socket import SocketEnd
from benchmarks.checkpoint.training_rank import WIDTH, TrainingRank
from benchmarks.peers.checkpoints.library import LIBRARIES, Library, NotMeasured, RunningLibrary
from muster.checkpoint.store.commit.snapshot_interval import best_interval
from muster.checkpoint.store.memory.slots import SLOTS_PER_RANK
from muster.checkpoint.testing.gang_of_processes import Gang
from muster.checkpoint.testing.worker import Worker
from muster.v1.agent_pb2 import TIER_BUDDY, TIER_OWN

NODE, BUDDY, SPARE = "n0", "n1", "spare"

STALL, MEMCPY, FIRST = "stall of step()", "memcpy, same bytes and threads", "first snapshot, with its slots"
TORCH_SAVE, DCP_SAVE = "torch.save", "torch.distributed.checkpoint.save"
DCP_ASYNC = "torch.distributed.checkpoint.async_save, until it returns"
COMMIT_SECONDS = "  until all agents know of it"
STALL_REPLICATED = "stall of step(), in a gang with a buddy"
DIFFERING, EQUAL = "commit of shards that differ", "commit of equal shards"
OWN, OWN_VERIFIED = "restore from own memory, into tensors", "  until its verified bytes can be mapped"
BUDDY_RATE = "restore from the buddy by a spare, until its bytes can be mapped"
BUDDY_LOADED = "  into tensors"
NEWCOMER_RATE = "restore from the buddy by a node that has just come, likewise"
NEWCOMER_LOADED = "  into its tensors"
RESTORE_MEMCPY = "memcpy of the restored bytes"
SOCKET, FLUSH, COPY = "bare TCP socket, one stream", "flush", "cp and sync -f"
SLOWED, SLOWED_WITH_STALL = "step longer while a version is replicated", "  the same, with the stall"
OWN_STEP, DELAY = "  the job's own step", "  the training is delayed by"
AUTO_EVERY, AUTO_SLOWED = 'steps between snapshots that every="auto" chooses', "  step longer at that interval"
PEAK = "peak memory over slots, copies, and what spares keep ready"


@dataclass(frozen=True)
class Settings:
    """What is measured. `gib`: GiB of state; `threads`: of each training process; `every`, `step_s`: steps between
    snapshots and their length, for the slow-down; `mtbf_s`: seconds between failures, for the interval that "auto"
    chooses; `folder`: on the file system that flushes are measured on."""

    gib: float
    rounds: int
    threads: int
    every: int
    step_s: float
    mtbf_s: float
    folder: Path


def measure(rows: Rows, settings: Settings, *, peers: bool) -> None:
    """Everything. `peers`: also with other checkpoint libraries."""
    _say(settings, "stalls")
    stalls(rows, settings, peers)
    with Gang() as gang:
        gang.add(NODE, BUDDY)
        _say(settings, "commits, steps meanwhile, flushes")
        sums = commits(rows, settings, gang, slowdown=True)
        _say(settings, "restores")
        restores(rows, settings, gang, sums)
    _say(settings, "commits of equal shards")
    equal_commits(rows, settings)
    _say(settings, "plans")
    plans.measure(rows, settings.rounds)
    _say(settings, "parities")
    parities.measure(rows, int(settings.gib * 2**30), settings.rounds)


def measure_small(rows: Rows, settings: Settings) -> None:
    """What shows whether times are linear in bytes."""
    _say(settings, "commits, flushes, restores")
    with Gang() as gang:
        gang.add(NODE, BUDDY)
        sums = commits(rows, settings, gang, slowdown=False)
        restores(rows, settings, gang, sums)


def summary(rows: Rows) -> dict[str, float | None]:
    """The figures of the last line."""
    medians = [rows.median(name) for name in (TORCH_SAVE, DCP_SAVE, DCP_ASYNC, *map(_row_name, LIBRARIES))]
    return {
        "stall_over_memcpy": ratio(rows.median(STALL), rows.median(MEMCPY)),
        "stall_over_best_peer": ratio(rows.median(STALL), min((m for m in medians if m is not None), default=None)),
        "restore_own_over_memcpy": ratio(rows.median(OWN), rows.median(RESTORE_MEMCPY)),
        "restore_buddy_gb_s": rows.median(BUDDY_RATE),
        "restore_buddy_over_socket": ratio(rows.median(BUDDY_RATE), rows.median(SOCKET)),
        "flush_over_cp": ratio(rows.median(FLUSH), rows.median(COPY)),
        "step_slowdown_percent": rows.median(AUTO_SLOWED),
    }


def stalls(rows: Rows, settings: Settings, libraries: bool) -> None:
    """How long training waits for a snapshot, in turn with a plain copy, PyTorch's own saves and other libraries."""
    with Gang() as gang, _rank(settings, trained=True) as rank, ExitStack() as others:
        gang.add(NODE)
        _attach(gang, rank, {}, every=1)
        size = rank.call("state_bytes")
        running = _start_libraries(rows, settings, size, others) if libraries else {}
        for number in range(settings.rounds + 1):
            measured = Rows() if number == 0 else rows  # the first round touches buffers
            measured.add(MEMCPY, SECONDS, rank.call("memcpy"))
            rank.call("change")
            step, stalled_s, _ = rank.call("step")
            gang.committed_at(step)
            (rows if number == 0 else measured).add(FIRST if number == 0 else STALL, SECONDS, stalled_s)
            for name, method in ((TORCH_SAVE, "torch_save"), (DCP_SAVE, "dcp_save"), (DCP_ASYNC, "dcp_async_save")):
                if number <= _saves(settings):
                    measured.add(name, SECONDS, rank.call(method, str(settings.folder / method)))
            for name, library in list(running.items()):
                try:
                    measured.add(name, SECONDS, library.call_s("save"))
                except NotMeasured as why:
                    rows.leave_out(name, str(why))
                    del running[name]


def _saves(settings: Settings) -> int:
    """Rounds with saves to disk: they take long, and none is near the others."""
    return min(3, settings.rounds)


def _start_libraries(rows: Rows, settings: Settings, size: int, running: ExitStack) -> dict[str, RunningLibrary]:
    descriptor = os.memfd_create("bench-state")
    running.callback(os.close, descriptor)
    block = os.urandom(WIDTH * WIDTH * 4)
    for _ in range(size // len(block)):
        os.write(descriptor, block)
    found: dict[str, RunningLibrary] = {}
    for library in LIBRARIES:
        memory = tempfile.mkdtemp(prefix="muster-bench-", dir="/dev/shm")
        running.callback(shutil.rmtree, memory, ignore_errors=True)
        job = {"descriptor": descriptor, "width": WIDTH, "threads": settings.threads, "memory_folder": memory}
        job["folder"] = str(settings.folder / library.environment)
        name = _row_name(library)
        try:
            found[name] = running.enter_context(RunningLibrary(library, job))
        except NotMeasured as why:
            rows.leave_out(name, str(why))
    return found


def commits(rows: Rows, settings: Settings, gang: Gang, *, slowdown: bool) -> list[int]:
    """Commits of shards of which every byte travels to the buddy; peak memory; a job's steps meanwhile; flushes.
    Leaves the newest version on the node and its buddy, and returns the sums of its tensors."""
    with _rank(settings, trained=True) as rank:
        rank.call("state_bytes")  # the state is there
        before = held_bytes([*gang.pids, rank.process.pid])
        _attach(gang, rank, {NODE: BUDDY}, every=1)
        with PeakMemory([*gang.pids, rank.process.pid]) as memory:
            for number in range(settings.rounds + 1):
                rank.call("change")
                step, stalled_s, began = rank.call("step")
                seconds = gang.committed_at(step) - began
                size = gang.shard(0, NODE, TIER_OWN).bytes
                if number == 0:
                    rows.add(FIRST, SECONDS, stalled_s)
                else:
                    rows.add(STALL_REPLICATED, SECONDS, stalled_s)
                    rows.add(DIFFERING, RATE, size / seconds / 1e9)
                    rows.add(COMMIT_SECONDS, SECONDS, seconds)
        planned = 4 * size + gang.reserved_bytes
        rows.add(PEAK, MEBIBYTES, (memory.peak_bytes - before - planned) / 2**20)
        if slowdown:
            _slow_downs(rows, settings, gang, rank)
        sums: list[int] = rank.call("sums")
    _flushes(rows, settings, gang)
    return sums


def _slow_downs(rows: Rows, settings: Settings, gang: Gang, rank: Worker) -> None:
    """A job with a snapshot at each N-th step: N steps from a snapshot on, against N steps after its commit. So each
    pair shows by how much the copies of one version delay the training. That divided by the interval that "auto"
    chooses for these costs is how much longer a step is on average."""
    steps = settings.every
    _attach(gang, rank, {NODE: BUDDY}, every=2 * steps)
    for number in range(min(3, settings.rounds) + 1):
        rank.call("change")
        first, during_s, during_whole_s = rank.call("work", steps if number else 1, settings.step_s, True)
        gang.committed_at(first)
        if number == 0:
            continue  # the first snapshot takes long
        _, plain_s, plain_whole_s = rank.call("work", steps, settings.step_s, False)
        rows.add(SLOWED, PERCENT, (during_s / plain_s - 1) * 100)
        rows.add(SLOWED_WITH_STALL, PERCENT, (during_whole_s / plain_whole_s - 1) * 100)
        rows.add(OWN_STEP, SECONDS, plain_s)
        rows.add(DELAY, SECONDS, (during_s - plain_s) * steps)
    step_s, delay_s, stall_s = rows.median(OWN_STEP), rows.median(DELAY), rows.median(STALL_REPLICATED)
    assert step_s is not None
    assert delay_s is not None
    assert stall_s is not None
    every = best_interval(settings.mtbf_s, stall_s + max(0.0, delay_s), step_s)
    rows.add(AUTO_EVERY, COUNT, every)
    rows.add(AUTO_SLOWED, PERCENT, delay_s / (every * step_s) * 100)


def _flushes(rows: Rows, settings: Settings, gang: Gang) -> None:
    """Flushes of the newest version, in turn with a copy of the same bytes to the same file system."""
    size = gang.shard(0, NODE, TIER_OWN).bytes
    with _file_in_memory(size) as source:
        for number in range(1, min(3, settings.rounds) + 1):
            target, folder = settings.folder / "copy", settings.folder / f"durable{number}"
            seconds = _copy_s(source, target)
            target.unlink()
            rows.add(COPY, RATE, size / seconds / 1e9)
            folder.mkdir()
            rows.add(FLUSH, RATE, size / gang.flush_s(NODE, number, str(folder)) / 1e9)
            shutil.rmtree(folder)


def _say(settings: Settings, what: str) -> None:
    print(f"{settings.gib:g} GiB: {what}", file=sys.stderr, flush=True)


def _row_name(library: Library) -> str:
    return f"{library.name}: {library.about}"


@contextmanager
def _file_in_memory(size: int) -> Iterator[str]:
    descriptor = os.memfd_create("bench-copy")
    try:
        block = os.urandom(16 << 20)
        for start in range(0, size, len(block)):
            os.write(descriptor, block[: size - start])
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _copy_s(source: str, target: Path) -> float:
    began = time.monotonic()
    subprocess.run(["cp", source, target], check=True)
    subprocess.run(["sync", "-f", target], check=True)
    return time.monotonic() - began


def restores(rows: Rows, settings: Settings, gang: Gang, sums: list[int]) -> None:
    """A rank that starts again until all of its tensors have the state with `sums`: on its own node, on a spare that
    was there at the last commit, and on a node that has come after it."""
    size = gang.shard(0, NODE, TIER_OWN).bytes
    with ExitStack() as workers:
        ends = [_worker(workers, "spawn", SocketEnd) for _ in range(2)]
        for _ in range(settings.rounds):
            gang.add(SPARE)
            with _rank(settings, trained=False) as rank:
                verified_s, loaded_s = _restore(gang, rank, NODE, NODE, TIER_OWN, sums)
                rows.add(OWN, SECONDS, loaded_s)
                rows.add(OWN_VERIFIED, SECONDS, verified_s)
                rank.call("memcpy")
                rows.add(RESTORE_MEMCPY, SECONDS, rank.call("memcpy"))
                step, _, _ = rank.call("step")
                gang.committed_at(step)
                gang.wait_reserved(SPARE, SLOTS_PER_RANK * size)
            rows.add(SOCKET, RATE, size / _socket_s(ends, size) / 1e9)
            for rate, loaded in ((BUDDY_RATE, BUDDY_LOADED), (NEWCOMER_RATE, NEWCOMER_LOADED)):
                with _rank(settings, trained=False) as rank:
                    verified_s, loaded_s = _restore(gang, rank, SPARE, BUDDY, TIER_BUDDY, sums)
                    rows.add(rate, RATE, size / verified_s / 1e9)
                    rows.add(loaded, SECONDS, loaded_s)
                gang.remove(SPARE)
                gang.add(SPARE)
            gang.remove(SPARE)


def _restore(gang: Gang, rank: Worker, node: str, source: str, tier: int, sums: list[int]) -> tuple[float, float]:
    """Seconds from the order until a rank on `node` can map its verified bytes, and until they are in its tensors."""
    rank.call("state_bytes")  # its process is there
    plan = gang.plan(0, source, tier)
    began = time.monotonic()
    generation = gang.begin({0: node}, {NODE: BUDDY}, plan)
    descriptor = gang.connect(0, node)
    joined, loaded = rank.call("restore", generation, descriptor=descriptor)
    os.close(descriptor)
    if rank.call("sums") != sums:
        raise RuntimeError(f"the state that was restored from {source} is not the state that was kept")
    return joined - began, loaded - began


def _socket_s(ends: list[Worker], size: int) -> float:
    receiver, sender = ends
    port = receiver.call("port")
    receiver.start("receive", size)
    began: float = sender.call("send", port, size)
    ended: float = receiver.result()
    return ended - began


def equal_commits(rows: Rows, settings: Settings) -> None:
    """Commits of two ranks on two nodes that have written equal bytes, as in data parallelism."""
    size = int(settings.gib * 2**30)
    places = {0: NODE, 1: BUDDY}
    with Gang() as gang, ExitStack() as workers:
        gang.add(*places.values())
        generation = gang.begin(places, {NODE: BUDDY, BUDDY: NODE})
        ranks = [_worker(workers, "spawn", EqualRank, rank, len(places), size) for rank in places]
        for number, rank in enumerate(ranks):
            descriptor = gang.connect(number, places[number])
            rank.call("attach", generation, descriptor=descriptor)
            os.close(descriptor)
        for step in range(1, settings.rounds + 2):
            for rank in ranks:
                rank.start("fill", step)
            began = max(rank.result() for rank in ranks)
            seconds = gang.committed_at(step) - began
            if step > 1:
                rows.add(EQUAL, RATE, size / seconds / 1e9)


def _attach(gang: Gang, rank: Worker, buddies: dict[str, str], every: int) -> None:
    """Start a generation with the one rank on its node."""
    generation = gang.begin({0: NODE}, buddies)
    descriptor = gang.connect(0, NODE)
    rank.call("attach", generation, every, descriptor=descriptor)
    os.close(descriptor)


@contextmanager
def _rank(settings: Settings, *, trained: bool) -> Iterator[Worker]:
    """A training process, forked from one that has imported torch."""
    with ExitStack() as stack:
        yield _worker(stack, "forkserver", TrainingRank, settings.gib, settings.threads, trained)


def _worker(stack: ExitStack, method: str, served: Any, *arguments: Any) -> Worker:
    worker = Worker(multiprocessing.get_context(method), served, *arguments)
    stack.callback(worker.close)
    return worker
