"""Error counters of the GPUs before and after a check: from the sensor over the stand-in library, by musterd's socket,
into the result of the check."""

from __future__ import annotations

import asyncio
import shlex
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from muster.daemon.host import clock
from muster.daemon.node.kept_memory.kept_memory_store import KeptMemoryStore
from muster.daemon.node.kept_memory.memory_service import MemoryService
from muster.daemon.node.kept_memory.systemd_fd_store import FdStore
from muster.daemon.node.sensors.nvml import NvmlSensor
from muster.daemon.node.sensors.sensor import SensorPaths
from muster.daemon.preflight import check_process, gpu_counters
from muster.daemon.preflight.check_result import CheckResult, Outcome
from muster.launcher.output.check_tables import counter_lines
from muster.launcher.output.node_tables import node_lines
from muster.launcher.output.screen import Screen
from muster.slurm.image.nvml_stand_in import CONTROL_SUFFIX, ControlFile
from muster.v1.api_pb2 import NodeView
from muster.v1.common_pb2 import CheckOutcome, NodeCheck

DEADLINE_S = 60.0
"""Seconds that end a wait which would never end."""


@dataclass
class Node:
    """A node whose musterd reads the stand-in library."""

    control: Path
    socket: Path
    sensor: NvmlSensor
    reading: asyncio.Task[None] | None = None

    async def check(self, program: str = "") -> CheckResult:
        """The result of a check. `program`: what its process does first, as a shell command."""
        line = shlex.quote(CheckResult(Outcome.PASSED, gflops=1.0).to_json())
        argv = ["/bin/sh", "-c", f"{program or 'true'}; echo {line}"]
        return await check_process.run_check(argv, {}, musterd=str(self.socket))

    async def read_gpus(self) -> None:
        """Start the sensor, and wait until it has read the GPUs. It would wait 10 s for a driver that comes later."""
        read = asyncio.Event()
        self.reading = asyncio.create_task(self.sensor.watch(lambda _: read.set()))
        async with asyncio.timeout(DEADLINE_S):
            await read.wait()
        assert self.sensor.counters.message(clock.monotonic()).gpus


@pytest.fixture
async def node(tmp_path: Path, nvml_library: Path) -> AsyncIterator[Node]:
    library = Path(shutil.copy(nvml_library, tmp_path))
    control, socket = Path(f"{library}{CONTROL_SUFFIX}"), tmp_path / "memory.sock"
    sensor = NvmlSensor(SensorPaths(nvidia_driver=control, nvml=str(library)))
    service = MemoryService(
        socket, KeptMemoryStore(FdStore("")), counters=lambda: sensor.counters.message(clock.monotonic())
    )
    serving = asyncio.create_task(service.run())
    async with asyncio.timeout(DEADLINE_S):
        while not socket.exists():
            await asyncio.to_thread(tmp_path.stat)
    node = Node(control, socket, sensor)
    yield node
    tasks = [task for task in (serving, node.reading) if task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_errors_that_came_during_the_check_stand_first(node: Node, tmp_path: Path) -> None:
    file = ControlFile.of_healthy_gpus(2)
    file.gpus[0]["memory 2"] = "3"
    file.gpus[1]["link 4"] = "1 0 0 7 0"
    file.write(node.control)
    await node.read_gpus()
    file.gpus[1]["link 5"] = "1 0 0 2 0"
    file.gpus[1]["replays"] = "12"
    worse = tmp_path / "worse"
    file.write(worse)
    result = await node.check(f"mv {worse} {node.control}")
    assert result.outcome is Outcome.PASSED
    assert result.counters == (
        "2 GPUs: 0000:2b:00 NVLink CRC errors 7 before, 9 after; 0000:2b:00 PCIe replays 0 before, 12 after; "
        "0000:1b:00 ECC errors in DRAM 3"
    )
    assert list(counter_lines({"n1": result})) == [f"n1: {result.counters}"]


async def test_gpus_without_errors_say_so(node: Node) -> None:
    ControlFile.of_healthy_gpus(8).write(node.control)
    await node.read_gpus()
    assert (await node.check()).counters == "8 GPUs: all 0 before and after"


async def test_a_node_without_gpus_shows_nothing(node: Node) -> None:
    result = await node.check()
    assert result == CheckResult(Outcome.PASSED, gflops=1.0)
    assert list(counter_lines({"n1": result})) == []


async def test_without_a_musterd_nothing_is_noted(tmp_path: Path) -> None:
    assert await gpu_counters.read(str(tmp_path / "none")) == {}


def test_what_was_not_read_before_is_unknown_and_a_long_line_is_cut() -> None:
    after = {"0000:1b:00": {"PCIe replays": 3}, "0000:2b:00": {"PCIe replays": 0}}
    assert gpu_counters.describe({}, after) == "2 GPUs: 0000:1b:00 PCIe replays unknown before, 3 after"
    long = {f"0000:{number:02x}:00": {"PCIe replays": 3} for number in range(40)}
    assert gpu_counters.describe(long, long).endswith("...")
    assert len(gpu_counters.describe(long, long)) == 400


def test_muster_nodes_shows_the_counters_of_the_newest_check() -> None:
    words = "1 GPU: 0000:1b:00 PCIe replays 0 before, 12 after"
    found = NodeCheck(outcome=CheckOutcome.CHECK_OUTCOME_PASSED, counters=words)
    view = NodeView(node="n0", verdict="FIT", node_check=found)
    assert words in list(node_lines([view], Screen(), verbose=True))[1]
