"""The lease: which of two coordinators that share a state folder may act.

As slurmctld's own backup does, both live off one folder. Whoever holds the lease rewrites its file every second; who
stands by looks on, and takes the next term once the file has not changed for `takeover_s` of its own clock. The holder
counts from the moment *before* its last rewriting: after `lapse_s`, which is shorter, the kernel kills it (a timer
whose signal ends the process, so that one that stood still dies before it does anything else). So two never act at
once, whatever their clocks say, as long as both run at about one speed.

In the folder:
    lease     "TERM BEAT HOLDER": one line, rewritten in place and synced. Opening a file anew shows what another
              machine has synced (close-to-open), where a look at a folder may be old.
    term-N    made by whoever takes term N; that making it can only succeed once decides between two who try.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from muster.daemon.coordinator.journal.per_term_journal import newest_term
from muster.daemon.coordinator.leadership.lease_holder import Incumbent
from muster.daemon.host import clock

FILE = "lease"
_BYTES = 512
_RELEASED = "-"


class LeaseLost(Exception):
    """Another coordinator has the lease, or may have it by now: nothing may be done any more. Says why."""


class LeaseError(Exception):
    """The site's fault: the folder can't be used."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. `takeover_s` exceeds `lapse_s` by what clocks may differ, and a call to Slurm may still take."""

    renew_s: float = 1.0
    lapse_s: float = 5.0
    takeover_s: float = 8.0
    look_s: float = 0.25
    stuck_s: float = 10.0
    """An event loop that has stood still for so long keeps no lease."""


class Entry(NamedTuple):
    """What the file says. `holder` is "-" once the lease was given back; term 0: nobody ever had it."""

    term: int
    beat: int
    holder: str


class Lease:
    """The lease in `folder`, as one process sees it. Its methods read and write there: they may take as long as that.

    Args:
        me: who takes it.
        arm: has this process killed in so many seconds, instead of when it was to be before; 0: never.
        now: a clock that goes on while the machine sleeps; seconds.
    """

    def __init__(
        self,
        folder: Path,
        me: Incumbent,
        arm: Callable[[float], None],
        patience: Patience = Patience(),  # frozen
        now: Callable[[], float] = clock.boottime,
    ) -> None:
        self.term = 0
        """The term that is held; 0: none."""
        self.patience = patience
        self._folder, self._file = folder, folder / FILE
        self._me, self._arm, self._now = me, arm, now
        self._seen: tuple[Entry, int] | None = None
        self._seen_at = 0.0
        self._beat = 0
        self._renewed_at = 0.0

    def try_take(self) -> bool:
        """Look once; True: the lease is ours now, and `term` says under which term.

        Raises:
            LeaseError: the folder can't be read or written.
        """
        try:
            return self._try_take()
        except OSError as error:
            raise LeaseError(f"can't keep a lease in {self._folder}: {error}") from error

    def renew(self) -> None:
        """Keep the lease.

        Raises:
            LeaseLost: it is another's by now, or may be; or the folder does not take the renewal.
        """
        began = self._now()
        self.check()
        self._beat += 1
        try:
            self._write(Entry(self.term, self._beat, str(self._me)))
        except OSError as error:
            raise LeaseLost(f"the lease can't be renewed: {error}") from error
        self._renewed_at = began
        self._arm(self.left())

    def check(self) -> None:
        """Before something is done that only the holder may do.

        Raises:
            LeaseLost: it is not ours any more, or about to lapse.
        """
        if self.left() <= 0:
            raise LeaseLost(f"the lease was last renewed {self._now() - self._renewed_at:.1f} s ago, and has lapsed")
        try:
            found = self._read()
            newest = found.term if found.term >= self.term else max(self._terms(), default=0)
        except OSError as error:
            raise LeaseLost(f"the lease can't be read: {error}") from error
        if found.term < self.term and newest <= self.term:
            return  # A machine's late write under an older term, which nobody follows: the next renewal goes over it.
        if (found.term, found.holder) != (self.term, str(self._me)):
            raise LeaseLost(f"the lease has passed on with term {newest} (ours was {self.term})")

    def left(self) -> float:
        """Seconds until the lease lapses, unless it is renewed."""
        return self._renewed_at + self.patience.lapse_s - self._now()

    def release(self) -> None:
        """Give the lease back, so that who stands by need not wait; nothing is done under it any more."""
        with suppress(LeaseLost, OSError):
            self.check()
            self._write(Entry(self.term, self._beat, _RELEASED))
        self.term = 0
        self._arm(0)

    def holder(self) -> str:
        """Who had it at the last look, in words."""
        if self._seen is None:
            return "nobody"
        entry = self._seen[0]
        return f"{entry.holder.partition('|')[0] or 'nobody'} (term {entry.term})"

    def _try_take(self) -> bool:
        now = self._now()
        seen = (self._read(), max(self._terms(), default=0))
        if seen != self._seen:
            # Its time runs from when it was seen, which may be long after the look began: the folder may hang.
            self._seen, self._seen_at = seen, self._now()
        entry, newest = seen
        if newest <= entry.term and self._is_free(entry):
            return self._claim(entry.term, entry)
        # Somebody who has made a term's file, and not written the lease yet, is given the same time.
        if now - self._seen_at >= self.patience.takeover_s:
            return self._claim(max(entry.term, newest), entry)
        return False

    def _is_free(self, entry: Entry) -> bool:
        if entry.term == 0 or entry.holder == _RELEASED:
            return True
        before = Incumbent.parse(entry.holder)
        return before is not None and before.has_ended(self._me)

    def _claim(self, above: int, before: Entry) -> bool:
        began = self._now()
        self._arm(self.patience.lapse_s)  # whoever stands still on the way writes nothing late
        # Above the journals' terms, too: a folder of which only they were brought back begins no term anew.
        term = max(above, newest_term(self._folder)) + 1
        mark = self._mark(term)
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            self._arm(0)
            return False
        # Who had it goes on after all; or what was seen of the folder was old, and it is further: what has just made a
        # file there sees it as it is.
        if self._read() != before or max(self._terms()) != term:
            mark.unlink(missing_ok=True)  # else whoever comes next would wait for us
            self._arm(0)
            return False
        self.term, self._beat, self._renewed_at = term, 0, began
        self._write(Entry(term, 0, str(self._me)))
        self._arm(self.left())
        for older in self._terms():
            if older < term:
                self._mark(older).unlink(missing_ok=True)
        return True

    def _mark(self, term: int) -> Path:
        return self._folder / f"term-{term}"

    def _terms(self) -> list[int]:
        names = (path.name.removeprefix("term-") for path in self._folder.glob("term-*"))
        return [int(name) for name in names if name.isdigit()]

    def _read(self) -> Entry:
        try:
            handle = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return Entry(0, 0, _RELEASED)
        try:
            words = os.pread(handle, _BYTES, 0).decode(errors="replace").replace("\0", " ").split()
        finally:
            os.close(handle)
        if not words:  # made, and never written: a full disk, a power cut; the terms' files tell who was on the way
            return Entry(0, 0, _RELEASED)
        if len(words) != 3 or not (words[0].isdigit() and words[1].isdigit()):
            raise OSError(f"{self._file} is damaged: it should be TERM BEAT HOLDER")
        return Entry(int(words[0]), int(words[1]), words[2])

    def _write(self, entry: Entry) -> None:
        # One length for all entries: a reader sees one of them, whole.
        line = f"{entry.term} {entry.beat} {entry.holder}".ljust(_BYTES - 1) + "\n"
        handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(handle, line.encode(), 0)
            os.fsync(handle)
        finally:
            os.close(handle)
