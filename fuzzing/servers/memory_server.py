"""musterd's local socket, which every user of a node may call, with any packet and any descriptors.

    byte 0          what the descriptors are: an index of KINDS, modulo their number
    byte 1          how many of them come with the packet, modulo MOST_DESCRIPTORS
    packet          its length (2 bytes, little-endian), then its bytes

The rest of the input is further calls, up to MOST_CALLS. After each input musterd holds no descriptor that it does not
keep, and no bug was logged.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from fuzzing.servers.health import BugLog
from muster.checkpoint.store.memory.sealed_memory import MEMFD_SEALS
from muster.daemon.host.kept_memory_client import MAX_FDS
from muster.daemon.node.kept_memory.kept_memory_store import KeptMemoryStore
from muster.daemon.node.kept_memory.memory_service import MemoryService
from muster.daemon.node.kept_memory.retention import JobOwner
from muster.daemon.node.kept_memory.systemd_fd_store import FdStore

MOST_CALLS = 6
MOST_DESCRIPTORS = MAX_FDS + 8
JOB, OTHER_JOB = 7, 8
DEADLINE_S = 60.0
"""Seconds. It only ends a wait that would never end."""


def _memfd(seals: int = MEMFD_SEALS) -> int:
    fd = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


KINDS: tuple[Callable[[], int], ...] = (
    _memfd,
    lambda: _memfd(0),
    _pipe,
    lambda: os.open("/", os.O_PATH | os.O_CLOEXEC),
    lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).detach(),
)


class _Node:
    """The memory service of a musterd, to which a prolog has named a job of this process's user."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-memory-")
        self._path = Path(self._folder.name) / "memory.sock"
        self._log = BugLog()
        self._store = KeptMemoryStore(FdStore(""))
        service = MemoryService(self._path, self._store, root=())
        threading.Thread(target=lambda: asyncio.run(service.run()), name="musterd", daemon=True).start()
        self._call(b"", [])  # waits for the start
        self._free()
        self._descriptors = self._count()

    def check(self, data: bytes) -> None:
        """One input."""
        for kind, count, packet in _calls_of(data):
            fds = [KINDS[kind]() for _ in range(count)]
            try:
                self._call(packet, fds)
            finally:
                for fd in fds:
                    os.close(fd)
        self._free()
        now = self._count()
        held = now - self._descriptors
        assert held <= 0, f"musterd holds {held} descriptors that it does not keep"
        self._descriptors = now  # fewer: the servers of other targets in this process have closed some of theirs
        self._log.check()

    def _call(self, packet: bytes, fds: list[int]) -> None:
        """One call, until musterd has ended it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.settimeout(DEADLINE_S)
            while True:
                with suppress(FileNotFoundError):
                    line.connect(str(self._path))
                    break
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            line.sendmsg([packet], rights)
            line.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                while line.recv(1 << 16):
                    pass

    def _free(self) -> None:
        """Each call has ended; another job starts, and then the first one again."""
        for thread in threading.enumerate():
            if "process_request_thread" in thread.name:  # socketserver's name
                thread.join(DEADLINE_S)
        self._store.job_starts(JobOwner(OTHER_JOB, os.getuid()))
        self._store.job_starts(JobOwner(JOB, os.getuid()))

    @staticmethod
    def _count() -> int:
        return len(os.listdir("/proc/self/fd"))


def _calls_of(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    for _ in range(MOST_CALLS):
        if len(data) < 4:
            return
        end = 4 + int.from_bytes(data[2:4], "little")
        yield data[0] % len(KINDS), data[1] % MOST_DESCRIPTORS, data[4:end]
        data = data[end:]


_nodes: list[_Node] = []


def check(data: bytes) -> None:
    """`data` as a sequence of calls. The first input starts the service."""
    if not _nodes:
        _nodes.append(_Node())
    _nodes[0].check(data)
