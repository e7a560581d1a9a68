"""The memfds that this node keeps while a job is requeued: accepted, handed out, freed, recovered after a restart.

musterd only holds descriptors. It never maps or reads what a user has handed over, so no user can kill it with SIGBUS.
Closing the last descriptor of much memory takes time, and punching holes may wait for a process that writes there. So
only `kept` and `mark_obsolete` may run in an event loop. All methods may be called from any thread.
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
"""Seconds for which a prolog waits until memory is freed. Slurm gives a job up that has not started after
BatchStartTimeout (10 s by default)."""
MAX_GANG_NAME_CHARS = 128
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # fallocate(2)
_UNWRITABLE = fcntl.F_SEAL_WRITE | 0x10  # F_SEAL_FUTURE_WRITE
_NOTE_BYTES = 1 << 16
_FREE_THREADS = 8
"""Memfds that are freed at the same time, because a job waits for it."""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Memfds:
    """The descriptors of one gang: musterd's own note, and the memfds that the agent handed over."""

    name: str
    note_fd: int
    handed_fds: tuple[int, ...]

    def stored(self) -> Iterator[tuple[str, int]]:
        """Yield the name in systemd's store and the descriptor, for each."""
        for position, fd in enumerate((self.note_fd, *self.handed_fds)):
            yield f"{self.name}.{position}", fd


class KeptMemoryStore:
    """All memory that this node keeps.

    Args:
        store: keeps descriptors while musterd restarts.
        freed_s: seconds for which `job_starts` waits.
        punch: returns a memfd's pages to the system; runs in a thread.
    """

    def __init__(
        self, store: FdStore, freed_s: float = FREE_TIMEOUT_S, punch: Callable[[int], None] | None = None
    ) -> None:
        self._store = store
        self._freed_s = freed_s
        self._punch = punch or _punch
        self._lock = Lock()
        self._retention: Retention[Memfds] = Retention()
        self._obsolete: list[KeptEntry[Memfds]] = []
        self._freeing: set[Future[None]] = set()

    def recover(self, fds: Mapping[str, int], named: JobOwner | None) -> None:
        """Take over what an earlier musterd stored, if it belongs to the job that a prolog has `named` last. Close
        everything else, and whatever is incomplete."""
        with self._lock:
            self._retention.prolog_job = named
        found = []
        for name in sorted({name.rpartition(".")[0] for name in fds}):
            mine = {int(_position(full, name)): fd for full, fd in fds.items() if _position(full, name)}
            kept = _read_entry(name, mine)
            if kept is not None:
                found.append(kept)
                continue
            _log.warning("what systemd has stored as %s is incomplete: freed", name)
            for position, fd in mine.items():
                self._store.remove(f"{name}.{position}")
                os.close(fd)
        # If musterd ended while one entry replaced another, the newest entry counts.
        for kept in sorted(found, key=lambda kept: kept.until):
            _log.info("recovered the memory of gang %s of uid %d", kept.gang, kept.owner.uid)
            self.put_back(kept)

    def keep(self, uid: int, request: KeepMemory, fds: Sequence[int], now: float) -> str:
        """Keep the descriptors for a user's gang. The store owns them unless it refuses.

        Returns:
            The reason for a refusal; empty: they are kept.
        """
        owner = JobOwner(request.slurm_job_id, uid)
        if refused := self._why_refused(owner) or _why_invalid(request, fds):
            return refused
        kept = _make_entry(owner, request, fds, now + RETENTION_S)
        for name, fd in kept.memory.stored():
            self._store.put(name, fd)
        self.put_back(kept)
        _log.info("kept: %d memfds of gang %s, uid %d, job %d", len(fds), kept.gang, uid, owner.job)
        return ""

    def hand_out(self, uid: int, gang: str) -> KeptEntry[Memfds] | None:
        """Remove and return what this user's gang has deposited. The caller gives it back to the gang, then calls
        `release`; if that fails, `put_back`."""
        with self._lock:
            return self._retention.hand_out(uid, gang)

    def put_back(self, kept: KeptEntry[Memfds]) -> None:
        """Keep the entry, in place of an earlier one. Free it instead if another job has started meanwhile."""
        with self._lock:
            stranger = bool(self._retention.refusal(kept.owner))
            before = kept if stranger else self._retention.keep(kept)
        if before is not None and stranger:
            self._free(before)
        elif before is not None:
            self.release(before)

    def release(self, kept: KeptEntry[Memfds]) -> None:
        """Close the entry's descriptors: its owner has it, or nobody wants it. Memory that others hold is not freed."""
        for name, fd in kept.memory.stored():
            self._store.remove(name)
            os.close(fd)

    def job_starts(self, owner: JobOwner) -> int:
        """A job is about to start on this node: free the memory of any other job. The pages are free when this returns,
        even if other processes hold descriptors (some gigabytes a second).

        Returns:
            The number of gangs whose memory was freed: 0 or 1.

        Raises:
            TimeoutError: the memory is still being freed.
        """
        with self._lock:
            removed = self._retention.job_starts(owner)
            under_way = list(self._freeing)
        self._wait_until_freed([*under_way, *(self._free(removed) if removed is not None else ())])
        return int(removed is not None)

    def kept(self) -> list[tuple[str, int]]:
        """The gang whose memory is kept, with the gang's newest generation at that time."""
        with self._lock:
            kept = self._retention.kept
        return [(kept.gang, kept.generation)] if kept is not None else []

    def kept_bytes(self) -> int:
        """The size of the memory that is kept."""
        with self._lock:
            kept = self._retention.kept
            return sum(os.fstat(fd).st_blocks * 512 for fd in kept.memory.handed_fds) if kept is not None else 0

    def keeps(self, job: int) -> bool:
        """Whether memory of this Slurm job is kept."""
        with self._lock:
            return self._retention.kept is not None and self._retention.kept.owner.job == job

    def mark_obsolete(self, gang: str, generation: int) -> None:
        """The gang no longer wants what it deposited in this generation: the next `release_expired` closes it."""
        with self._lock:
            if (kept := self._retention.remove_obsolete(gang, generation)) is not None:
                self._obsolete.append(kept)

    def release_expired(self, now: float) -> None:
        """Release entries that are obsolete or have been kept long enough."""
        with self._lock:
            removed, self._obsolete = self._obsolete, []
            if (kept := self._retention.remove_expired(now)) is not None:
                removed.append(kept)
        for kept in removed:
            self.release(kept)
            _log.info("released: the memory of gang %s, uid %d, job %d", kept.gang, kept.owner.uid, kept.owner.job)

    def close(self) -> None:
        """Close all descriptors. systemd keeps what it has stored."""
        with self._lock:
            held = [*self._obsolete, *([self._retention.kept] if self._retention.kept is not None else [])]
            self._retention, self._obsolete = Retention(), []
        for kept in held:
            for _, fd in kept.memory.stored():
                os.close(fd)

    def _why_refused(self, owner: JobOwner) -> str:
        with self._lock:
            return self._retention.refusal(owner)

    def _free(self, removed: KeptEntry[Memfds]) -> list[Future[None]]:
        """Start to return memory to the system."""
        _log.info("freed: the memory of gang %s, uid %d, job %d", removed.gang, removed.owner.uid, removed.owner.job)
        for name, _ in removed.memory.stored():
            self._store.remove(name)
        os.close(removed.memory.note_fd)
        # Use new threads: older ones may wait for ever for a process that writes to its memory.
        threads = ThreadPoolExecutor(_FREE_THREADS, "free")
        started = [threads.submit(self._free_memfd, fd) for fd in removed.memory.handed_fds]
        threads.shutdown(wait=False)
        with self._lock:
            self._freeing.update(started)
        return started

    def _free_memfd(self, fd: int) -> None:
        self._punch(fd)
        os.close(fd)

    def _wait_until_freed(self, started: Sequence[Future[None]]) -> None:
        """Raises TimeoutError: not everything is freed in time. Nobody waits for the rest again."""
        done, unfinished = wait(started, self._freed_s)
        with self._lock:
            self._freeing -= done | unfinished
        if unfinished:
            _log.error("%d memfds are still being freed after %.0f s", len(unfinished), self._freed_s)
            raise TimeoutError(f"{len(unfinished)} memfds are still being freed after {self._freed_s:.0f} s")


