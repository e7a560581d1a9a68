"""The memfds that this node keeps while a job is requeued: taken in, given back, freed, found again after a restart.

musterd only holds descriptors. It never maps or reads what a user has handed over, so that no user can make it die of
SIGBUS. Letting go of the last descriptor of much memory takes a while, and punching holes may wait for whoever is
writing there: nothing here but `kept` and `outdate` is for an event loop. All of it may be called by any thread.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Lock

from google.protobuf import json_format

from muster.checkpoint.store.memory.sealed_memory import MEMFD_SEALS
from muster.daemon.host.kept_memory_client import MAX_FDS
from muster.daemon.node.kept_memory.retention import RETENTION_S, JobOwner, KeptEntry, Retention
from muster.daemon.node.kept_memory.systemd_fd_store import FdStore
from muster.v1.memory_pb2 import KeepMemory, KeptMemory

_log = logging.getLogger(__name__)

FREE_TIMEOUT_S = 8.0
"""A prolog waits so long for memory to be given back: Slurm gives a job up that has not begun after BatchStartTimeout,
10 s by default."""
MAX_GANG_NAME_CHARS = 128
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # fallocate(2)
_UNWRITABLE = fcntl.F_SEAL_WRITE | 0x10  # F_SEAL_FUTURE_WRITE
_NOTE_BYTES = 1 << 16
_HANDS = 8
"""So many memfds are freed at once: a job waits for it."""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Memfds:
    """What one gang has left: musterd's own note of it, and the descriptors that were handed over."""

    name: str
    note_fd: int
    handed_fds: tuple[int, ...]

    def stored(self) -> Iterator[tuple[str, int]]:
        """Each descriptor with its name in systemd's store."""
        for place, fd in enumerate((self.note_fd, *self.handed_fds)):
            yield f"{self.name}.{place}", fd


class KeptMemoryStore:
    """All memory that is kept here.

    Args:
        store: where descriptors outlive this process.
        freed_s: how long `job_starts` waits, seconds.
        punch: gives a memfd's pages back to the system; in a thread.
    """

    def __init__(
        self, store: FdStore, freed_s: float = FREE_TIMEOUT_S, punch: Callable[[int], None] | None = None
    ) -> None:
        self._store = store
        self._freed_s = freed_s
        self._punch = punch or _punch
        self._lock = Lock()
        self._custody: Retention[Memfds] = Retention()
        self._outdated: list[KeptEntry[Memfds]] = []
        self._freeing: set[Future[None]] = set()

    def recover(self, fds: Mapping[str, int], named: JobOwner | None) -> None:
        """Take over what an earlier musterd had stored, as far as it is of the job that a prolog has `named` last; all
        else goes, as does what is not whole."""
        with self._lock:
            self._custody.prolog_job = named
        found = []
        for name in sorted({name.rpartition(".")[0] for name in fds}):
            mine = {int(_place(full, name)): fd for full, fd in fds.items() if _place(full, name)}
            kept = _read(name, mine)
            if kept is not None:
                found.append(kept)
                continue
            _log.warning("what systemd has stored as %s is not whole: freed", name)
            for place, fd in mine.items():
                self._store.remove(f"{name}.{place}")
                os.close(fd)
        # Where musterd ended while one took another's place, the one that was left last is the one that counts.
        for kept in sorted(found, key=lambda kept: kept.until):
            _log.info("gang %s of uid %d still has its memory here", kept.gang, kept.owner.uid)
            self.put_back(kept)

    def keep(self, uid: int, request: KeepMemory, fds: Sequence[int], now: float) -> str:
        """Keep descriptors for a user's gang; they are the depot's if it does.

        Returns:
            Why not, in words; empty: they are kept.
        """
        owner = JobOwner(request.slurm_job_id, uid)
        if refused := self._refusal(owner) or _flaw(request, fds):
            return refused
        kept = _note(owner, request, fds, now + RETENTION_S)
        for name, fd in kept.memory.stored():
            self._store.put(name, fd)
        self.put_back(kept)
        _log.info("kept: %d memfds of gang %s, uid %d, job %d", len(fds), kept.gang, uid, owner.job)
        return ""

    def hand_out(self, uid: int, gang: str) -> KeptEntry[Memfds] | None:
        """Remove and return what this user's gang has deposited. The caller gives it back to the gang, then calls
        `release`; if that fails, `put_back`."""
        with self._lock:
            return self._custody.hand_out(uid, gang)

    def put_back(self, kept: KeptEntry[Memfds]) -> None:
        """Keep it, in the place of what was left before; unless another job has started meanwhile."""
        with self._lock:
            stranger = bool(self._custody.refusal(kept.owner))
            before = kept if stranger else self._custody.keep(kept)
        if before is not None and stranger:
            self._free(before)
        elif before is not None:
            self.release(before)

    def release(self, kept: KeptEntry[Memfds]) -> None:
        """Hold it no longer: its owner has it, or nobody wants it. Whatever else holds its memory goes on to."""
        for name, fd in kept.memory.stored():
            self._store.remove(name)
            os.close(fd)

    def job_starts(self, owner: JobOwner) -> int:
        """A job is about to start here: free what another one has left. Its pages are gone when this returns, whoever
        else may still hold a descriptor: some gigabytes a second.

        Returns:
            Of how many gangs something was freed.

        Raises:
            TimeoutError: it is still being done.
        """
        with self._lock:
            gone = self._custody.job_starts(owner)
            under_way = list(self._freeing)
        self._finish([*under_way, *(self._free(gone) if gone is not None else ())])
        return int(gone is not None)

    def kept(self) -> list[tuple[str, int]]:
        """The gang whose memory is kept, and the newest generation that it had then."""
        with self._lock:
            kept = self._custody.kept
        return [(kept.gang, kept.generation)] if kept is not None else []

    def mark_obsolete(self, gang: str, generation: int) -> None:
        """The gang does not need what it left in this generation any more: the next `release_expired` releases it."""
        with self._lock:
            if (kept := self._custody.remove_obsolete(gang, generation)) is not None:
                self._outdated.append(kept)

    def release_expired(self, now: float) -> None:
        """Let go of what has been kept for long enough, or is wanted no more."""
        with self._lock:
            gone, self._outdated = self._outdated, []
            if (kept := self._custody.remove_expired(now)) is not None:
                gone.append(kept)
        for kept in gone:
            self.release(kept)
            _log.info("let go: the memory of gang %s, uid %d, job %d", kept.gang, kept.owner.uid, kept.owner.job)

    def close(self) -> None:
        """Hold nothing any more; what systemd has stored stays there."""
        with self._lock:
            held = [*self._outdated, *([self._custody.kept] if self._custody.kept is not None else [])]
            self._custody, self._outdated = Retention(), []
        for kept in held:
            for _, fd in kept.memory.stored():
                os.close(fd)

    def _refusal(self, owner: JobOwner) -> str:
        with self._lock:
            return self._custody.refusal(owner)

    def _free(self, gone: KeptEntry[Memfds]) -> list[Future[None]]:
        """Begin to give memory back to the system."""
        _log.info("freed: the memory of gang %s, uid %d, job %d", gone.gang, gone.owner.uid, gone.owner.job)
        for name, _ in gone.memory.stored():
            self._store.remove(name)
        os.close(gone.memory.note_fd)
        # Hands of its own: those of another one may wait for somebody who writes there for ever.
        hands = ThreadPoolExecutor(_HANDS, "free")
        begun = [hands.submit(self._give_back, fd) for fd in gone.memory.handed_fds]
        hands.shutdown(wait=False)
        with self._lock:
            self._freeing.update(begun)
        return begun

    def _give_back(self, fd: int) -> None:
        self._punch(fd)
        os.close(fd)

    def _finish(self, begun: Sequence[Future[None]]) -> None:
        """Raises TimeoutError: not all of it has ended in time; nobody waits for it again."""
        done, late = wait(begun, self._freed_s)
        with self._lock:
            self._freeing -= done | late
        if late:
            _log.error("%d memfds are still being freed after %.0f s", len(late), self._freed_s)
            raise TimeoutError(f"{len(late)} memfds are still being freed after {self._freed_s:.0f} s")


