"""How much of its nodes a job uses: from the agent's look and from NVML, through the status, to the view."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from muster.daemon.agent.training.node_use import LOOK_S, NodeUseRecord
from muster.daemon.coordinator.core.state.events import AgentReported, NodeUse, stored_text
from muster.daemon.coordinator.services import conversion
from muster.daemon.coordinator.services.views import gang_view
from muster.daemon.host.process.cgroup_memory import MemoryLeft
from muster.daemon.node.kept_memory.kept_memory_store import KeptMemoryStore
from muster.daemon.node.kept_memory.memory_service import MemoryService
from muster.daemon.node.kept_memory.systemd_fd_store import FdStore
from muster.daemon.node.nvml.gpu_counters import GpuCounters
from muster.daemon.node.nvml.nvml_process import GpuReading
from muster.simulator.scenario import Scenario
from muster.v1 import agent_pb2
from muster.v1.api_pb2 import GangView

GIB = 1 << 30
GPUS = [GpuReading(at, f"0000:{at}b:00", memory=((10 + at) * GIB, 80 * GIB), busy_percent=90 + at) for at in range(4)]


class Ended(Exception):
    """The test has seen enough."""


class Pause:
    """Lets `looks` looks happen."""

    def __init__(self, looks: int) -> None:
        self._left = looks

    async def __call__(self, seconds: float) -> None:
        assert seconds == LOOK_S
        self._left -= 1
        if self._left < 0:
            raise Ended


@asynccontextmanager
async def musterd(folder: Path, gpus: Iterable[GpuReading]) -> AsyncIterator[str]:
    """A musterd whose sensor has read these GPUs."""
    counters, socket = GpuCounters(), folder / "memory.sock"
    counters.note(gpus, 1.0)
    serving = asyncio.create_task(MemoryService(socket, KeptMemoryStore(FdStore("")), gpu_use=counters.use).run())
    while not socket.exists():  # noqa: ASYNC110  # the service makes it
        await asyncio.sleep(0)
    yield str(socket)
    serving.cancel()


async def looked(socket: str, gpus: set[int], looks: int = 1) -> tuple[agent_pb2.NodeUse | None, list[float]]:
    """What a record says after so many looks, and which statuses it wanted."""
    wanted: list[float] = []
    left = MemoryLeft(588 * GIB + 5, "a test's limit", 1000 * GIB)
    record = NodeUseRecord(socket, lambda: gpus, wanted.append, lambda: left, Pause(looks))
    with pytest.raises(Ended):
        await record.run()
    return record.status, wanted


async def test_an_agent_says_how_full_its_memory_and_the_gpus_of_its_ranks_are(tmp_path: Path) -> None:
    async with musterd(tmp_path, GPUS) as socket:
        status, wanted = await looked(socket, {0, 2}, looks=3)
    assert status == agent_pb2.NodeUse(
        memory_bytes=412 * GIB,
        memory_limit_bytes=1000 * GIB,
        gpu_memory_bytes=12 * GIB,
        gpu_memory_limit_bytes=80 * GIB,
        gpu_busy_percent=91,
    )
    assert len(wanted) == 1  # what stays the same is not reported again


async def test_without_musterd_or_without_gpus_memory_is_all_that_is_known(tmp_path: Path) -> None:
    only_memory = agent_pb2.NodeUse(memory_bytes=412 * GIB, memory_limit_bytes=1000 * GIB)
    assert (await looked("", set()))[0] == only_memory
    assert (await looked(str(tmp_path / "none.sock"), set()))[0] == only_memory
    silent = [replace(gpu, busy_percent=None) for gpu in GPUS]
    async with musterd(tmp_path, silent) as socket:
        assert (await looked(socket, set()))[0] == only_memory


def view_of(world: Scenario, *, brief: bool = False) -> GangView:
    return gang_view(world.core.state, world.core.observed, world.gang, world.now, brief=brief)


def test_the_view_has_least_median_and_greatest_of_the_nodes_with_ranks() -> None:
    world = Scenario(3, 1)
    world.run_until(lambda: view_of(world).committed.step >= 1)
    assert not view_of(world).HasField("use")
    seats = [seat.node for seat in world.gang.roster.seats]
    for node, agent in world.core.observed.gang(world.gang.id).agents.items():
        use = NodeUse(100, 1000) if node in seats else NodeUse(900, 1000)
        if node == seats[1]:
            use = NodeUse(300, 800, 50, 80, 0.5)
        agent.status = replace(agent.status, use=use)
    use = view_of(world).use
    assert (use.memory.nodes, use.memory.least, use.memory.median, use.memory.greatest) == (3, 100, 100, 300)
    assert (use.memory.greatest_node, use.memory.limit) == (seats[1], 800)
    assert (use.gpu_memory.nodes, use.gpu_memory.median, use.gpu_memory.limit) == (1, 50, 80)
    assert use.gpu_busy.median == 0.5
    assert not view_of(world, brief=True).HasField("use")


def test_a_status_is_read_within_bounds_and_the_journal_does_not_keep_its_use() -> None:
    message = agent_pb2.AgentStatus(use=agent_pb2.NodeUse(memory_bytes=7, memory_limit_bytes=9, gpu_busy_percent=900))
    status = conversion.status(message, ())
    assert status.use == NodeUse(7, 9, 0, 0, 1.0)
    assert '"use":null' in stored_text(AgentReported("g1", "n1", "i1", status))
