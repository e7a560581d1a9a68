"""What an NVIDIA H200 and an H100 with driver 580.159.04 have reported (tests/gpu writes such records)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.node.kernel.kernel_errors import KernelErrors
from muster.daemon.node.kernel.kernel_record import parse_record
from muster.daemon.node.nvml.nvml_process import GpuReading, GpuReadings
from muster.daemon.node.sensors.gpu_conditions import GpuConditions
from muster.daemon.node.sensors.nvml import NOT_REPORTED

HERE = Path(__file__).parent
READING = TypeAdapter(GpuReading)


GPUS = pytest.mark.parametrize("gpu", ["h200", "h100"])


def _recorded(gpu: str) -> Any:
    return json.loads((HERE / "golden" / "gpus" / f"nvidia_{gpu}.json").read_text())


@GPUS
def test_no_condition_holds_while_a_healthy_gpu_works(gpu: str) -> None:
    conditions, samples = GpuConditions(), []
    for reading in _recorded(gpu)["load"]:
        read = READING.validate_python({name: value for name, value in reading.items() if name != "at"})
        samples += list(conditions.samples(GpuReadings(1, [read]), reading["at"]))
    assert len(samples) > 100
    assert [sample for sample in samples if sample.held] == []


@GPUS
def test_what_a_gpu_does_not_report_is_no_failure(gpu: str) -> None:
    read = READING.validate_python(_recorded(gpu)["idle"])
    assert read.name.startswith(f"NVIDIA {gpu.upper()}")
    assert read.failed
    assert set(read.failed.values()) <= NOT_REPORTED


@pytest.mark.parametrize(("gpu", "codes"), [("h200", [31]), ("h100", [43, 31])])
def test_a_fault_of_a_program_is_found_in_the_log_of_a_real_driver(gpu: str, codes: list[int]) -> None:
    """The driver flags its messages as fragments, and says more than the Xid."""
    lines = (HERE / "kernel_log" / f"nvidia_{gpu}.txt").read_bytes().splitlines(keepends=True)
    records = [parse_record(line) for line in lines if not line.startswith(b"#")]
    errors = KernelErrors()
    found = [error for record in records if record and (error := errors.read(record, record.at or 0.0)[0])]
    assert [(error.kind, error.code, error.device) for error in found] == [("xid", one, "0000:00:06") for one in codes]
    assert {Policy.load().decide("xid", one).action for one in codes} == {"rank"}
