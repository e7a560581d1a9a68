"""The process that calls NVIDIA's management library (NVML), because its calls can hang for minutes on a dying GPU.

    python -I nvml_reader.py LIBRARY PARENT

`nvml_process` starts it by its path, so that it imports nothing of the daemon: it must stay small. It reads all GPUs
once for each line on stdin, and answers in lines of JSON on stdout:

    request     ["0000:3b:00"]                        the devices to leave out
    answer      {"reading": "0000:1b:00"}             the device that the next calls are about
                {"gpu": {"index": 0, ...}}            what it reports, as `nvml_process.GpuReading`
                ...
                {"count": 8}                          the end of the answer
    at the end  {"unavailable": "Driver Not Loaded"}  why no GPU can be read here

A reading that fails is in "failed" with NVML's return code, and the other readings stand.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import pynvml

from muster.daemon.host import process_tree
from muster.daemon.node.nvml import nvml_readings


def main(library: str, parent: int) -> None:
    """Answer until stdin ends."""
    process_tree.die_with_parent(parent)
    process_tree.set_process_name("muster-nvml")
    try:
        ctypes.CDLL(library)  # pynvml finds a library that is loaded already by its name
        pynvml.nvmlInit()
    except (OSError, pynvml.NVMLError) as error:
        _say(unavailable=str(error))
        return
    gpus: list[dict[str, Any]] = []
    for number, line in enumerate(sys.stdin):
        gpus = _read_all(gpus, set(json.loads(line)), number)


def _read_all(gpus: list[dict[str, Any]], leave_out: set[str], number: int) -> list[dict[str, Any]]:
    """Answer request `number`. Returns what stays the same of each GPU; `gpus` is that of the request before."""
    count = pynvml.nvmlDeviceGetCount()
    gpus = [gpus[index] if index < len(gpus) else {"index": index, "device": ""} for index in range(count)]
    for gpu in gpus:
        failed = _find_device(gpu)
        if gpu["device"] not in leave_out or failed:
            _say(reading=gpu["device"])
            slow = not number or not (number + gpu["index"]) % nvml_readings.SLOW_EVERY
            _say(gpu={**gpu, "failed": failed} if failed else _read(gpu, slow))
    _say(count=count)
    return gpus


def _find_device(gpu: dict[str, Any]) -> dict[str, int]:
    """Learn the PCI address. Returns what failed."""
    if gpu["device"]:
        return {}
    _say(reading="")
    try:
        pci = pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu["index"]))
    except pynvml.NVMLError as error:
        return {"handle": error.value}
    gpu["device"] = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}"
    return {}


def _read(gpu: dict[str, Any], slow: bool) -> dict[str, Any]:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(gpu["index"])
    except pynvml.NVMLError as error:
        return {**gpu, "failed": {"handle": error.value}}
    failed = _learn_names(gpu, handle)
    values, not_read = nvml_readings.read(handle, slow)
    return {**gpu, **values, "failed": failed | not_read, "whole": slow}


def _learn_names(gpu: dict[str, Any], handle: object) -> dict[str, int]:
    """Learn what stays the same. Returns what failed."""
    failed = dict[str, int]()
    for name, call in (("uuid", pynvml.nvmlDeviceGetUUID), ("name", pynvml.nvmlDeviceGetName)):
        if name not in gpu:
            try:
                gpu[name] = call(handle)
            except pynvml.NVMLError as error:
                failed[name] = error.value
    return failed


def _say(**line: object) -> None:
    sys.stdout.write(f"{json.dumps(line)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
