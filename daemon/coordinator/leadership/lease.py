"""The lease: which of two coordinators that share a state folder may act.

Two coordinators share one folder, as slurmctld and its backup do. The holder rewrites the lease file every second. The
standby polls the file. It acquires the next term once the file has not changed for `takeover_s` of its own clock. The
holder counts from the moment *before* its last renewal. After `expiry_s`, which is shorter, a kernel timer kills the
holder: a holder that was suspended dies before it executes another instruction. So two coordinators never act at the
same time, whatever their clocks show, as long as both clocks run at about the same speed.

Files in the folder:
    lease     "TERM RENEWALS HOLDER": one line, rewritten in place and synced. Each open of the file shows
              what another machine has synced (close-to-open consistency); a directory listing may be stale.
    term-N    created by the coordinator that acquires term N. Creation succeeds once only, so it decides between two
              coordinators that try at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from muster.daemon.coordinator.journal.per_term_journal import newest_term
from muster.daemon.coordinator.leadership.lease_holder import LeaseHolder
from muster.daemon.host import clock

LEASE_FILE = "lease"
_RECORD_BYTES = 512
_RELEASED = "-"


class LeaseLost(Exception):
    """Another coordinator has the lease, or may have it: this process must do nothing more. Says why."""


class LeaseError(Exception):
    """The site's fault: the folder can't be used."""


@dataclass(frozen=True, slots=True)
class LeaseTimeouts:
    """Seconds. `takeover_s` exceeds `expiry_s`: two clocks may differ in speed, and a call to Slurm may still run."""

    renew_interval_s: float = 1.0
    expiry_s: float = 5.0
    """A lease that was not renewed for this long has expired."""
    takeover_s: float = 8.0
    """A standby acquires a lease whose file has not changed for this long."""
    poll_interval_s: float = 0.25
    loop_stalled_s: float = 10.0
    """A coordinator whose event loop has not run for this long gives up its lease."""


class LeaseRecord(NamedTuple):
    """What the lease file says. `holder` is "-" once the lease was released; term 0: no process ever held it."""

    term: int
    renewals: int
    holder: str


class Lease:
    """The lease in `folder`, as one process sees it. Its methods read and write files there and may block.

    Args:
        process: the identity of this process.
        arm: sets the kernel timer that kills this process to so many seconds; 0: never.
        now: a clock in seconds that also runs while the machine sleeps.
    """

    def __init__(
        self,
        folder: Path,
        process: LeaseHolder,
        arm: Callable[[float], None],
        timeouts: LeaseTimeouts = LeaseTimeouts(),  # frozen
        now: Callable[[], float] = clock.boottime,
    ) -> None:
        self.term = 0
        """The term that this process holds; 0: none."""
        self.timeouts = timeouts
        self._folder, self._file = folder, folder / LEASE_FILE
        self._process, self._arm, self._now = process, arm, now
        self._seen: tuple[LeaseRecord, int] | None = None
        """What the last poll found: the record and the newest term file."""
        self._seen_at = 0.0
        """When a poll first found `_seen`."""
        self._renewals = 0
        self._renewed_at = 0.0

    def try_acquire(self) -> bool:
        """Poll the folder once. True: this process holds the lease now, under `term`.

        Raises:
            LeaseError: the folder can't be read or written.
        """
        try:
            return self._try_acquire()
        except OSError as error:
            raise LeaseError(f"can't keep a lease in {self._folder}: {error}") from error

    def renew(self) -> None:
        """Renew the lease.

        Raises:
            LeaseLost: another coordinator has the lease, or may have it; or the renewal can't be written.
        """
        began = self._now()
        self.check()
        self._renewals += 1
        try:
            self._write(LeaseRecord(self.term, self._renewals, str(self._process)))
        except OSError as error:
            raise LeaseLost(f"the lease can't be renewed: {error}") from error
        self._renewed_at = began
        self._arm(self.remaining_s())

    def check(self) -> None:
        """Verify that this process holds the lease. Call it before anything that only the holder may do.

        Raises:
            LeaseLost: this process does not hold the lease any more, or the lease has expired.
        """
        if self.remaining_s() <= 0:
            raise LeaseLost(f"the lease was last renewed {self._now() - self._renewed_at:.1f} s ago and has expired")
        try:
            found = self._read()
            newest = found.term if found.term >= self.term else max(self._terms(), default=0)
        except OSError as error:
            raise LeaseLost(f"the lease can't be read: {error}") from error
        if found.term < self.term and newest <= self.term:
            return  # A late write of an older term's holder. No coordinator follows it; the next renewal overwrites it.
        if (found.term, found.holder) != (self.term, str(self._process)):
            raise LeaseLost(f"another coordinator has the lease under term {newest} (ours was {self.term})")

    def remaining_s(self) -> float:
        """Seconds until the lease expires, unless it is renewed."""
        return self._renewed_at + self.timeouts.expiry_s - self._now()

    def release(self) -> None:
        """Release the lease, so that the standby need not wait. This process does nothing more under the lease."""
        with suppress(LeaseLost, OSError):
            self.check()
            self._write(LeaseRecord(self.term, self._renewals, _RELEASED))
        self.term = 0
        self._arm(0)

    def describe_holder(self) -> str:
        """The holder that the last poll found, in words."""
        if self._seen is None:
            return "nobody"
        record = self._seen[0]
        return f"{record.holder.partition('|')[0] or 'nobody'} (term {record.term})"

    def _try_acquire(self) -> bool:
        now = self._now()
        seen = (self._read(), max(self._terms(), default=0))
        if seen != self._seen:
            # The takeover time runs from when the change was seen. The read may have blocked since the poll began.
            self._seen, self._seen_at = seen, self._now()
        record, newest = seen
        if newest <= record.term and self._is_free(record):
            return self._claim(record.term, record)
        # A coordinator that created a term file and has not written the lease yet is given the same time.
        if now - self._seen_at >= self.timeouts.takeover_s:
            return self._claim(max(record.term, newest), record)
        return False

    def _is_free(self, record: LeaseRecord) -> bool:
        if record.term == 0 or record.holder == _RELEASED:
            return True
        holder = LeaseHolder.parse(record.holder)
        return holder is not None and holder.has_ended(self._process)

    def _claim(self, above: int, expected: LeaseRecord) -> bool:
        """Acquire a term above `above`, unless the lease file no longer says `expected`."""
        began = self._now()
        self._arm(self.timeouts.expiry_s)  # a process that is suspended during the claim must not write late
        # The new term is above the journals' terms, too: the folder may have been restored with its journals alone.
        term = max(above, newest_term(self._folder)) + 1
        term_file = self._term_file(term)
        try:
            os.close(os.open(term_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            self._arm(0)
            return False
        # The earlier holder may have renewed after all, or the listing may have been stale and the terms further on.
        # A process that has just created a file in the folder sees the folder's current state.
        if self._read() != expected or max(self._terms()) != term:
            term_file.unlink(missing_ok=True)  # else the next coordinator that polls would wait for this process
            self._arm(0)
            return False
        self.term, self._renewals, self._renewed_at = term, 0, began
        self._write(LeaseRecord(term, 0, str(self._process)))
        self._arm(self.remaining_s())
        for older in self._terms():
            if older < term:
                self._term_file(older).unlink(missing_ok=True)
        return True

    def _term_file(self, term: int) -> Path:
        return self._folder / f"term-{term}"

    def _terms(self) -> list[int]:
        names = (path.name.removeprefix("term-") for path in self._folder.glob("term-*"))
        return [int(name) for name in names if name.isdigit()]

    def _read(self) -> LeaseRecord:
        try:
            handle = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return LeaseRecord(0, 0, _RELEASED)
        try:
            words = os.pread(handle, _RECORD_BYTES, 0).decode(errors="replace").replace("\0", " ").split()
        finally:
            os.close(handle)
        if not words:  # created and never written (full disk, power cut); the term files tell whether somebody claims
            return LeaseRecord(0, 0, _RELEASED)
        if len(words) != 3 or not (words[0].isdigit() and words[1].isdigit()):
            raise OSError(f"{self._file} is damaged: it should be TERM RENEWALS HOLDER")
        return LeaseRecord(int(words[0]), int(words[1]), words[2])

    def _write(self, record: LeaseRecord) -> None:
        # All records have one length, so a reader sees one whole record.
        line = f"{record.term} {record.renewals} {record.holder}".ljust(_RECORD_BYTES - 1) + "\n"
        handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(handle, line.encode(), 0)
            os.fsync(handle)
        finally:
            os.close(handle)
