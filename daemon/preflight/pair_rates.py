"""All-reduces between pairs of nodes, by one task of a Slurm step on each node.

In each round the nodes form pairs, and in the next round other pairs. So a slow node shows in all of its pairs, and a
slow link in one pair. NCCL moves the data where CUDA is, gloo elsewhere. One task of each pair prints a line:
{"first": ..., "second": ..., "gb_s": ..., "cores_shared": ...}, with "error" and a rate of 0 if the pair did not come
to an end.
"""

from __future__ import annotations

import datetime
import importlib
import time
from collections.abc import Sequence
from typing import Any

from muster.daemon.preflight import step_line
from muster.daemon.preflight.pairing import rounds
from muster.daemon.preflight.processor_wait import ProcessorWait

_BYTES = 8 << 20
_TRIES = 3
_PAIR_TIMEOUT_S = 4.0
"""Seconds after which a pair is given up. A link of 1 Gbit/s needs 0.3 s for all tries."""
_START_TIMEOUT_S = 60.0
"""Seconds for all tasks to import PyTorch and to find each other."""


def measure(node: str, port: int, nodes: Sequence[str]) -> None:
    """Measure the pairs of `node`. The store of all `nodes` listens on `port` of the first one."""
    distributed = importlib.import_module("torch.distributed")
    torch = importlib.import_module("torch")
    rank = nodes.index(node)
    start = datetime.timedelta(seconds=_START_TIMEOUT_S)
    # Not every build of PyTorch has libuv.
    store = distributed.TCPStore(nodes[0], port, len(nodes), rank == 0, timeout=start, use_libuv=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=len(nodes), timeout=start)
    for number, pairs in enumerate(rounds(len(nodes))):
        for pair in pairs:
            if rank in pair:
                wait = ProcessorWait()
                found = _measure_pair(torch, distributed, pair, device)
                if rank == pair[0]:
                    _print(nodes, pair, found, wait.is_shared())
        _meet(store, f"after round {number}", rank, len(nodes))
    # The store ends with rank 0. A task that still waited for the others would end with an error.
    store.set(f"done {rank}", "")
    if rank == 0:
        store.wait([f"done {other}" for other in range(len(nodes))])


def _meet(store: Any, where: str, rank: int, tasks: int) -> None:
    """Wait for all tasks: a pair that was slow must not make the next partner of its nodes wait."""
    store.set(f"{where} {rank}", "")
    store.wait([f"{where} {other}" for other in range(tasks)])


def _measure_pair(torch: Any, distributed: Any, pair: Sequence[int], device: str) -> float | str:
    """The rate of the pair in GB/s, or what went wrong."""
    timeout = datetime.timedelta(seconds=_PAIR_TIMEOUT_S)
    try:
        group = distributed.new_group(list(pair), timeout=timeout, use_local_synchronization=True)
        data = torch.ones(_BYTES // 4, device=device)
        best_s = float("inf")
        for number in range(1 + _TRIES):
            distributed.barrier(group)
            began = time.perf_counter()
            distributed.all_reduce(data, group=group)
            if device == "cuda":
                torch.cuda.synchronize()
            if number:  # the first one opens the connections
                best_s = min(best_s, time.perf_counter() - began)
        right = bool((data == 2.0 ** (1 + _TRIES)).all())
    except RuntimeError as error:
        return " ".join(str(error).split())[:200]
    return _BYTES / best_s / 1e9 if right else "the sum is wrong"


def _print(nodes: Sequence[str], pair: Sequence[int], found: float | str, cores_shared: bool) -> None:
    line: dict[str, object] = {"first": nodes[pair[0]], "second": nodes[pair[1]], "gb_s": 0.0}
    line |= {"error": found} if isinstance(found, str) else {"gb_s": found}
    step_line.say(line | {"cores_shared": cores_shared})