def _punch(fd: int) -> None:
    size = ctypes.c_int64(os.fstat(fd).st_size)
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), size):
        # The memfd of descriptions is sealed against writing: its memory is freed with its last descriptor.
        _log.debug("a memfd's pages can't be freed: %s", os.strerror(ctypes.get_errno()))


def _why_invalid(request: KeepMemory, fds: Sequence[int]) -> str:
    """Why this request can't be kept; empty: it can."""
    gang = request.gang_id
    if not gang or not gang.isprintable() or len(gang) > MAX_GANG_NAME_CHARS:
        return f"the gang's name must have 1 to {MAX_GANG_NAME_CHARS} printable characters"
    if not 2 <= len(fds) <= MAX_FDS:
        return f"{len(fds)} descriptors: expected one with the descriptions, and 1 to {MAX_FDS - 1} others"
    if not all(_seals(fd) & MEMFD_SEALS == MEMFD_SEALS for fd in fds):
        return "every descriptor must be a memfd that is sealed against growing, shrinking and further seals"
    if not all(_is_writable(fd) for fd in fds[1:]):
        return "memfds must be writable: otherwise their pages can't be freed"
    return ""


def _seals(fd: int) -> int:
    """A memfd's seals; 0 for anything else."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0


def _is_writable(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR and not _seals(fd) & _UNWRITABLE


def _make_entry(owner: JobOwner, request: KeepMemory, fds: Sequence[int], until: float) -> KeptEntry[Memfds]:
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


def _position(full: str, name: str) -> str:
    """ "3" for kept-….3 if the entry's name is `name`; else empty."""
    head, _, position = full.rpartition(".")
    return position if head == name and position.isdecimal() else ""


def _read_entry(name: str, fds: Mapping[int, int]) -> KeptEntry[Memfds] | None:
    """Build an entry from its note and descriptors; None if something is missing."""
    if 0 not in fds:
        return None
    try:
        note = json_format.Parse(os.pread(fds[0], _NOTE_BYTES, 0), KeptMemory())
    except (OSError, json_format.ParseError):
        return None
    handed = range(1, note.memfds + 1)
    if not all(position in fds for position in handed):
        return None
    memory = Memfds(name, fds[0], tuple(fds[position] for position in handed))
    return KeptEntry(JobOwner(note.slurm_job_id, note.uid), note.gang_id, note.until_s, memory, note.generation)
