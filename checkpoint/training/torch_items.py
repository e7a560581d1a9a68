"""The bytes of one item of a torch.distributed.checkpoint file.

A tensor's item is what torch.save writes: a zip file whose one large record is the raw data. Only this record changes
from snapshot to snapshot. So torch writes the rest once, with checksums off (an option of torch; torch.load never
checks them). An object's item has torch.save's older format, a series of pickles. torch.load ignores all bytes after
the last pickle, this format needs no directory at its end, and it takes a microsecond to make.
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
"""The header of a zip record, with the lengths of its name and of its extra field."""

_LAST_PICKLE = pickle.dumps([], 2)


class TensorTemplate(NamedTuple):
    """The bytes around a tensor's raw data."""

    prefix: bytes
    data_bytes: int
    suffix: bytes

    @property
    def item_bytes(self) -> int:
        """Size of the whole item."""
        return len(self.prefix) + self.data_bytes + len(self.suffix)


@lru_cache(maxsize=4096)
def tensor_template(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorTemplate:
    """The item of a contiguous tensor without its data."""
    data_bytes = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    # A view of zero bytes: not every dtype can be filled, and every replica must write equal bytes.
    blank = torch.zeros(data_bytes, dtype=torch.uint8).view(dtype).view(shape)
    file = io.BytesIO()
    with _checksums_off():
        torch.save(blank, file)
    with zipfile.ZipFile(file) as archive:
        record = next(i for i in archive.infolist() if i.filename.endswith("/data/0"))
    written = file.getbuffer()
    _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(written, record.header_offset)
    start = record.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    return TensorTemplate(bytes(written[:start]), data_bytes, bytes(written[start + data_bytes :]))


@contextmanager
def _checksums_off() -> Iterator[None]:
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
    """The item of a Python object."""
    return _first_pickles() + pickle.dumps(value, 4) + _LAST_PICKLE


def load_object(item: memoryview) -> Any:
    """The object of an item. Only for bytes of this very job, because unpickling runs code."""
    return torch.load(io.BytesIO(item), weights_only=False)
