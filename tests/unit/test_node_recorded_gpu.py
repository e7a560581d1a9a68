"""What a real GPU and its driver have reported (tests/gpu writes such records): an NVIDIA H200, driver 580.159.04."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.node.kernel.kernel_errors import KernelErrors
from muster.daemon.node.kernel.kernel_record import parse_record
from muster.daemon.node.nvml.nvml_process import GpuReading, GpuReadings
from muster.daemon.node.sensors.gpu_conditions import GpuConditions
from muster.daemon.node.sensors.nvml import NOT_REPORTED

HERE = Path(__file__).parent
READING = TypeAdapter(GpuReading)


def _recorded() -> Any:
    return json.loads((HERE / "golden" / "gpus" / "nvidia_h200.json").read_text())


def test_no_condition_holds_while_a_healthy_gpu_works() -> None:
    conditions, samples = GpuConditions(), []
    for reading in _recorded()["load"]:
        gpu = READING.validate_python({name: value for name, value in reading.items() if name != "at"})
        samples += list(conditions.samples(GpuReadings(1, [gpu]), reading["at"]))
    assert len(samples) > 100
    assert [sample for sample in samples if sample.held] == []


def test_what_a_gpu_does_not_report_is_no_failure() -> None:
    gpu = READING.validate_python(_recorded()["idle"])
    assert gpu.name == "NVIDIA H200"
    assert gpu.failed
    assert set(gpu.failed.values()) <= NOT_REPORTED


def test_a_fault_of_a_program_is_found_in_the_log_of_a_real_driver() -> None:
    """The driver flags its messages as fragments, and says more than the Xid."""
    lines = (HERE / "kernel_log" / "nvidia_h200.txt").read_bytes().splitlines(keepends=True)
    records = [parse_record(line) for line in lines if not line.startswith(b"#")]
    errors = KernelErrors()
    found = [error for record in records if record and (error := errors.new_error(record, record.at or 0.0))]
    assert [(error.kind, error.code, error.device) for error in found] == [("xid", 31, "0000:00:06")]
    assert Policy.load().decide("xid", 31).action == "rank"
