"""A durable store at which a process dies: at its n-th operation nothing happens, and nothing ever after.

This is what `kill -9` leaves: a file that was begun has some of its bytes or none, and no handler of an error removes
anything.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from threading import Lock
from typing import TypeVar

from muster.checkpoint.durable.durable_store import DurableFile, DurableStore, Entry, FoundFolder, all_gangs
from muster.checkpoint.durable.verified_file import ReadableFile
from muster.checkpoint.format.durable_folders import ParsedFolderName
from muster.checkpoint.format.versions import Version

_T = TypeVar("_T")


class Killed(BaseException):
    """The process is dead. No `except Exception` of it runs."""


class CrashingStore:
    """A `DurableStore` that works for `operations` operations of one process; names that it computes count for none.

    `labels`: what was done, one word each. `torn`: the operation at which the process dies is half done, if it can be.
    """

    def __init__(self, store: DurableStore, operations: int, *, torn: bool = False) -> None:
        self._store = store
        self._left = operations
        self._torn = torn
        self._lock = Lock()
        self.labels: list[str] = []

    @property
    def where(self) -> str:
        """As the store says."""
        return self._store.where

    @property
    def poll_s(self) -> float:
        """Short: others look often."""
        return 0.001

    @property
    def is_dead(self) -> bool:
        """Whether the process was killed."""
        return self._left < 0

    def prepare(self) -> None:
        """An operation."""
        self.do("prepare", self._store.prepare)

    def names(self, folder: str = "") -> Collection[str]:
        """Reads change nothing; a dead process does not read."""
        return self._alive(lambda: self._store.names(folder))

    def entries(self, folder: str = "") -> Sequence[Entry]:
        """A read."""
        return self._alive(lambda: self._store.entries(folder))

    def folders(self, is_asked: Callable[[str], bool] = all_gangs) -> Iterator[FoundFolder]:
        """A read."""
        return self._alive(lambda: self._store.folders(is_asked))

    def make_folder(self, name: str) -> None:
        """An operation."""
        self.do("make_folder", lambda: self._store.make_folder(name))

    def create(self, name: str) -> DurableFile:
        """An operation."""
        return self.do("create", lambda: _CrashingFile(self, self._store.create(name)))

    def write(self, name: str, data: bytes) -> None:
        """An operation."""
        self.do("write", lambda: self._store.write(name, data))

    def read(self, name: str, most_bytes: int) -> bytes:
        """A read."""
        return self._alive(lambda: self._store.read(name, most_bytes))

    def open(self, name: str) -> ReadableFile:
        """A read."""
        return self._alive(lambda: self._store.open(name))

    def remove(self, *names: str) -> None:
        """An operation for each name."""
        for name in names:
            self.do("remove", lambda name=name: self._store.remove(name))  # type: ignore[misc]

    def remove_folder(self, name: str) -> None:
        """An operation. Torn, one of the files is removed."""

        def half() -> None:
            for file in sorted(self._store.names(name))[:1]:
                self._store.remove(f"{name}/{file}")

        self.do("remove_folder", lambda: self._store.remove_folder(name), half)

    def remove_empty_folder(self, name: str) -> None:
        """An operation."""
        self.do("remove_empty_folder", lambda: self._store.remove_empty_folder(name))

    def final_name(self, version: Version, gang: str, serial: int) -> str:
        """No operation."""
        return self._store.final_name(version, gang, serial)

    def working_name(self, version: Version, gang: str, serial: int) -> str:
        """No operation."""
        return self._store.working_name(version, gang, serial)

    def parse_leftover(self, name: str) -> tuple[ParsedFolderName, int] | None:
        """No operation."""
        return self._store.parse_leftover(name)

    def is_open(self, working: str, final: str) -> bool:
        """A read."""
        return self._alive(lambda: self._store.is_open(working, final))

    def complete(self, working: str, final: str) -> None:
        """An operation."""
        self.do("complete", lambda: self._store.complete(working, final))

    def retire(self, name: str, working: str) -> str:
        """An operation."""
        return self.do("retire", lambda: self._store.retire(name, working))

    def do(self, label: str, work: Callable[[], _T], half: Callable[[], None] | None = None) -> _T:
        """Do one operation, or die."""
        with self._lock:
            self._left -= 1
            left = self._left
            self.labels.append(label)
        if left < 0:
            if left == -1 and self._torn and half is not None:
                half()
            raise Killed
        return work()

    def _alive(self, work: Callable[[], _T]) -> _T:
        if self.is_dead:
            raise Killed
        return work()


class _CrashingFile:
    def __init__(self, process: CrashingStore, file: DurableFile) -> None:
        self._process, self._file = process, file

    def write(self, data: memoryview) -> None:
        half = data[: len(data) // 2]
        self._process.do("write_part", lambda: self._file.write(data), lambda: self._file.write(half))

    def finish(self) -> None:
        self._process.do("finish", self._file.finish)

    def abandon(self) -> None:
        # The kernel closes the files of a dead process. What it had begun to upload is joined by nobody.
        self._file.abandon()
