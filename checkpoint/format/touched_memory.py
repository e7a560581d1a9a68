"""Mapped memory of which no page is missing when bytes come.

The kernel needs a quarter of a second to touch each GiB, and far longer on a busy node. Python's own mmap with
MAP_POPULATE keeps all other threads of the process from running meanwhile, and with them the signs of life.
"""

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor

CHUNK_BYTES = 64 << 20
"""Bytes that are touched at a time: the kernel lets nothing else of this process be mapped meanwhile."""

MADV_POPULATE_WRITE = 23
"""Touch all pages of a range as if they were written (Linux 5.14 and newer; mmap has no name for it)."""

_libc = ctypes.CDLL(None)


def map_touched(descriptor: int, size: int, threads: int = 1) -> mmap.mmap:
    """Map `size` bytes of a file in memory for reading and writing, and touch all of them, with so many threads. Other
    threads run meanwhile.

    The bytes stay as they are. With an older kernel, each page is touched when it is used for the first time.

    Raises:
        OSError: the file can't be mapped.
    """
    mapping = mmap.mmap(descriptor, size)
    begin = ctypes.c_char.from_buffer(mapping)
    address = ctypes.addressof(begin)
    del begin  # a mapping that somebody refers to can't be closed
    end = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda start: touch(address + start, min(CHUNK_BYTES, end - start)), range(0, end, CHUNK_BYTES)))
    return mapping


def touch(address: int, size: int) -> bool:
    """Touch every page that has a byte of this range, as if it were written. Other threads run meanwhile.

    The bytes stay as they are. A page of a private mapping is this process's own afterwards.

    Returns:
        False: the kernel can't (it is older than 5.14), or has no memory.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(address + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    return not _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_POPULATE_WRITE)
