"""The states of random generators: this process's own, and those that a script makes.

A process has those of Python, torch, the CUDA device, and of numpy if it is imported.
"""

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


class KeptGenerator:
    """A generator that a script has made, as an object with a state: of torch, numpy or Python."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    @staticmethod
    def fits(value: Any) -> bool:
        """Whether this is a generator."""
        numpy = sys.modules.get("numpy")
        kinds = (torch.Generator, random.Random, *([numpy.random.Generator] if numpy is not None else []))
        return isinstance(value, kinds)

    def state_dict(self) -> Any:
        """The present state, as plain picklable values."""
        if isinstance(self._generator, torch.Generator):
            return _bytes(self._generator.get_state())
        if isinstance(self._generator, random.Random):
            return self._generator.getstate()
        return self._generator.bit_generator.state

    def load_state_dict(self, state: Any) -> None:
        """Go on where the state was taken."""
        if isinstance(self._generator, torch.Generator):
            self._generator.set_state(_tensor(state))
        elif isinstance(self._generator, random.Random):
            self._generator.setstate(state)
        else:
            self._generator.bit_generator.state = state


def _bytes(state: torch.Tensor) -> bytes:
    state = state.contiguous()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8).clone()
