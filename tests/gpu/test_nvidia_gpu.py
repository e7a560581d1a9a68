"""What Muster reads, measures and restarts on a real NVIDIA GPU: `make gpu-test`.

What the GPU reports is written to the folder that MUSTER_GPU_RECORDS names, for the unit tests of the sensors.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.checkpoint.format import number_page  # noqa: E402
from muster.checkpoint.training.copies.pinned_memory import PinnedMemory  # noqa: E402
from muster.checkpoint.training.rank_signals.reported_numbers import ReportedNumbers  # noqa: E402
from muster.daemon.coordinator.policy.policy import Policy  # noqa: E402
from muster.daemon.node.kernel.kernel_errors import KernelErrors  # noqa: E402
from muster.daemon.node.kernel.kernel_log import open_kernel_log  # noqa: E402
from muster.daemon.node.nvml.nvml_process import GpuReading, GpuReadings, NvmlProcess  # noqa: E402
from muster.daemon.node.sensors.gpu_conditions import GpuConditions  # noqa: E402
from muster.daemon.node.sensors.nvml import NOT_REPORTED  # noqa: E402
from muster.daemon.preflight import check_process, published_rates  # noqa: E402
from muster.daemon.preflight.check_result import Outcome  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny_transformer"
NVML = "libnvidia-ml.so.1"
LOAD = """\
import torch
left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
print("loaded", flush=True)
while True:
    for _ in range(20):
        left @ left
    torch.cuda.synchronize()
"""
READINGS = 20
ILLEGAL_ACCESS = """\
import torch
import triton
import triton.language as tl

@triton.jit
def write_far_away(target):
    tl.store(target + (1 << 44), 1)

