"""The node check: what it finds, on healthy nodes and with libraries that compute wrongly or hang.

The libraries stand in for a broken node: a package `numpy` or `torch` of a temporary folder, which only the process of
the check imports.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import numpy
import pytest

from muster.daemon.preflight import check_process, inventory, known_product, published_rates
from muster.daemon.preflight.check_result import CheckResult, Outcome
from muster.daemon.preflight.processor_wait import ProcessorWait

NO_TORCH = """\
raise ModuleNotFoundError("No module named 'torch'")
"""
NO_NUMPY = NO_TORCH.replace("torch", "numpy")
WRONG = """\
import os, sys
sys.path.remove(os.path.dirname(os.path.dirname(__file__)))
del sys.modules["numpy"]
import numpy as healthy

class Float32(healthy.ndarray):
    def __matmul__(self, other):
        product = healthy.asarray(self) @ healthy.asarray(other)
        product[17, 4] += 1
        return product

class Int64(healthy.ndarray):
    def astype(self, kind):
        return healthy.asarray(self).astype(kind).view(Float32)

def arange(*args, **kwargs):
    return whole(*args, **kwargs).view(Int64)

whole, healthy.arange = healthy.arange, arange
"""
BUSY = """\
import os, signal, time
others = []
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for _ in range(5):
    if not (pid := os.fork()):
        while True:
            pass
    others.append(pid)
used = time.process_time() + 0.7
while time.process_time() < used:
    pass
for pid in others:
    os.kill(pid, signal.SIGKILL)
raise ModuleNotFoundError("No module named 'torch'")
"""
TORCH_WITHOUT_GPUS = """\
class version:
    cuda = "12.8"

class cuda:
    def device_count():
        return 0
