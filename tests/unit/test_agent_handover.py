"""The kept memory of a requeued gang: agents of one run deposit it with musterd, agents of the next run reclaim it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from muster.checkpoint.format import layout
from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.checkpoint_service import CheckpointService
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.memory.shards import Shard
from muster.checkpoint.store.replication import shard_offers
from muster.checkpoint.testing.gang_in_one_process import InProcessGang, TorchlessRank, contents
from muster.checkpoint.testing.no_transport import NoTransport
from muster.checkpoint.training.agent_connection import AgentConnection
from muster.daemon.agent.memory_handover import MemoryHandover, newest_first
from muster.daemon.node.kept_memory.kept_memory_store import KeptMemoryStore
from muster.daemon.node.kept_memory.memory_service import MemoryService
from muster.daemon.node.kept_memory.systemd_fd_store import FdStore
from muster.daemon.testing.scripted_gang import Gang, scripted_gang
from muster.slurm.hooks import prolog
from muster.v1.agent_pb2 import DUTY_EXIT, DUTY_HOLD, RANK_PHASE_EXITED, TIER_OWN, Order

GANG, JOB = "g", 7
PLACES = {0: "n0", 1: "n1"}
SHARED = (5 << 20) + 3
"""Bytes: more than one piece."""


@asynccontextmanager
async def musterd(path: Path) -> AsyncIterator[KeptMemoryStore]:
    """The kept memory of one node's daemon."""
    kept_memory = KeptMemoryStore(FdStore(""))
    running = asyncio.create_task(MemoryService(path, kept_memory).run())
    while not path.exists():  # noqa: ASYNC110 - a file gives no notification
        await asyncio.sleep(0)
    await asyncio.to_thread(prolog.free_kept_memory, JOB, os.getuid(), str(path), 0.0)
    try:
        yield kept_memory
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Run(InProcessGang):
    """One run of the job: checkpoint services on n0 and n1, each with a musterd that outlives the run."""

    def __init__(self, folder: Path, generation: int = 0) -> None:
        super().__init__(GANG)
        self.folder, self.generation = folder, generation
        self.ranks: dict[int, TorchlessRank] = {}

    def handover(self, name: str) -> MemoryHandover:
        return MemoryHandover(GANG, name, JOB, str(self.folder / name), self.nodes[name].checkpoint_service)

    async def __aenter__(self) -> Run:
        await self.add(*PLACES.values())
        for name in self.nodes:
            handover = self.handover(name)
            await handover.reclaim()
            handover.meet_order(self.generation)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def deposit(self) -> None:
        for name in self.nodes:
            handover = self.handover(name)
            handover.meet_order(self.generation)
            await handover.deposit()

    async def train(self, *steps: int) -> None:
        """Run a generation that commits these steps."""
        self.begin(PLACES)
        for rank, name in PLACES.items():
            assert (await self.join(rank, name))[1] == {}
        for step in steps:
            for rank, one in self.ranks.items():
                assert await asyncio.to_thread(one.step, step, shared(rank, step), b"own", 5.0)
            while any(n.committed().step < step for n in self.nodes.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        for one in self.ranks.values():
            one.connection.close()

    async def join(self, rank: int, name: str) -> tuple[int, dict[str, bytes]]:
        """Connect a rank and give it slots; returns the step that it starts from, and the contents of its shard."""
        one = TorchlessRank(AgentConnection(self.socket(rank, name), rank, self.generation), rank, len(PLACES))
        self.ranks[rank] = one
        start = await asyncio.to_thread(one.join)
        assert not await asyncio.to_thread(one.layout, SHARED)
        return start.step, dict(contents(start.shard)) if start.shard is not None else {}

    def held(self) -> dict[str, list[tuple[int, int, int]]]:
        """(rank, tier, step) of every shard on each node."""
        return {
            name: [(s.rank, s.tier, s.version.step) for s in node.checkpoint_service.shards()]
            for name, node in self.nodes.items()
        }


def shared(rank: int, step: int) -> bytes:
    return bytes([16 * rank + step]) * SHARED


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    """A folder with the sockets of two musterds."""
    async with musterd(tmp_path / "n0"), musterd(tmp_path / "n1"):
        yield tmp_path


async def test_the_next_run_goes_on_from_memory(folder: Path) -> None:
    async with Run(folder) as first:
        await first.train(1, 2)
        await first.deposit()
    async with Run(folder, generation=1) as second:
        assert second.held() == {"n0": [(0, TIER_OWN, 2)], "n1": [(1, TIER_OWN, 2)]}
        assert second.newest(2) == Version(1, 2)
        # The ranks have changed places.
        second.begin({0: "n1", 1: "n0"}, second.plan(Version(1, 2)))
        for rank, name in ((0, "n1"), (1, "n0")):
            step, found = await second.join(rank, name)
            assert (step, found["own"]) == (2, b"own")
            assert found["shared"][:SHARED] == shared(rank, 2)
        for one in second.ranks.values():
            one.connection.close()


async def test_kept_memory_is_reclaimed_once(folder: Path) -> None:
    async with Run(folder) as first:
        await first.train(1)
        await first.deposit()
    async with Run(folder, 1) as second:
        assert second.newest(2) == Version(1, 1)
    async with Run(folder, 1) as third:
        assert third.held() == {"n0": [], "n1": []}


async def test_reclaimed_memory_that_was_not_used_is_deposited_again(folder: Path) -> None:
    async with Run(folder) as first:
        await first.train(1)
        await first.deposit()
    for _ in range(2):
        async with Run(folder, 1) as later:
            assert later.newest(2) == Version(1, 1)
            await later.deposit()


async def test_damaged_memory_does_not_count(folder: Path) -> None:
    async with Run(folder) as first:
        await first.train(1)
        fd = os.dup(first.nodes["n1"].checkpoint_service.slot_shards()[0].memory.fd)
        await first.deposit()
    os.pwrite(fd, b"?", 4 << 20)
    os.close(fd)
    async with Run(folder, 1) as second:
        assert second.held() == {"n0": [(0, TIER_OWN, 1)], "n1": []}
        assert second.newest(2) is None


async def test_memory_that_another_version_of_muster_has_kept_is_refused_once(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "_MAGIC", b"MUSTERs1")  # as the version before an upgrade wrote it
    async with Run(folder) as first:
        await first.train(1, 2)
        await first.deposit()
    monkeypatch.undo()
    async with Run(folder, 1) as second:
        assert second.held() == {"n0": [], "n1": []}
        assert second.newest(2) is None
    refused = [r.getMessage() for r in caplog.records if "another version of Muster" in r.getMessage()]
    expected = (
        "1 of 1 shards of the previous run are not used: written by another version of Muster with layout 1; this "
        "version reads layout 2. The job goes on from its newest durable checkpoint"
    )
    assert refused == [expected] * 2, "one on each node"
    assert not [r for r in caplog.records if "damaged" in r.getMessage()]


async def test_without_musterd_the_next_run_starts_without_kept_memory(tmp_path: Path) -> None:
    async with Run(tmp_path) as first:
        await first.train(1)
        await first.deposit()
    async with Run(tmp_path, 1) as second:
        assert second.held() == {"n0": [], "n1": []}


async def test_a_description_that_does_not_fit_its_memory_is_refused(folder: Path) -> None:
    async with Run(folder) as first:
        await first.train(1)
        checkpoint_service = first.nodes["n0"].checkpoint_service
        (shard,) = checkpoint_service.slot_shards()
        other = CheckpointService("another", "n0", first.dial, NoTransport(), lambda: None)
        described = [shard_offers.make_offer(GANG, "n0", shard) for _ in range(3)]
        described[1].bytes -= 1
        described[2].pieces[0].digest = bytes(16)
        for offer, taker in zip(described, (other, checkpoint_service, checkpoint_service), strict=True):
            with pytest.raises(CorruptShard):
                await taker.adopt_shard(offer, os.dup(shard.memory.fd))
        loose = os.memfd_create("loose", os.MFD_CLOEXEC)
        with pytest.raises(CorruptShard, match="can still grow"):
            await checkpoint_service.adopt_shard(described[0], loose)
        await other.close()


# --- whole agents ----------------------------------------------------------------------------------------------------

RANK = """
    import os, pickle, time
    from muster.checkpoint.format.layout import length_placeholder, offset_placeholder
    from muster.checkpoint.training.agent_connection import AgentConnection
    from muster.checkpoint.testing.gang_in_one_process import TorchlessRank, contents
    items = pickle.dumps([(n, offset_placeholder(n), length_placeholder(n)) for n in (0, 100)], 4)
    rank = TorchlessRank(AgentConnection.from_environment(), 0, 1, items)
    start = rank.join()
    print(os.getpid(), start.step, contents(start.shard)["own"].decode() if start.shard else "afresh", flush=True)
    rank.layout(1 << 20)
    assert rank.step(start.step + 7, b"kept", b"mine", wait_s=30.0)
    while rank.connection.alive and not rank.connection.stop_reason:
        rank.connection.read_pending()
        time.sleep(0.01)
"""


@pytest.fixture
async def kept_memory(tmp_path: Path) -> AsyncIterator[KeptMemoryStore]:
    """That of a musterd which outlives all agents: without it, each would try for seconds to deposit its memory."""
    async with musterd(tmp_path / "memory.sock") as found:
        yield found


@pytest.fixture
async def gang(tmp_path: Path, kept_memory: KeptMemoryStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gang]:
    monkeypatch.setenv("SLURM_JOB_ID", str(JOB))
    async with scripted_gang(tmp_path) as found:
        found.memory = str(tmp_path / "memory.sock")
        yield found


async def start_run(gang: Gang) -> None:
    """Start the agent of one run of the job, with the order to hold."""
    gang.coordinator.order(Order(duty=DUTY_HOLD))
    gang.coordinator.agents.clear()
    await gang.start(1, sys.executable, gang.script(RANK), memory_checkpoint=True)


async def train(gang: Gang, generation: int) -> list[str]:
    """Run a generation from the shards on the node until it has kept a step; returns what its rank started from."""
    gang.fence(generation - 1)
    await gang.until(lambda: gang.status("n0").store_generation == generation)
    order = gang.run_order(generation)
    for shard in gang.status("n0").shards:
        order.restore.version.CopyFrom(shard.version)
        order.restore.sources.add(rank=0, tier=shard.tier, node="n0", digest=shard.digest)
    gang.coordinator.order(order)
    printed = await gang.words(0, generation, 3)
    await gang.until(lambda: any(s.version.generation == generation for s in gang.status("n0").shards))
    return printed[1:]


@pytest.mark.parametrize(("requeued", "origin"), [(True, ["7", "mine"]), (False, ["0", "afresh"])])
async def test_an_agent_deposits_its_memory_if_the_job_is_requeued(
    gang: Gang, requeued: bool, origin: list[str]
) -> None:
    await start_run(gang)
    assert await train(gang, 1) == ["0", "afresh"]
    gang.coordinator.order(Order(duty=DUTY_EXIT, reason="preempted", requeued=requeued))
    assert await gang.exit_code("n0") == 0
    await start_run(gang)
    assert await train(gang, 2) == origin


def read_all(reader: int) -> bytes:
    os.set_blocking(reader, True)
    with open(reader, "rb") as output:
        return output.read()


async def test_memory_is_deposited_before_the_rest_of_the_output_is_read(
    gang: Gang, kept_memory: KeptMemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gang.folder / "environment").write_bytes(b"PATH=/bin:/usr/bin\0")
    monkeypatch.setenv("MUSTER_RANK_ENVIRONMENT", str(gang.folder / "environment"))
    os.mkfifo(gang.folder / "n0.out")
    reader = os.open(gang.folder / "n0.out", os.O_RDONLY | os.O_NONBLOCK)
    gang.coordinator.order(Order(duty=DUTY_HOLD))
    script = RANK.replace("    rank.layout", "    print('x' * (1 << 17), flush=True)\n    rank.layout")
    await gang.start(1, sys.executable, gang.script(script), memory_checkpoint=True)
    await train(gang, 1)
    gang.coordinator.order(Order(duty=DUTY_EXIT, reason="preempted", requeued=True))
    while not kept_memory.kept():  # noqa: ASYNC110 - the agent tells nobody any more
        await asyncio.sleep(0)
    assert await asyncio.to_thread(read_all, reader) == gang.log(0, 1).read_bytes()
    assert await gang.exit_code("n0") == 0


async def test_an_agent_that_ends_without_an_order_deposits_its_memory(gang: Gang) -> None:
    await start_run(gang)
    await train(gang, 1)
    gang.agents["n0"].terminate()
    assert await gang.exit_code("n0") == 128 + signal.SIGTERM
    await start_run(gang)
    assert await train(gang, 2) == ["7", "mine"]


@pytest.mark.parametrize("requeued", [True, False])
async def test_the_memory_of_a_planned_stop_is_deposited_before_the_flush(
    gang: Gang, kept_memory: KeptMemoryStore, requeued: bool
) -> None:
    await start_run(gang)
    await train(gang, 1)
    stop = gang.run_order(1)
    stop.stop = "the time limit is near"
    gang.coordinator.order(stop)
    await gang.until(lambda: kept_memory.kept() == [("g", 1)])  # Slurm may send SIGKILL at any moment
    gang.coordinator.order(Order(duty=DUTY_EXIT, reason="the time limit", requeued=requeued))
    assert await gang.exit_code("n0") == 0
    assert kept_memory.kept() == ([("g", 1)] if requeued else [])


async def test_a_planned_swap_stops_the_ranks_of_one_generation_and_the_next_goes_on(
    gang: Gang, kept_memory: KeptMemoryStore
) -> None:
    await start_run(gang)
    await train(gang, 1)
    leave = gang.run_order(1)
    leave.planned_swap = "Xid 64"
    gang.coordinator.order(leave)
    exited = [(RANK_PHASE_EXITED, 0)]
    await gang.until(lambda: [(rank.phase, rank.exit_code) for rank in gang.status("n0").ranks] == exited)
    assert await train(gang, 2) == ["7", "mine"]
    assert [rank.phase for rank in gang.status("n0").ranks] != [RANK_PHASE_EXITED]
    assert kept_memory.kept() == []


def test_if_not_all_shards_fit_the_newest_version_is_complete() -> None:
    pages = SealedMemory("pages", 1)
    shards = [Shard(n, Version(1, s), TIER_OWN, (), b"", pages, lambda: None) for n in range(40) for s in (6, 7)]
    assert {shard.version.step for shard in newest_first(shards)[:40]} == {7}
    pages.close()
