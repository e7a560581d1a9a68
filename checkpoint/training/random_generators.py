"""The states of this process's random generators: Python, torch, the CUDA device, and numpy if it is imported."""

import ctypes
import importlib
import random
import sys
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """The states of all generators, as plain picklable values."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": _bytes(torch.get_rng_state())}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = (kind, keys.tobytes(), position, has_gauss, gauss)
    if torch.cuda.is_initialized():
        state["cuda"] = _bytes(torch.cuda.get_rng_state())
    return state


def restore(state: dict[str, Any]) -> None:
    """Set every generator whose state was captured."""
    random.setstate(state["python"])
    torch.set_rng_state(_tensor(state["torch"]))
    if "numpy" in state:
        numpy = importlib.import_module("numpy")
        kind, keys, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), position, has_gauss, gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _bytes(state: torch.Tensor) -> bytes:
    state = state.contiguous()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8).clone()
