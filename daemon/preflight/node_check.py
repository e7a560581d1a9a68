"""The program of the node check. It prints one line of JSON, a `CheckResult`, and exits with 0.

    INTERPRETER -c COMMAND ROOT

`check_process` starts it in the job's interpreter and ends it at a deadline. Before each part it prints a line with the
part's name, so that a check that hangs tells where.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from muster.daemon.preflight import inventory, measurement, published_rates
from muster.daemon.preflight.check_result import CheckResult, Outcome
from muster.daemon.preflight.processor_wait import ProcessorWait

# ROOT holds the package `muster`, this one and no other. No other package there may come before the user's own.
COMMAND = """\
import sys
sys.path.insert(0, sys.argv[1])
from muster.daemon.preflight import node_check
del sys.path[0]
node_check.main()
"""


def main() -> None:
    """Check this node and print the result."""
    result = check()
    print(result.to_json(), flush=True)


def check() -> CheckResult:
    """Check this node. A part that fails makes the node FAILED."""
    gpus: list[str] = []
    try:
        numpy = None if _expected_gpus() else _begin_with("numpy")
        if numpy is not None:  # its import takes 0.1 s of processor time, that of PyTorch 2 s (measured)
            return _check_processors(measurement.measure_with_numpy, numpy)
        torch = _begin_with("torch")
        gpus = _gpus(torch)
        return _check_gpus(torch, gpus) if gpus else _check_processors_with_any(torch)
    except Exception as error:  # noqa: BLE001  # whatever a part raises is the result
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return CheckResult(Outcome.FAILED, words, inventory.describe(gpus))


def _begin(part: str) -> None:
    print(part, flush=True)


def _begin_with(library: str) -> Any:
    """The library whose import is a part of the check; None if it is not installed."""
    _begin(library)
    return _import(library)


def _expected_gpus() -> int:
    """How many GPUs Slurm has granted, or else 1 if NVIDIA's driver has any."""
    granted = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return int(granted) if granted.isdigit() else min(1, inventory.driver_gpus())


def _import(name: str) -> Any:
    """The module; None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _gpus(torch: Any) -> list[str]:
    """The names of the GPUs that CUDA has.

    Raises:
        RuntimeError: there are GPUs, and this torch is made for them and can't use them.
    """
    if torch is None or torch.version.cuda is None:
        return []
    _begin("CUDA")
    count = torch.cuda.device_count()
    expected = _expected_gpus()
    if count < expected:
        raise RuntimeError(f"CUDA has {count} of {expected} GPUs")
    return [torch.cuda.get_device_name(index) for index in range(count)]


def _check_gpus(torch: Any, gpus: list[str]) -> CheckResult:
    measured = []
    for index, name in enumerate(gpus):
        _begin(f"GPU {index}, {name}")
        measured.append(measurement.measure_gpu(torch, index))
    wrong = [f"GPU {index} ({gpus[index]})" for index, one in enumerate(measured) if not one.right]
    slow = list(_slow_gpus(gpus, measured))
    if wrong:
        outcome, reason = Outcome.WRONG, f"a matrix product differs from the known one on {', '.join(wrong)}"
    else:
        outcome, reason = (Outcome.SLOW if slow else Outcome.PASSED), "; ".join(slow)
    return CheckResult(
        outcome,
        reason,
        inventory.describe(gpus),
        min(one.gflops for one in measured),
        min(one.memory_gb_s for one in measured),
        min(one.host_to_device_gb_s for one in measured),
    )


def _slow_gpus(gpus: list[str], measured: list[measurement.Measured]) -> Iterator[str]:
    for index, (name, one) in enumerate(zip(gpus, measured, strict=True)):
        if words := published_rates.why_slow(name, one.gflops, one.memory_gb_s):
            yield f"GPU {index}: {words}"


def _check_processors_with_any(torch: Any) -> CheckResult:
    if torch is not None:
        return _check_processors(measurement.measure_processors, torch)
    if (numpy := _import("numpy")) is not None:
        return _check_processors(measurement.measure_with_numpy, numpy)
    reason = "only the inventory: neither torch nor numpy is installed"
    return CheckResult(Outcome.PASSED, reason, inventory.describe([]))


def _check_processors(measure: Callable[[Any], measurement.Measured], library: Any) -> CheckResult:
    _begin("processors")
    wait, hardware = ProcessorWait(), inventory.describe([])
    measured = measure(library)
    wrong = "a matrix product differs from the known one on the processors"
    return CheckResult(
        Outcome.PASSED if measured.right else Outcome.WRONG,
        "" if measured.right else wrong,
        hardware,
        measured.gflops,
        measured.memory_gb_s,
        cores_shared=wait.is_shared(),
    )
