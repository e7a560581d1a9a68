"""The bytes of one item of a torch.distributed.checkpoint file.

A tensor's item is what torch.save writes: a zip file whose one large record is the raw data. A tensor of a subclass has
such a record for each of its inner tensors. Only these records change from snapshot to snapshot. So torch writes the
rest once, with checksums off (an option of torch; torch.load never checks them), of tensors and into a file whose bytes
take no memory.

An object's item has torch.save's older format, a series of pickles. torch.load ignores all bytes after the last pickle,
this format needs no directory at its end, and it takes a microsecond to make.
"""

import io
import math
import mmap
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, Self

import torch

from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training.states.inner_tensors import Recipe, put_together

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""The header of a zip record, with the lengths of its name and of its extra field."""

_MOST_PARTS = 255
"""As many tensors can be told from each other by one byte."""

_LAST_PICKLE = pickle.dumps([], 2)

_LONG_BYTES, _KEPT_BYTES = 1 << 20, 4096
"""Of a write of the first length or more, a hollow file keeps the second: the rest is data of a tensor."""


class TensorTemplate(NamedTuple):
    """An item without its raw data.

    `fixed`: the bytes around the data, each with its offset in the item.
    `data`: offset and length of the data of each plain tensor.
    """

    fixed: tuple[tuple[int, bytes], ...]
    data: tuple[tuple[int, int], ...]
    item_bytes: int


@lru_cache(maxsize=4096)
def tensor_template(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorTemplate:
    """The item of a contiguous tensor without its data."""
    return item_template(None, ((dtype, shape),))


def item_template(recipe: Recipe | None, kinds: tuple[tuple[torch.dtype, tuple[int, ...]], ...]) -> TensorTemplate:
    """The item of a tensor without its data.

    Args:
        recipe: how the tensor is put together of plain ones, 255 at most; None: it is a plain one.
        kinds: dtype and shape of each plain tensor.

    Raises:
        CheckpointError: torch.save does not write the plain tensors as they are.
    """
    if len(kinds) > _MOST_PARTS:
        raise CheckpointError(
            f"a tensor consists of {len(kinds)} plain ones: {_MOST_PARTS} is the most that can be kept"
        )
    # The data of each tensor begins with its number: so its record is found. A view of bytes, because not every dtype
    # can be filled.
    blanks = [_blank(number, *kind) for number, kind in enumerate(kinds, 1)]
    file = _HollowFile()
    with file, _checksums_off():
        torch.save(put_together(recipe, iter(blanks)), file)
        written = file.written()
    places: dict[int, tuple[int, int]] = {}
    with zipfile.ZipFile(written) as archive:  # type: ignore[call-overload]  # an mmap has what a file has
        for record in archive.infolist():
            if "/data/" not in record.filename or not record.file_size:
                continue
            _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(written, record.header_offset)
            start = record.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
            places[written[start]] = (start, record.file_size)
    data = [places.get(number, (0, 0)) for number in range(1, len(blanks) + 1)]
    if [length for _, length in data] != [blank.nbytes for blank in blanks]:
        raise CheckpointError(f"a {_kind(recipe)} is not saved as its inner tensors are: it can't be kept")
    if not all(any(start <= begin and end <= start + length for start, length in data) for begin, end in file.holes):
        raise CheckpointError(f"a {_kind(recipe)} is saved with {_LONG_BYTES} bytes or more beside its data")
    return TensorTemplate(_around(written, sorted(data)), tuple(data), len(written))


def _blank(number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that begins with the byte `number`. No other byte of it is written, so that a large one takes no memory:
    torch.empty would write all of them where algorithms must be deterministic."""
    storage = torch.UntypedStorage(math.prod(shape) * torch.empty((), dtype=dtype).element_size())
    if storage.nbytes():
        storage[0] = number
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),)).view(dtype).view(shape)


class _HollowFile:
    """A file in memory that keeps the begin of each long write only: a hole takes no memory. A context manager."""

    def __init__(self) -> None:
        self._file = io.FileIO(os.memfd_create("muster-template", os.MFD_CLOEXEC), "r+")
        self.holes: list[tuple[int, int]] = []
        """Begin and end of each."""

    def write(self, data: bytes | memoryview) -> int:
        """Writes `data` behind what was written before."""
        size = len(memoryview(data))
        kept = size if size < _LONG_BYTES else _KEPT_BYTES
        self._file.write(memoryview(data)[:kept])
        if kept < size:
            begin = self._file.tell()
            self.holes.append((begin, self._file.seek(size - kept, os.SEEK_CUR)))
            self._file.truncate()
        return size

    def flush(self) -> None:
        """Everything is there already."""

    def written(self) -> mmap.mmap:
        """What was written. Only what is read of it takes memory."""
        return mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _around(written: mmap.mmap, data: list[tuple[int, int]]) -> tuple[tuple[int, bytes], ...]:
    """What is written around the data."""
    fixed, end = [], 0
    for start, length in [*data, (len(written), 0)]:
        if start > end:
            fixed.append((end, written[end:start]))
        end = start + length
    return tuple(fixed)


def _kind(recipe: Recipe | None) -> str:
    return "tensor" if recipe is None else recipe.kind.__name__


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
