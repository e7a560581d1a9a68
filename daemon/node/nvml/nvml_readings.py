"""What is read of each GPU, by the names of `nvml_process.GpuReading`, as calls of NVIDIA's library.

Each reading is a function of the GPU's handle. Fields are numbers that one call reads together. The slow readings cost
the driver more, or change seldom: each GPU has them once in `SLOW_EVERY` requests, not all GPUs in the same one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pynvml

SLOW_EVERY = 3
"""Requests from one slow reading of a GPU to the next: 3 s. Samples that are more than 5 s apart count as no time."""
_MOST_LINKS = 18
"""NVLinks of a GPU, where the driver does not say how many there are (H100, B200)."""
_LINK_COUNT = 91
_LINK_COUNTERS = (161, 162, 163, 214)
"""NVML's fields of one link: replays, recoveries, CRC errors, failed recoveries (NVLink 5)."""
_DRAM, _SRAM = 2, 7
_FLOAT, _SIGNED_LONG, _SIGNED_INT, _SHORT = 0, 4, 5, 6
_VALUE_OF_TYPE = {_FLOAT: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", _SIGNED_LONG: "sllVal", _SIGNED_INT: "siVal"}

FIELDS = {
    "board_limit_ns": 77,
    "reliability_ns": 79,
    "slowdown_margin_c": 194,
    "recovery_action": 230,
    "power_brake_ns": 271,
}
"""NVML's number of each field."""
_SIGNED = frozenset({194})
"""Fields that may be negative, whatever type the driver says."""


def read(handle: Any, slow: bool) -> tuple[dict[str, Any], dict[str, int]]:
    """All readings, and NVML's return code of those that failed."""
    values, failed = _read_fields(handle)
    for name, call in (FAST | SLOW if slow else FAST).items():
        try:
            values[name] = call(handle)
        except pynvml.NVMLError as error:
            failed[name] = error.value
    return values, failed


def _read_fields(handle: Any) -> tuple[dict[str, Any], dict[str, int]]:
    values, failed = dict[str, Any](), dict[str, int]()
    try:
        found = pynvml.nvmlDeviceGetFieldValues(handle, list(FIELDS.values()))
    except pynvml.NVMLError as error:
        return {}, dict.fromkeys(FIELDS, error.value)
    for name, value in zip(FIELDS, found, strict=True):
        if value.nvmlReturn:
            failed[name] = value.nvmlReturn
        else:
            values[name] = _number(value)
    return values, failed


def _number(value: Any) -> int:
    if value.fieldId in _SIGNED:
        return int(value.value.siVal)
    return int(getattr(value.value, _VALUE_OF_TYPE.get(value.valueType, "ullVal")))


def _reasons(handle: Any) -> int:
    """Clock event reasons. Drivers before 535 have the older name only."""
    try:
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except pynvml.NVMLError_FunctionNotFound:
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _uncorrected_in(memory: int) -> Callable[[Any], int]:
    def count(handle: Any) -> int:
        kind, since_start = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        return int(pynvml.nvmlDeviceGetMemoryErrorCounter(handle, kind, since_start, memory))

    return count


def _sram_over_threshold(handle: Any) -> bool:
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    status.version = ctypes.sizeof(status) | 1 << 24
    pynvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    return bool(status.bThresholdExceeded)


def _pcie(handle: Any) -> tuple[int, int, int, int]:
    return (
        pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
    )


def _links(handle: Any) -> list[list[int | None]]:
    """Of each NVLink: whether it is active, and its counters; None: the GPU does not report that."""
    states = _link_states(handle)
    asked = [(field, link) for link in range(len(states)) for field in _LINK_COUNTERS]
    found = pynvml.nvmlDeviceGetFieldValues(handle, asked) if asked else []
    counters = [None if value.nvmlReturn else _number(value) for value in found]
    size = len(_LINK_COUNTERS)
    return [[state, *counters[link * size : (link + 1) * size]] for link, state in enumerate(states)]


def _link_states(handle: Any) -> list[int]:
    (count,) = pynvml.nvmlDeviceGetFieldValues(handle, [_LINK_COUNT])
    states: list[int] = []
    for link in range(_MOST_LINKS if count.nvmlReturn else _number(count)):
        try:
            states.append(int(pynvml.nvmlDeviceGetNvLinkState(handle, link)))
        except pynvml.NVMLError_InvalidArgument:
            break  # this GPU has fewer
    return states


def _fabric(handle: Any) -> tuple[int, int, str, int, int]:
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    return int(info.state), int(info.status), bytes(info.clusterUuid).hex(), int(info.cliqueId), int(info.healthMask)


def _memory(handle: Any) -> tuple[int, int]:
    found = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return int(found.used), int(found.total)


FAST: dict[str, Callable[[Any], Any]] = {
    "reasons": _reasons,
    "thermal_violation_ns": lambda handle: (
        pynvml.nvmlDeviceGetViolationStatus(handle, pynvml.NVML_PERF_POLICY_THERMAL).violationTime
    ),
    "temperature_c": lambda handle: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    "margin_c": pynvml.nvmlDeviceGetMarginTemperature,
    "power_mw": pynvml.nvmlDeviceGetPowerUsage,
    "ecc_uncorrected": lambda handle: pynvml.nvmlDeviceGetTotalEccErrors(
        handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    ),
    "ecc_dram": _uncorrected_in(_DRAM),
    "ecc_sram": _uncorrected_in(_SRAM),
}
SLOW: dict[str, Callable[[Any], Any]] = {
    "slowdown_c": lambda handle: pynvml.nvmlDeviceGetTemperatureThreshold(
        handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    ),
    "remapped": pynvml.nvmlDeviceGetRemappedRows,
    "retirement_pending": pynvml.nvmlDeviceGetRetiredPagesPendingStatus,
    "sram_over_threshold": _sram_over_threshold,
    "mig": lambda handle: pynvml.nvmlDeviceGetMigMode(handle)[0],
    "pcie": _pcie,
    "pcie_replays": pynvml.nvmlDeviceGetPcieReplayCounter,
    "links": _links,
    "fabric": _fabric,
    "memory": _memory,
    "busy_percent": lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
}