target = torch.zeros(1, dtype=torch.int32, device="cuda")
write_far_away[(1,)](target)
torch.cuda.synchronize()
"""


@contextmanager
def load() -> Iterator[None]:
    """Matrix products on the first GPU, in a process of their own."""
    with subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            assert process.stdout.readline() == "loaded\n"
            yield
        finally:
            process.kill()


def record(name: str, what: Any) -> None:
    """Keep what the hardware reported, if a folder for it is named."""
    if folder := os.environ.get("MUSTER_GPU_RECORDS"):
        Path(folder, name).write_text(json.dumps(what, indent=1) + "\n")


async def readings(count: int) -> list[tuple[float, GpuReading]]:
    """The first GPU, once a second as musterd reads it."""
    process = NvmlProcess(NVML)
    try:
        found = []
        for number in range(count):
            if number:
                await asyncio.sleep(1.0)
            found.append((time.monotonic(), (await process.read(())).gpus[0]))
        return found
    finally:
        await process.close()


async def test_a_healthy_gpu_is_read_whole_and_no_condition_holds_under_load() -> None:
    idle = await readings(1)
    with load():
        busy = await readings(READINGS)
    conditions = GpuConditions()
    held = []
    for now, gpu in busy:
        samples = conditions.samples(GpuReadings(1, [gpu]), now)
        held += [f"{sample.kind} {sample.code}: {sample.text}" for sample in samples if sample.held]
    record("nvml_idle.json", [dataclasses.asdict(gpu) for _, gpu in idle])
    record("nvml_load.json", [{"at": now, **dataclasses.asdict(gpu)} for now, gpu in busy])
    assert held == []
    whole = idle[0][1]
    assert whole.whole
    assert whole.name == torch.cuda.get_device_name(0)
    assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}", whole.device)
    assert set(whole.failed.values()) <= NOT_REPORTED, whole.failed
    assert whole.ecc_uncorrected == 0
    assert whole.temperature_c is not None
    assert busy[-1][1].power_mw is not None
    assert busy[-1][1].power_mw > 200_000
    assert whole.memory is not None
    assert 0 < whole.memory[0] < whole.memory[1]
    assert max(gpu.busy_percent or 0 for _, gpu in busy) > 50


async def test_the_node_check_passes_and_comes_near_the_published_rates() -> None:
    began = time.monotonic()
    result = await check_process.run_check(check_process.command([sys.executable]), os.environ, musterd="")
    took_s = time.monotonic() - began
    record("node_check.json", {**dataclasses.asdict(result), "seconds": took_s})
    assert result.outcome is Outcome.PASSED, result
    name = torch.cuda.get_device_name(0)
    assert f"x {name}" in result.hardware
    if rates := published_rates.rates_of(name):
        assert result.gflops > 0.6 * rates.tf32_gflops
        assert result.memory_gb_s > 0.7 * rates.memory_gb_s
    assert took_s < 20


async def test_an_illegal_access_of_a_program_is_in_the_log_and_blames_no_node(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    log = open_kernel_log(Path("/dev/kmsg")) if os.access("/dev/kmsg", os.R_OK) else None
    if log is None:
        pytest.skip("the kernel log can't be read")
    with log:
        log.existing_records()
        await asyncio.to_thread(access_illegally, tmp_path / "program.py")
        errors, records = KernelErrors(), []
        async with asyncio.timeout(20):
            async for kernel_record in log.follow():
                records.append(repr(kernel_record))
                record("illegal_access.json", records)
                error, _ = errors.read(kernel_record, time.monotonic())
                if error and error.kind == "xid":
                    break
    assert error
    assert Policy.load().decide(error.kind, error.code).action in ("rank", "ignore"), error


def access_illegally(program: Path) -> None:
    """Let a process of its own write to an address that it has not allocated on the GPU."""
    program.write_text(ILLEGAL_ACCESS)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120)
    assert "illegal memory access" in done.stderr, done.stderr


def test_memory_that_can_not_be_pinned_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    slot = torch.zeros(1 << 20, dtype=torch.uint8)
    first, second = PinnedMemory([slot]), PinnedMemory([slot])
    assert first.pin()
    assert not second.pin()
    assert "can't pin a slot" in caplog.text
    assert int(torch.ones(3, device="cuda").sum()) == 3  # the driver's refusal is no error of the next kernel
    first.close()
    second.close()


def test_a_loss_on_a_gpu_is_said_later_and_waits_for_nothing() -> None:
    """While the GPU is busy, the call returns, and the page says the numbers of the host. Then it says the loss."""
    pages: list[int] = []
    moment = iter(range(0, 1000, 10))
    numbers = ReportedNumbers(lambda page: pages.append(os.dup(page)) or True, lambda: float(next(moment)))
    loss = torch.full((), 2.5, device="cuda", requires_grad=True) * 1
    numbers.note(0, {"accuracy": loss})  # pinned memory is made
    torch.cuda.synchronize()
    numbers.note(None, {})
    torch.cuda._sleep(4_000_000_000)  # cycles: seconds
    numbers.note(1, {"loss": loss, "lr": 0.1})
    assert not torch.cuda.current_stream().query(), "the GPU was waited for"
    assert said_in(pages[0]) == {"accuracy": (0, 2.5), "lr": (1, 0.1)}
    torch.cuda.synchronize()
    numbers.note(2, {})
    assert said_in(pages[0]) == {"accuracy": (0, 2.5), "lr": (1, 0.1), "loss": (1, 2.5)}


def said_in(page: int) -> dict[str, tuple[int, float]]:
    """The numbers that a page has."""
    found = number_page.read(page, 0)
    assert found is not None
    return dict(found[1].numbers)


def digests(folder: Path, name: str, world: int) -> set[str]:
    """The digest of the final weights of each rank."""
    return {(folder / f"{name}.{rank}").read_text() for rank in range(world)}


@pytest.mark.parametrize(("backend", "nodes"), [("nccl", 1), ("gloo", 2)])
def test_ranks_on_a_gpu_outlive_faults_with_the_same_bits(tmp_path: Path, backend: str, nodes: int) -> None:
    """NCCL takes one rank for each GPU, so two nodes of one workstation use gloo."""
    steps = ["--steps", "120", "--dropout", "0.1", "--backend", backend]
    command = [sys.executable, "-m", "muster.launcher", "run", "--local", "--nodes", str(nodes), "--spares", "1"]
    faults = {"calm": [], "hit": ["--fault", "kill-rank@step=20,rank=0", "--fault", "kill-node@step=70"]}
    for name, extra in faults.items():
        script = [sys.executable, str(EXAMPLE / "train.py"), *steps, "--digest", str(tmp_path / name)]
        done = subprocess.run([*command, *extra, "--", *script], capture_output=True, text=True, timeout=240)
        record(f"local_{backend}_{name}.json", {"rc": done.returncode, "said": (done.stdout + done.stderr)[-8000:]})
        assert done.returncode == 0, done.stdout + done.stderr
    assert digests(tmp_path, "calm", nodes) == digests(tmp_path, "hit", nodes)
