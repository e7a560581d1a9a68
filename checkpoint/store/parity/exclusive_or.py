"""The XOR of memory, by numpy: an agent without parities does not load it.

Measured on a busy core: 4.5 GB/s of what is added, where a copy of memory takes 3.8 (`make bench-checkpoint`).
"""

from functools import cache
from types import ModuleType

from muster.checkpoint.format.errors import CheckpointError


class NoNumpy(CheckpointError):
    """The agent's Python has no numpy."""


@cache
def load() -> ModuleType:
    """The module numpy.

    Raises:
        NoNumpy: it is not installed.
    """
    try:
        import numpy
    except ImportError as error:
        raise NoNumpy(f"parities need numpy, and the agents' Python has none ({error}): pip install numpy") from error
    return numpy


def add(target: memoryview, data: memoryview) -> None:
    """Replace `target` by the XOR of both. They are equally long. Other threads run meanwhile."""
    numpy = load()
    sum_of_both = numpy.frombuffer(target, dtype=numpy.uint8)
    numpy.bitwise_xor(sum_of_both, numpy.frombuffer(data, dtype=numpy.uint8), out=sum_of_both)
