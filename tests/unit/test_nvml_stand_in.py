"""The stand-in for NVIDIA's management library, through the real nvidia-ml-py."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from muster.slurm.image import nvml_stand_in
from muster.slurm.image.nvml_stand_in import ControlFile

# Loads the library argv[1]; pynvml then finds it by its name. Evaluates each line of stdin and prints what it gives.
_ASK = """
import ctypes, json, sys
ctypes.CDLL(sys.argv[1])
import pynvml
from pynvml import *
for line in sys.stdin:
    try:
        answer = eval(line)
    except pynvml.NVMLError as error:
        answer = f"{type(error).__name__} {error.value}"
    print(json.dumps(answer), flush=True)
"""


class Library:
    """A copy of the stand-in with a control file of its own, and a process that calls it."""

    def __init__(self, folder: Path, compiled: Path) -> None:
        self.path = Path(shutil.copy(compiled, folder))
        self.control = folder / f"{self.path.name}{nvml_stand_in.CONTROL_SUFFIX}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ASK, str(self.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, expression: str) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{expression}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def write(self, file: ControlFile) -> None:
        file.write(self.control)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def library(tmp_path: Path, nvml_library: Path):
    library = Library(tmp_path, nvml_library)
    yield library
    library.close()


GPU = "nvmlDeviceGetHandleByIndex(0)"


def test_without_a_control_file_the_driver_is_not_loaded(library: Library) -> None:
    assert library.ask("nvmlInit()") == "NVMLError_DriverNotLoaded 9"
    library.write(ControlFile.of_healthy_gpus(0))
    assert library.ask("nvmlInit()") is None
    assert library.ask("nvmlDeviceGetCount()") == 0


def test_before_init_nothing_answers(library: Library) -> None:
    library.write(ControlFile.of_healthy_gpus(1))
    assert library.ask("nvmlDeviceGetCount()") == "NVMLError_Uninitialized 1"


def test_a_gpu_reports_what_the_control_file_says(library: Library) -> None:
    file = ControlFile.of_healthy_gpus(8)
    file.gpus[0] |= {
        "reasons": "0x48",
        "violation 1": "5000000",
        "violation 0": "7",
        "temperature": "91",
        "margin": "-1",
        "ecc 1 0": "3",
        "memory 2": "1",
        "memory 7": "2",
        "sram-threshold": "1",
        "remapped": "4 5 1 0",
        "pcie": "4 8",
        "link 3": "0 7 8 9 10",
        "field 230": "2",
    }
    library.write(file)
    library.ask("nvmlInit()")
    asked = {
        "nvmlSystemGetDriverVersion()": "580.95.05",
        "nvmlDeviceGetCount()": 8,
        f"nvmlDeviceGetUUID({GPU})": "GPU-00000000-0000-0000-0000-000000000000",
        f"nvmlDeviceGetName({GPU})": "NVIDIA H100 80GB HBM3",
        f"nvmlDeviceGetPciInfo_v3({GPU}).busId": "00000000:1B:00.0",
        f"nvmlDeviceGetPciInfo_v3({GPU}).busIdLegacy": "0000:1B:00.0",
        f"nvmlDeviceGetCurrentClocksEventReasons({GPU})": 0x48,
        f"nvmlDeviceGetCurrentClocksThrottleReasons({GPU})": 0x48,
        f"nvmlDeviceGetViolationStatus({GPU}, NVML_PERF_POLICY_THERMAL).violationTime": 5000000,
        f"nvmlDeviceGetViolationStatus({GPU}, NVML_PERF_POLICY_POWER).violationTime": 7,
        f"nvmlDeviceGetViolationStatus({GPU}, NVML_PERF_POLICY_RELIABILITY)": "NVMLError_NotSupported 3",
        f"nvmlDeviceGetTemperature({GPU}, NVML_TEMPERATURE_GPU)": 91,
        f"nvmlDeviceGetTemperatureV({GPU}, NVML_TEMPERATURE_GPU)": 91,
        f"nvmlDeviceGetTemperatureThreshold({GPU}, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)": 90,
        f"nvmlDeviceGetMarginTemperature({GPU})": -1,
        f"nvmlDeviceGetPowerUsage({GPU})": 110000,
        f"nvmlDeviceGetTotalEccErrors({GPU}, 1, 0)": 3,
        f"nvmlDeviceGetMemoryErrorCounter({GPU}, 1, 0, NVML_MEMORY_LOCATION_DRAM)": 1,
        f"nvmlDeviceGetMemoryErrorCounter({GPU}, 1, 0, NVML_MEMORY_LOCATION_SRAM)": 2,
        f"nvmlDeviceGetMemoryErrorCounter({GPU}, 1, 0, NVML_MEMORY_LOCATION_CBU)": "NVMLError_NotSupported 3",
        f"nvmlDeviceGetRetiredPagesPendingStatus({GPU})": "NVMLError_NotSupported 3",
        f"nvmlDeviceGetMigMode({GPU})": [0, 0],
        f"nvmlDeviceGetRemappedRows({GPU})": [4, 5, 1, 0],
        f"nvmlDeviceGetCurrPcieLinkGeneration({GPU})": 4,
        f"nvmlDeviceGetCurrPcieLinkWidth({GPU})": 8,
        f"nvmlDeviceGetMaxPcieLinkGeneration({GPU})": 5,
        f"nvmlDeviceGetMaxPcieLinkWidth({GPU})": 16,
        f"nvmlDeviceGetPcieReplayCounter({GPU})": 0,
        f"[each.value.ullVal for each in nvmlDeviceGetFieldValues({GPU}, [230])]": [2],
        f"[each.nvmlReturn for each in nvmlDeviceGetFieldValues({GPU}, [230, 74])]": [0, 3],
        f"[each.value.siVal for each in nvmlDeviceGetFieldValues({GPU}, [194])]": [-2],
        f"[each.value.ullVal for each in nvmlDeviceGetFieldValues({GPU}, [91, (161, 3), (214, 3)])]": [18, 7, 10],
        f"[each.value.ullVal for each in nvmlDeviceGetFieldValues({GPU}, [(162, 3), (163, 3)])]": [8, 9],
        f"[nvmlDeviceGetNvLinkState({GPU}, link) for link in (2, 3)]": [1, 0],
        f"nvmlDeviceGetNvLinkState({GPU}, 18)": "NVMLError_InvalidArgument 2",
        f"nvmlDeviceGetSerial({GPU})": "NVMLError_FunctionNotFound 13",
        "nvmlErrorString(15)": "GPU is lost",
        "nvmlDeviceGetHandleByIndex(8)": "NVMLError_InvalidArgument 2",
    }  # fmt: skip
    assert {expression: library.ask(expression) for expression in asked} == asked


def test_a_changed_file_is_read_again(library: Library) -> None:
    file = ControlFile.of_healthy_gpus(2)
    library.write(file)
    library.ask("nvmlInit()")
    library.ask(f"globals().update(gpu=nvmlDeviceGetHandleByIndex(1)) or {GPU} and None")
    assert library.ask("nvmlDeviceGetTemperature(gpu, 0)") == 45
    file.gpus[1]["temperature"] = "93"
    library.write(file)
    assert library.ask("nvmlDeviceGetTemperature(gpu, 0)") == 93
    library.write(ControlFile.of_healthy_gpus(1))
    assert library.ask("nvmlDeviceGetTemperature(gpu, 0)") == "NVMLError_GpuIsLost 15"


def test_a_counter_of_a_throttling_gpu_grows(library: Library) -> None:
    file = ControlFile.of_healthy_gpus(1)
    file.gpus[0]["violation 1"] = "1000 1.0"
    library.write(file)
    library.ask("nvmlInit()")
    asked = f"nvmlDeviceGetViolationStatus({GPU}, 1).violationTime"
    first = library.ask(asked)
    assert first > 1000
    assert library.ask(asked) > first


def test_one_gpu_fails_and_the_others_answer(library: Library) -> None:
    file = ControlFile.of_healthy_gpus(2)
    file.gpus[0]["error nvmlDeviceGetTemperature"] = "999"
    file.gpus[1]["error *"] = "15"
    library.write(file)
    library.ask("nvmlInit()")
    assert library.ask(f"nvmlDeviceGetTemperature({GPU}, 0)") == "NVMLError_Unknown 999"
    assert library.ask(f"nvmlDeviceGetPowerUsage({GPU})") == 110000
    assert library.ask("nvmlDeviceGetHandleByIndex(1)") == "NVMLError_GpuIsLost 15"


def test_a_control_file_is_read_as_it_was_written() -> None:
    file = ControlFile.of_healthy_gpus(3)
    file.gpus[2] |= {"hang nvmlDeviceGetPowerUsage": "", "violation 1": "10 0.5", "error *": "15"}
    file.library["delay nvmlDeviceGetCount_v2"] = "0.5"
    assert ControlFile.parse(file.render()) == file


def test_the_library_has_as_many_gpus_as_its_control_file_may_name(library: Library) -> None:
    library.write(ControlFile.of_healthy_gpus(nvml_stand_in.MAX_GPUS + 1))
    library.ask("nvmlInit()")
    assert library.ask("nvmlDeviceGetCount()") == nvml_stand_in.MAX_GPUS
