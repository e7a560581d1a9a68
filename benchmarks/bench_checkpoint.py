"""What memory checkpoints cost: the delay of a step, digests, commits, restores, a flush.

    python -m benchmarks.bench_checkpoint [--parameters 3000000] [--nodes 4] [--rounds 30]

Prints a table, then one JSON object as the last line: the median and the worst value in the unit of each name. The
checkpoint services and their gRPC run in this process beside the training loop, so that commits are slower than on
nodes of their own.
"""

import argparse
import asyncio
import importlib.util
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muster.checkpoint.format import layout
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import digest_pieces
from muster.checkpoint.testing.gang_in_one_process import InProcessGang, TorchlessRank
from muster.checkpoint.training.agent_connection import AgentConnection
from muster.checkpoint.training.due_steps import DueSteps
from muster.v1 import agent_pb2

Figures = dict[str, list[float]]


class Loop:
    """An event loop in its own thread, in the place of an agent's process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, work: Any) -> Any:
        """Run a coroutine in the loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Stop the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def timed(work: Callable[[], Any]) -> float:
    """Milliseconds that a call takes."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1000


def digests(size: int, rounds: int) -> Figures:
    """Gigabytes per second that one thread digests."""
    data = memoryview(bytearray(size))
    layout.write_footer(data, layout.Footer(layout.align_up(size // 2), size - 4096, 0, 0, 0))
    digest_pieces(data)
    return {"digest_gb_s": [size / 1e6 / timed(lambda: digest_pieces(data)) for _ in range(rounds)]}


async def _until(gang: InProcessGang, version: Version) -> None:
    while any(n.committed() < version for n in gang.nodes.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.0005)  # polled from outside, as a coordinator learns of it


async def _gang(nodes: int) -> tuple[InProcessGang, dict[int, str]]:
    gang = InProcessGang("bench")
    places = {rank: f"n{rank}" for rank in range(nodes)}
    await gang.add(*places.values(), "spare")
    gang.begin(places)
    return gang, places


def commits(loop: Loop, nodes: int, size: int, rounds: int, *, alike: bool) -> Figures:
    """From the last rank's RankFilled until every agent knows of the commit; then restores.

    `alike`: all ranks hold equal bytes, as in data parallelism; otherwise all ranks hold different bytes.
    """
    gang, places = loop.run(_gang(nodes))
    sockets = loop.run(_sockets(gang, places))
    ranks = [TorchlessRank(AgentConnection(fd, rank, 1), rank, nodes) for rank, fd in sockets.items()]
    for rank in ranks:
        rank.join()
        rank.layout(size)
    word = "alike" if alike else "sharded"
    figures: Figures = {f"commit_{word}_ms": [], f"sent_{word}_bytes": []}
    for step in range(1, rounds + 1):
        before = sum(n.peer_service.sent_bytes for n in gang.nodes.values())
        for rank in ranks:
            seed = step * 1000 + (0 if alike else rank.rank)
            slot = rank.connection.slot_for_any_step(step, 10)
            assert slot is not None
            rank.write(slot, seed.to_bytes(8, "little") * (size // 8), b"own %d" % (step * nodes + rank.rank))
        start = time.perf_counter()
        for rank in ranks:
            rank.connection.report_progress(step)
            slot = rank.connection.slot_for_any_step(step, 0)
            assert slot is not None
            rank.connection.report_filled(slot, step)
        loop.run(_until(gang, Version(1, step)))
        figures[f"commit_{word}_ms"].append((time.perf_counter() - start) * 1000)
        sent = sum(n.peer_service.sent_bytes for n in gang.nodes.values()) - before
        figures[f"sent_{word}_bytes"].append(sent / nodes)
    figures |= _restores(loop, gang, places, rounds, word)
    for rank in ranks:
        rank.connection.close()
    loop.run(gang.close())
    return figures


async def _sockets(gang: InProcessGang, places: dict[int, str]) -> dict[int, int]:
    return {rank: gang.socket(rank, node) for rank, node in places.items()}


def _restores(loop: Loop, gang: InProcessGang, places: dict[int, str], step: int, word: str) -> Figures:
    """From the order until the rank has its verified bytes: on its own node, and on a spare from the buddy."""
    figures: Figures = {}
    for name, where in (("own", places), ("buddy", {**places, 0: "spare"})):

        async def begin(where: dict[int, str] = where) -> int:
            gang.begin(where, gang.plan(Version(1, step)))
            return gang.socket(0, where[0])

        start = time.perf_counter()
        link = AgentConnection(loop.run(begin()), 0, gang.generation)
        link.join()
        figures[f"recall_{name}_{word}_ms"] = [(time.perf_counter() - start) * 1000]
        link.close()
    return figures


def training(loop: Loop, parameters: int, rounds: int) -> Figures:
    """A model with AdamW in this process: the delay by step(), a restore, a flush."""
    import torch

    from muster.checkpoint import Checkpoint

    def new_job(link: AgentConnection | None) -> tuple[Any, Any, Any]:
        width = int((parameters / 12) ** 0.5)
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(12)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return model, optimizer, Checkpoint(model=model, optimizer=optimizer, link=link)

    gang, places = loop.run(_gang(1))
    link = AgentConnection(loop.run(_sockets(gang, places))[0], 0, 1)
    model, optimizer, checkpoint = new_job(link)
    checkpoint.restore()
    batch = torch.randn(8, model[0].in_features)
    figures: Figures = {"first_step_ms": [], "snapshot_stall_ms": [], "no_snapshot_us": [], "train_step_ms": []}
    for step in range(1, rounds + 3):

        def train() -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        taken = timed(train)
        stall = timed(lambda step=step: checkpoint.step(step))  # type: ignore[misc]
        loop.run(_until(gang, Version(1, step)))
        if step == 1:
            figures["first_step_ms"].append(stall)
        elif step > 2:
            figures["train_step_ms"].append(taken)
            figures["snapshot_stall_ms"].append(stall)
    figures["state_mb"] = [loop.run(_size(gang)) / 1e6]
    checkpoint._due = DueSteps(1 << 30)
    figures["no_snapshot_us"] = [timed(lambda: checkpoint.step(rounds + 3)) * 1000 for _ in range(rounds)]
    last = Version(1, rounds + 2)
    figures["flush_ms"] = [_flush(loop, gang, last)]

    async def again() -> int:
        gang.begin(places, gang.plan(last))
        return gang.socket(0, places[0])

    second = new_job(AgentConnection(loop.run(again()), 0, 2))[2]
    figures["restore_ms"] = [timed(second.restore)]
    checkpoint.close()
    second.close()
    loop.run(gang.close())
    return figures


async def _size(gang: InProcessGang) -> int:
    return max(s.bytes for n in gang.nodes.values() for s in n.checkpoint_service.shards())


def _flush(loop: Loop, gang: InProcessGang, version: Version) -> float:
    order = agent_pb2.FlushOrder(serial=1, version=version.to_wire(), reason="bench")
    order.sources.extend(gang.plan(version, agent_pb2.TIER_OWN).sources)
    with tempfile.TemporaryDirectory() as folder:
        return timed(lambda: loop.run(gang.nodes["n0"].checkpoint_service.flush(order, str(Path(folder)))))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=3_000_000)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    size = options.parameters * 12 // 8 * 8
    loop = Loop()
    try:
        figures = digests(size, options.rounds)
        for alike in (True, False):
            figures |= commits(loop, options.nodes, size, options.rounds, alike=alike)
        if importlib.util.find_spec("torch"):
            figures |= training(loop, options.parameters, options.rounds)
    finally:
        loop.close()
    table = {name: (statistics.median(v), max(v) if "gb_s" not in name else min(v)) for name, v in figures.items() if v}
    for name, (median, worst) in table.items():
        print(f"{name:24} median {median:12.3f}   worst {worst:12.3f}")
    print(json.dumps({name: {"median": round(m, 3), "worst": round(w, 3)} for name, (m, w) in table.items()}))


if __name__ == "__main__":
    main()