"""
STOPS_ITSELF = """\
import os, signal
os.kill(os.getpid(), signal.SIGSTOP)
"""


def library(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)


def run(folder: Path, deadline_s: float = 60.0, **variables: str) -> CheckResult:
    environment = {**os.environ, "PYTHONPATH": str(folder), **variables}
    return asyncio.run(check_process.run_check(check_process.command([sys.executable]), environment, "", deadline_s))


def test_a_healthy_node_without_gpus_and_torch_passes(tmp_path: Path) -> None:
    library(tmp_path, "torch", NO_TORCH)
    result = run(tmp_path)
    assert (result.outcome, result.reason) == (Outcome.PASSED, "")
    assert result.gflops > 0
    assert result.memory_gb_s > 0
    assert "processors" in result.hardware


def test_a_node_without_any_library_says_what_was_not_checked(tmp_path: Path) -> None:
    library(tmp_path, "torch", NO_TORCH)
    library(tmp_path, "numpy", NO_NUMPY)
    result = run(tmp_path)
    assert result.outcome is Outcome.PASSED
    assert result.reason.startswith("only the inventory")


def test_one_wrong_number_of_a_product_is_found(tmp_path: Path) -> None:
    library(tmp_path, "torch", NO_TORCH)
    library(tmp_path, "numpy", WRONG)
    result = run(tmp_path)
    assert (result.outcome, "differs from the known one" in result.reason) == (Outcome.WRONG, True)


def test_a_node_without_gpus_imports_no_torch(tmp_path: Path) -> None:
    """The import of PyTorch takes seconds, and proves nothing that a product with numpy does not."""
    library(tmp_path, "torch", "raise OSError('imported')")
    assert run(tmp_path).outcome is Outcome.PASSED


def test_on_a_node_with_gpus_torch_must_see_them(tmp_path: Path) -> None:
    library(tmp_path, "torch", TORCH_WITHOUT_GPUS)
    result = run(tmp_path, SLURM_GPUS_ON_NODE="8")
    assert (result.outcome, result.reason) == (Outcome.FAILED, "RuntimeError: CUDA has 0 of 8 GPUs")


def test_a_library_that_fails_is_a_failed_check(tmp_path: Path) -> None:
    library(tmp_path, "numpy", NO_NUMPY)
    library(tmp_path, "torch", "raise OSError('libcudart.so.12: cannot open shared object file')")
    result = run(tmp_path)
    assert (result.outcome, "libcudart" in result.reason) == (Outcome.FAILED, True)


def test_a_check_that_hangs_is_silent_and_is_killed(tmp_path: Path) -> None:
    library(tmp_path, "numpy", NO_NUMPY)
    library(tmp_path, "torch", STOPS_ITSELF)
    result = run(tmp_path, deadline_s=3.0)
    assert result.outcome is Outcome.SILENT
    assert "in 'torch'" in result.reason


@pytest.mark.long
def test_a_check_that_waits_for_cores_is_not_called_silent(tmp_path: Path) -> None:
    """It needs a second, and has a sixth of one processor."""
    library(tmp_path, "torch", BUSY)
    library(tmp_path, "numpy", NO_NUMPY)
    assert run(tmp_path, deadline_s=3.0).outcome is Outcome.PASSED


def test_a_result_counts_though_the_process_does_not_end(tmp_path: Path) -> None:
    """A driver can hang when a process lets go of its GPUs."""
    library(tmp_path, "numpy", NO_NUMPY)
    library(tmp_path, "torch", "import atexit, os, signal\natexit.register(os.kill, os.getpid(), signal.SIGSTOP)")
    assert run(tmp_path).outcome is Outcome.FAILED


def test_an_interpreter_that_is_missing_or_ends_fails_the_check() -> None:
    missing = asyncio.run(check_process.run_check(["/no/python"], os.environ))
    assert (missing.outcome, "No such file" in missing.reason) == (Outcome.FAILED, True)
    ended = asyncio.run(check_process.run_check([sys.executable, "-c", "print('x' * 200000); exit(3)"], os.environ))
    assert (ended.outcome, ended.reason) == (Outcome.FAILED, "the node check has ended with 3, in 'the start'")


@pytest.mark.parametrize("kind", [numpy.float32, numpy.float64])
def test_the_known_product_depends_on_no_format(kind: type) -> None:
    first, second = known_product.operands(numpy.arange(known_product.SMALL, dtype=numpy.int64))
    product = (first.astype(kind) @ second.astype(kind)).astype("<i4")
    assert known_product.is_right(product.tobytes(), known_product.SMALL)
    product[-1, 0] += 1
    assert not known_product.is_right(product.tobytes(), known_product.SMALL)


@pytest.mark.parametrize("line", ["", "{}", "[]", "null", "12", '{"outcome": "well"}', "torch", '"' * 9, "[" * 100_000])
def test_a_line_that_is_no_result_is_refused(line: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # json says many things
        CheckResult.from_json(line)


@pytest.mark.parametrize("rate", ["NaN", "Infinity", "-1", '"fast"', "null"])
def test_a_rate_that_is_none_is_refused(rate: str) -> None:
    line = CheckResult(Outcome.PASSED, gflops=3.0).to_json().replace("3.0", rate)
    with pytest.raises(ValueError, match=r"no rate|could not convert|not the result"):
        CheckResult.from_json(line)


def test_a_result_survives_its_line() -> None:
    result = CheckResult(Outcome.SLOW, "why", "8 x GPU", 1.5, 2.5, 3.5, True)
    assert CheckResult.from_json(result.to_json()) == result
    long = CheckResult(Outcome.WRONG, "y" * 10_000)
    assert len(CheckResult.from_json(long.to_json()).reason) == 500


def tasks(folder: Path, ran_ns: int, waited_ns: int) -> Path:
    (folder / "1").mkdir(exist_ok=True)
    (folder / "1" / "schedstat").write_text(f"{ran_ns} {waited_ns} 7\n")
    return folder


@pytest.mark.parametrize(("waited_ns", "shared"), [(10_000, False), (400_000, True)])
def test_cores_are_shared_if_threads_had_to_wait_for_them(tmp_path: Path, waited_ns: int, shared: bool) -> None:
    wait = ProcessorWait(tasks(tmp_path, 5_000_000, 9_000_000))
    tasks(tmp_path, 6_000_000, 9_000_000 + waited_ns)
    assert wait.is_shared() is shared


def test_a_kernel_that_counts_no_waits_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    assert not ProcessorWait(tmp_path).is_shared()


def test_the_inventory_of_a_node(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia/gpus/0000:3b:00.0").mkdir(parents=True)
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal:  2097152 kB\nMemAvailable: garbage\nHugePages_Total: 0\n")
    assert inventory.describe(["A", "B", "A"], tmp_path) == "2 x A, 1 x B, AMD EPYC, 2 processors, 2 GiB"
    assert (inventory.driver_gpus(tmp_path), inventory.available_bytes(tmp_path)) == (1, 0)


def test_a_copy_takes_no_memory_that_the_job_does_not_have(tmp_path: Path) -> None:
    job = tmp_path / "sys/fs/cgroup/memory/slurm/uid_7/job_1"
    job.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/slurm/uid_7/job_1/step_0/task_0\n0::/\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 4096 kB\n")
    (job / "memory.limit_in_bytes").write_text("1000\n")
    (job / "memory.usage_in_bytes").write_text("100\n")
    (job / "memory.stat").write_text("total_cache 0\ntotal_shmem 0\n")
    assert inventory.available_bytes(tmp_path) == 900


def test_like_nodes_have_the_same_inventory_though_their_kernels_keep_different_amounts(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    found = set()
    for kilobytes in (1_584_300_000, 1_584_900_000):
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: {kilobytes} kB\n")
        found.add(inventory.describe([], tmp_path))
    assert len(found) == 1


def test_a_known_gpu_is_held_against_what_its_vendor_publishes() -> None:
    model = "NVIDIA H100 80GB HBM3"
    assert published_rates.why_slow(model, 400_000, 3000) == ""
    assert "40% of the published" in published_rates.why_slow(model, 200_000, 3000)
    assert "GB/s of its memory" in published_rates.why_slow(model, 400_000, 1000)
    assert published_rates.why_slow("some new GPU", 1.0, 1.0) == ""


def test_the_result_is_the_last_line_whatever_a_library_prints(tmp_path: Path) -> None:
    library(tmp_path, "torch", "print('hello'); " + NO_TORCH)
    assert run(tmp_path).outcome is Outcome.PASSED
    assert json.loads(CheckResult(Outcome.PASSED).to_json())["outcome"] == "passed"
