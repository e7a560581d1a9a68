"""The memfds that this node keeps while a job is requeued: taken in, given back, freed, found again after a restart.

musterd only holds descriptors. It never maps or reads what a user has handed over, so that no user can make it die of
SIGBUS or wait; the user's next agent verifies every byte.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import secrets
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from google.protobuf import json_format

from muster.checkpoint.slots import SEALS
from muster.daemon.memory_line import MOST_FDS
from muster.daemon.node.custody import KEPT_S, Custody, Kept
from muster.daemon.node.fd_store import FdStore
from muster.v1.memory_pb2 import KeepMemory, KeptMemory

_log = logging.getLogger(__name__)

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # fallocate(2)
_NOTE_BYTES = 1 << 16
_HANDS = 8
"""So many memfds are freed at once: a job waits for it."""
_libc = ctypes.CDLL(None, use_errno=True)


def is_sealed(fd: int) -> bool:
    """Whether a descriptor is a memfd whose size is settled; asked of nothing but memory, whatever `fd` is."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Memfds:
    """What one gang has left: musterd's own note of it, and the descriptors that were handed over."""

    name: str
    note: int
    handed: tuple[int, ...]

    def stored(self) -> Iterator[tuple[str, int]]:
        """Each descriptor with its name in systemd's store."""
        for place, fd in enumerate((self.note, *self.handed)):
            yield f"{self.name}.{place}", fd


class Depot:
    """All memory that is kept here.

    Args:
        store: where descriptors outlive this process.
    """

    def __init__(self, store: FdStore) -> None:
        self._store = store
        self._custody: Custody[Memfds] = Custody()
        self._outdated: list[Kept[Memfds]] = []

    def recover(self, fds: Mapping[str, int]) -> None:
        """Take over what an earlier musterd had stored; what is not whole goes."""
        names = {name.rpartition(".")[0] for name in fds}
        for name in sorted(names):
            mine = {int(_place(full, name)): fd for full, fd in fds.items() if _place(full, name)}
            kept = _read(name, mine)
            if kept is not None:
                _log.info("gang %s of uid %d still has its memory here", kept.gang, kept.uid)
                self.put_back(kept)
                continue
            _log.warning("what systemd has stored as %s is not whole: freed", name)
            for place, fd in mine.items():
                self._store.remove(f"{name}.{place}")
                os.close(fd)

    def keep(self, uid: int, request: KeepMemory, fds: Collection[int], now: float) -> str:
        """Keep descriptors for a user's gang; they are the depot's if it does.

        Returns:
            Why not, in words; empty: they are kept.
        """
        if not request.gang_id or not request.slurm_job_id:
            return "a gang and its Slurm job have to be named"
        if not 2 <= len(fds) <= MOST_FDS:
            return f"{len(fds)} descriptors: one that describes the others, and at most {MOST_FDS - 1} of these"
        if not all(map(is_sealed, fds)):
            return "only memfds are kept, sealed against growing, shrinking and further seals"
        if refused := self._custody.refusal(uid, request.gang_id):
            return refused
        kept = _note(uid, request, fds, now + KEPT_S)
        for name, fd in kept.memory.stored():
            self._store.put(name, fd)
        self.put_back(kept)
        _log.info("kept: %d memfds of gang %s, uid %d, job %d", len(fds), kept.gang, uid, kept.job)
        return ""

    def take(self, uid: int, gang: str) -> Kept[Memfds] | None:
        """What this user's gang has left: to be given back, then to be `let_go` or, where that fails, `put_back`."""
        return self._custody.take(uid, gang)

    def put_back(self, kept: Kept[Memfds]) -> None:
        """Keep it, in the place of what the gang has left before."""
        self._outdated += self._custody.keep(kept)

    def let_go(self, kept: Kept[Memfds]) -> None:
        """Its owner has it: hold it no longer."""
        for name, fd in kept.memory.stored():
            self._store.remove(name)
            os.close(fd)

    def job_starts(self, job: int) -> list[Kept[Memfds]]:
        """What all other jobs have left: to be freed."""
        return self._custody.job_starts(job) + self._superseded()

    def kept(self) -> list[tuple[str, int]]:
        """The gangs whose memory is kept, and the newest generation that each had then."""
        return sorted({(kept.gang, kept.generation) for kept in self._custody.all()})

    def outdate(self, gang: str, generation: int) -> None:
        """The gang wants no more what it had left in this generation: it goes with what is freed next."""
        self._outdated += self._custody.over(gang, generation)

    def expired(self, now: float) -> list[Kept[Memfds]]:
        """What has been kept for long enough: to be freed."""
        return self._custody.expired(now) + self._superseded()

    def _superseded(self) -> list[Kept[Memfds]]:
        gone, self._outdated = self._outdated, []
        return gone

    def free(self, gone: Collection[Kept[Memfds]]) -> None:
        """Give memory back to the system: some gigabytes a second. Its pages are gone when this returns, whoever else
        may still hold a descriptor."""
        with ThreadPoolExecutor(_HANDS) as hands:
            list(hands.map(_give_back, [fd for kept in gone for fd in kept.memory.handed]))
        for kept in gone:
            self.let_go(kept)
            _log.info("freed: the memory of gang %s, uid %d, job %d", kept.gang, kept.uid, kept.job)

    def close(self) -> None:
        """Hold nothing any more; what systemd has stored stays there."""
        for kept in (*self._custody.all(), *self._outdated):
            for _, fd in kept.memory.stored():
                os.close(fd)
        self._custody, self._outdated = Custody(), []


def _give_back(fd: int) -> None:
    size = ctypes.c_int64(os.fstat(fd).st_size)
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), size):
        # Sealed against writing, too: then it goes with its last descriptor.
        _log.debug("a memfd's pages can't be given back: %s", os.strerror(ctypes.get_errno()))


def _note(uid: int, request: KeepMemory, fds: Collection[int], until: float) -> Kept[Memfds]:
    note = KeptMemory(
        uid=uid,
        gang_id=request.gang_id,
        slurm_job_id=request.slurm_job_id,
        until_s=until,
        memfds=len(fds),
        generation=request.generation,
    )
    fd = os.memfd_create("musterd-note", os.MFD_CLOEXEC)
    os.pwrite(fd, json_format.MessageToJson(note, indent=None).encode(), 0)
    memory = Memfds(f"kept-{secrets.token_hex(8)}", fd, tuple(fds))
    return Kept(uid, request.gang_id, request.slurm_job_id, until, memory, request.generation)


def _place(full: str, name: str) -> str:
    """ "3" for kept-….3, where that is of `name`; else empty."""
    head, _, place = full.rpartition(".")
    return place if head == name and place.isdecimal() else ""


def _read(name: str, fds: Mapping[int, int]) -> Kept[Memfds] | None:
    """What a note and the descriptors around it are; None where one is missing."""
    if 0 not in fds:
        return None
    try:
        note = json_format.Parse(os.pread(fds[0], _NOTE_BYTES, 0), KeptMemory())
    except (OSError, json_format.ParseError):
        return None
    handed = range(1, note.memfds + 1)
    if not all(place in fds for place in handed):
        return None
    memory = Memfds(name, fds[0], tuple(fds[place] for place in handed))
    return Kept(note.uid, note.gang_id, note.slurm_job_id, note.until_s, memory, note.generation)
