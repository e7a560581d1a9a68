"""The bytes of one item of a torch.distributed.checkpoint file.

A tensor's item is what torch.save writes: a zip whose one large record is the raw data. Only that record changes from
snapshot to snapshot, so torch writes the rest once, with checksums off (torch's own option: torch.load never checks
them). An object's item is torch.save's older format, a run of pickles: whatever follows the last one is ignored, it
needs no directory at its end, and it costs a microsecond to make.
"""

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LAST_PICKLE = pickle.dumps([], 2)


class TensorTemplate(NamedTuple):
    """What stands around a tensor's raw bytes."""

    head: bytes
    nbytes: int
    tail: bytes

    @property
    def bytes(self) -> int:
        """Size of the whole item."""
        return len(self.head) + self.nbytes + len(self.tail)


@lru_cache(maxsize=4096)
def tensor_template(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorTemplate:
    """The item of a contiguous tensor without its data."""
    nbytes = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    # By way of bytes: not every dtype can be filled, and every replica must write the same.
    blank = torch.zeros(nbytes, dtype=torch.uint8).view(dtype).view(shape)
    file = io.BytesIO()
    with _no_checksums():
        torch.save(blank, file)
    with zipfile.ZipFile(file) as archive:
        record = next(i for i in archive.infolist() if i.filename.endswith("/data/0"))
    written = file.getbuffer()
    _, name, extra = _LOCAL_HEADER.unpack_from(written, record.header_offset)
    start = record.header_offset + _LOCAL_HEADER.size + name + extra
    return TensorTemplate(bytes(written[:start]), nbytes, bytes(written[start + nbytes :]))


@contextmanager
def _no_checksums() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@lru_cache(maxsize=1)
def _first_pickles() -> bytes:
    file = io.BytesIO()
    torch.save(None, file, _use_new_zipfile_serialization=False)
    written = file.getvalue()
    return written[: written.rindex(pickle.dumps(None, 2) + _LAST_PICKLE)]


def dump_object(value: Any) -> bytes:
    """The item of a python object."""
    return _first_pickles() + pickle.dumps(value, 4) + _LAST_PICKLE


def load_object(item: memoryview) -> Any:
    """The reverse of `dump_object`; for bytes of this very job only (pickle runs code)."""
    return torch.load(io.BytesIO(item), weights_only=False)
