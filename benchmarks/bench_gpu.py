"""`make bench-gpu`: what a snapshot, at once and overlapped, and the step timer cost on a GPU.

    python -m benchmarks.bench_gpu [--gib N]

The stall is the time for which the training thread is held by a snapshot of tensors on the GPU into a slot in shared
memory. It is compared with a copy of the same bytes from the GPU to pinned memory, in turn. An overlapped snapshot is
made beside matrix products and before the optimizer's step; steps with and without one take turns. The products take
2.5 times as long as the copy, because what is copied for longer than a step can't be hidden in it. Needs PyTorch and a
GPU.
The last line is a JSON object; names contain the units.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from muster.checkpoint.training.copies.late_copies import LateCopies
from muster.checkpoint.training.planning.publication import plan_publication
from muster.checkpoint.training.planning.shard_plan import ShardPlan
from muster.checkpoint.training.rank_signals.step_timer import HostClock, StepTimer
from muster.checkpoint.training.snapshot import SnapshotWriter
from muster.checkpoint.training.states.replicas import find_replicas
from muster.checkpoint.training.states.training_state import STRUCTURE, CapturedState, StateLeaf, TrainingState

PAIRS = 5
_TENSOR_BYTES = 256 << 20
STEPS_OF_COST = 10
PAIRS_OF_COST = 60
"""Short pairs and many: the speed of a host drifts by more than the timer costs."""
COMPUTE_PER_COPY = 2.5
"""Length of the step beside which a snapshot is copied, in copies."""
_WIDTH = 8192


def state_on_gpu(gib: float) -> tuple[nn.ParameterList, CapturedState, SnapshotWriter]:
    """Parameters of so many GiB, their state, and what writes it into a slot."""
    count = max(1, int(gib * 2**30 / _TENSOR_BYTES))
    parameters = nn.ParameterList(torch.randn(_TENSOR_BYTES // 4, device="cuda") for _ in range(count))
    state = TrainingState({"model": parameters}, None)
    captured = state.capture(0, 1)
    publication = plan_publication([*captured.leaves, StateLeaf(tuple(STRUCTURE.split(".")), None)])
    plan = ShardPlan(captured, publication, {}, find_replicas(state, captured.leaves, publication.world_size))
    return parameters, captured, SnapshotWriter(plan, [memoryview(mmap.mmap(-1, plan.bytes))])


def overlapped_s(gib: float, compute_s: float) -> tuple[list[float], list[float]]:
    """Seconds of steps without and with an overlapped snapshot, in turn; products of a step take `compute_s`."""
    parameters, captured, writer = state_on_gpu(gib)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    late = LateCopies([optimizer])
    late.begin_plan(captured.leaves)
    factor = torch.randn(_WIDTH, _WIDTH, device="cuda", dtype=torch.bfloat16)
    intact: list[bool] = []

    def multiply(times: int) -> None:
        for _ in range(times):
            factor @ factor

    multiply(3)
    products = max(1, round(compute_s / (_seconds(lambda: multiply(100)) / 100)))

    def step(kept: bool) -> None:
        if kept:
            rest = writer.write(0, captured, late.leaves)
            late.start(rest, captured.leaves, writer.copy, intact.append)
        multiply(products)
        optimizer.step()

    found: tuple[list[float], list[float]] = ([], [])
    for number in range(PAIRS + 1):
        for kept, times_s in zip((False, True), found, strict=True):
            took_s = _seconds(lambda kept=kept: step(kept))  # type: ignore[misc]
            if number:
                times_s.append(took_s)
    late.close()
    writer.close()
    assert intact == [True] * (PAIRS + 1)
    return found


def stalls_s(gib: float) -> tuple[list[float], list[float], int]:
    """Seconds of snapshots and of pinned copies, in turn, after one of each to touch the memory. Bytes of the state."""
    parameters, captured, writer = state_on_gpu(gib)
    tensors = [parameter.detach() for parameter in parameters]
    pinned = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]

    def snapshot() -> None:
        writer.write(0, captured)

    def pinned_copy() -> None:
        for target, source in zip(pinned, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    found: tuple[list[float], list[float]] = ([], [])
    for number in range(PAIRS + 1):
        for work, times_s in zip((snapshot, pinned_copy), found, strict=True):
            took_s = _seconds(work)
            if number:
                times_s.append(took_s)
    writer.close()
    return *found, sum(tensor.nbytes for tensor in tensors)


def _seconds(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def timer_cost_us() -> tuple[float, float]:
    """Microseconds of a step of 300 parameters on the GPU, without and with the timer: medians of pairs."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(150))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    batch = torch.ones(8, 64, device="cuda")
    plain, extra = [], []
    for _ in range(3):
        _step_us(model, optimizer, batch, None)  # the first steps load kernels
    for _ in range(PAIRS_OF_COST):
        before_us = _step_us(model, optimizer, batch, None)
        timer = StepTimer.of_states([model, optimizer], HostClock())
        assert timer is not None
        plain.append(before_us)
        extra.append(_step_us(model, optimizer, batch, timer) - before_us)
        timer.close()
    return statistics.median(plain), statistics.median(extra)


def _step_us(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, timer: StepTimer | None) -> float:
    """Microseconds of a step. Two steps before are not counted: in the first one the timer learns its parameter."""
    measured = 0
    for step in range(-1, STEPS_OF_COST + 1):
        if step == 1:
            torch.cuda.synchronize()
            began = time.perf_counter()
        if timer is not None:
            timer.begin_step()
        model(batch).sum().backward()
        optimizer.step()
        if timer is not None:
            timer.end_step(step)
            measured += len(timer.measured())
    torch.cuda.synchronize()
    assert timer is None or measured > STEPS_OF_COST // 2, measured
    return (time.perf_counter() - began) / STEPS_OF_COST * 1e6


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    gib = parser.parse_args().gib
    snapshots_s, pinned_s, size = stalls_s(gib)
    torch.cuda.empty_cache()
    snapshot_s, copy_s = statistics.median(snapshots_s), statistics.median(pinned_s)
    plain_s, overlapping_s = map(statistics.median, overlapped_s(gib, COMPUTE_PER_COPY * copy_s))
    plain_us, extra_us = timer_cost_us()
    figures = {
        "gpu": torch.cuda.get_device_name(0),
        "state_gib": round(size / 2**30, 2),
        "stall_s": round(snapshot_s, 4),
        "stall_worst_s": round(max(snapshots_s), 4),
        "pinned_copy_s": round(copy_s, 4),
        "pinned_gb_s": round(size / copy_s / 1e9, 2),
        "stall_over_pinned_copy": round(snapshot_s / copy_s, 2),
        "overlapped_step_s": round(overlapping_s, 4),
        "overlapped_step_longer_percent": round((overlapping_s / plain_s - 1) * 100, 2),
        "step_us": round(plain_us, 1),
        "timer_us": round(extra_us, 2),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