def _punch(fd: int) -> None:
    size = ctypes.c_int64(os.fstat(fd).st_size)
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), size):
        # The descriptions are sealed against writing: they go with their last descriptor.
        _log.debug("a memfd's pages can't be given back: %s", os.strerror(ctypes.get_errno()))


def _flaw(request: KeepMemory, fds: Sequence[int]) -> str:
    """Why this can't be kept, in words; empty: it can."""
    gang = request.gang_id
    if not gang or not gang.isprintable() or len(gang) > MAX_GANG_NAME_CHARS:
        return f"a gang has to be named, in at most {MAX_GANG_NAME_CHARS} printable characters"
    if not 2 <= len(fds) <= MAX_FDS:
        return f"{len(fds)} descriptors: one that describes the others, and at most {MAX_FDS - 1} of these"
    if not all(_seals(fd) & MEMFD_SEALS == MEMFD_SEALS for fd in fds):
        return "only memfds are kept, sealed against growing, shrinking and further seals"
    if not all(_is_writable(fd) for fd in fds[1:]):
        return "of memfds that can't be written to no page can be given back"
    return ""


def _seals(fd: int) -> int:
    """A memfd's seals; 0 of anything else, which is not asked anything, whatever it is."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0


def _is_writable(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR and not _seals(fd) & _UNWRITABLE


def _note(owner: JobOwner, request: KeepMemory, fds: Sequence[int], until: float) -> KeptEntry[Memfds]:
    note = KeptMemory(
        uid=owner.uid,
        gang_id=request.gang_id,
        slurm_job_id=owner.job,
        until_s=until,
        memfds=len(fds),
        generation=request.generation,
    )
    fd = os.memfd_create("musterd-note", os.MFD_CLOEXEC)
    os.pwrite(fd, json_format.MessageToJson(note, indent=None).encode(), 0)
    memory = Memfds(f"kept-{secrets.token_hex(8)}", fd, tuple(fds))
    return KeptEntry(owner, request.gang_id, until, memory, request.generation)


def _place(full: str, name: str) -> str:
    """ "3" for kept-….3, where that is of `name`; else empty."""
    head, _, place = full.rpartition(".")
    return place if head == name and place.isdecimal() else ""


def _read(name: str, fds: Mapping[int, int]) -> KeptEntry[Memfds] | None:
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
    return KeptEntry(JobOwner(note.slurm_job_id, note.uid), note.gang_id, note.until_s, memory, note.generation)
