"""Gloo replicas with the library's lines, of which one flips a single bit: it is found at the next snapshot."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")

from muster.checkpoint.format.versions import Version
from muster.checkpoint.testing.gang_in_one_process import InProcessGang, reported
from muster.checkpoint.testing.rank_processes import start_ranks
from muster.v1 import agent_pb2

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parent / "flipped_bit_script.py"
FLIP_AT = 12


@asynccontextmanager
async def training(folder: Path, ranks: int, flip_on: int, steps: int) -> AsyncIterator[InProcessGang]:
    """A gang of one rank on each node, whose script ends with 0."""
    gang, places = InProcessGang("g"), {rank: f"n{rank}" for rank in range(ranks)}
    await gang.add(*places.values())
    gang.begin(places)
    sockets = {rank: gang.socket(rank, node) for rank, node in places.items()}
    log, job = folder / "log", {"flip_on": flip_on, "flip_at": FLIP_AT, "steps": steps}
    process = await start_ranks(SCRIPT, ranks, sockets, log, job)
    try:
        yield gang
        assert await process.wait() == 0, log.read_text()[-3000:]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await gang.close()


async def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    end = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < end, f"not within {timeout_s} s"
        await asyncio.sleep(0.01)


def disagreement(gang: InProcessGang) -> agent_pb2.ReplicaDisagreement | None:
    return gang.nodes["n0"].checkpoint_service.disagreement()


@pytest.mark.parametrize(("ranks", "named", "majority"), [(4, [2], True), (3, [2], True), (2, [0, 1], False)])
async def test_a_flipped_bit_is_found_at_the_next_snapshot(
    tmp_path: Path, ranks: int, named: list[int], majority: bool
) -> None:
    async with training(tmp_path, ranks, flip_on=ranks - 1 if ranks < 4 else 2, steps=20) as gang:
        await until(lambda: disagreement(gang) is not None)
        found = disagreement(gang)
        assert found is not None
        assert (list(found.ranks), found.majority, found.replicas) == (named, majority, ranks)
        assert found.version.step >= FLIP_AT
        committed = max(node.committed() for node in gang.nodes.values())
        assert Version(1, 0) < committed < Version(1, FLIP_AT), "the last version on which all agreed"


async def test_replicas_that_differ_only_where_they_may_are_all_committed(tmp_path: Path) -> None:
    """Buffers of BatchNorm, samplers, random generators."""
    async with training(tmp_path, 3, flip_on=-1, steps=40) as gang:
        await until(lambda: all(node.committed() == Version(1, 40) for node in gang.nodes.values()))
        assert disagreement(gang) is None
        shards = [shard for node in gang.nodes.values() for shard in node.checkpoint_service.shards()]
        assert len({shard.digest for shard in shards}) == 3, "the whole shards differ"
        assert len({shard.replica_digest for shard in shards}) == 1
        assert shards[0].replica_group != 0


async def test_a_loss_that_is_nan_at_a_snapshot_is_reported(tmp_path: Path) -> None:
    async with training(tmp_path, 2, flip_on=-1, steps=8) as gang:
        service = gang.nodes["n1"].checkpoint_service
        await until(lambda: service.committed().step >= 8)
        found = reported(service, 1).not_finite
        assert (found.words, found.step >= 3) == ("loss = nan", True)
        assert not reported(gang.nodes["n0"].checkpoint_service, 0).HasField("not_finite")
