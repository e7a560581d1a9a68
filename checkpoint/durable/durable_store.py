"""What a flush, its retention and a restore need of the place where durable checkpoints are.

A store holds folders, each of them one checkpoint, and folders hold files. All names are relative to the store. What
differs between a POSIX file system and a store of objects stands behind these methods:

- A *working* folder is one that a flush writes. `is_open` says whether it still is one.
- `complete` makes the working folder a checkpoint. In a file system this is a rename. Objects can't be renamed without
  being copied, so there the working folder has its final name from the start, and the flush writes its metadata last:
  without the metadata, and without each file in the size that the manifest names, it is no checkpoint.
- `retire` takes that away from a checkpoint before its files are removed, so that what is left after a crash is no
  checkpoint.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from muster.checkpoint.durable.verified_file import ReadableFile
from muster.checkpoint.format.durable_folders import ParsedFolderName
from muster.checkpoint.format.versions import Version


@dataclass(frozen=True)
class Entry:
    """A name in a folder. `is_plain`: it is a file, no link, folder or device. `size`: in bytes."""

    name: str
    size: int
    is_plain: bool


@dataclass(frozen=True)
class FoundFolder:
    """A folder with the name of a checkpoint.

    `label`: what the name says. `completed_ns`: when its metadata was written, in ns since 1970; None: it is not
    complete. `uid`: its owner; None: the store knows no owners. `may_be_renamed`: others can have given it its name.
    """

    name: str
    label: ParsedFolderName
    completed_ns: int | None
    uid: int | None
    may_be_renamed: bool


def all_gangs(gang: str) -> bool:
    """Asks for the checkpoints of every gang."""
    return True


class DurableFile(Protocol):
    """A file that is being written, from one thread. Exactly one of `finish` and `abandon` ends it."""

    def write(self, data: memoryview) -> None:
        """Write further bytes. When this returns, all but a bounded number of bytes have left this process.

        Raises:
            OSError: these or earlier bytes can't be written.
        """

    def finish(self) -> None:
        """Return once all bytes are durable. In a store of objects the file is visible from now on, not before.

        Raises:
            OSError: some bytes can't be written.
        """

    def abandon(self) -> None:
        """Write nothing more. What is left of the file counts for nothing, and `DurableStore.remove` removes it."""


class DurableStore(Protocol):
    """A place for durable checkpoints. Every method may block, and raises OSError if the place fails."""

    @property
    def where(self) -> str:
        """The place as the user names it: a path or a URL."""

    @property
    def poll_s(self) -> float:
        """Seconds between two looks at the names of a folder while others write there."""

    def prepare(self) -> None:
        """Make the place, if it is not there and can be made."""

    def names(self, folder: str = "") -> Collection[str]:
        """The names directly in a folder; empty: in the store. Raises FileNotFoundError where folders can be absent."""

    def entries(self, folder: str = "") -> Sequence[Entry]:
        """The same with what is known of each, which costs a parallel file system more."""

    def folders(self, is_asked: Callable[[str], bool] = all_gangs) -> Iterator[FoundFolder]:
        """The folders with the name of a checkpoint of a gang that is asked for. Others are not looked at.

        Args:
            is_asked: says it of the gang that the name names; empty: it names none.
        """

    def make_folder(self, name: str) -> None:
        """Make a folder, or find the one that another process of this user has made.

        Raises:
            FileExistsError: another user has taken the name.
        """

    def create(self, name: str) -> DurableFile:
        """Begin a file."""

    def write(self, name: str, data: bytes) -> None:
        """Write a small file that has its name only once its bytes are durable."""

    def read(self, name: str, most_bytes: int) -> bytes:
        """The bytes of a small file.

        Raises:
            OSError: it is absent, no plain file, or has more bytes than that.
        """

    def open(self, name: str) -> ReadableFile:
        """Open a file for reading."""

    def remove(self, *names: str) -> None:
        """Remove files, and what `write` leaves of them when it fails. Absent ones are no error."""

    def remove_folder(self, name: str) -> None:
        """Remove a folder with all that a flush has written there, as far as possible. Raises nothing."""

    def remove_empty_folder(self, name: str) -> None:
        """Remove a folder. Raises OSError if it is not empty and folders are more than names."""

    def final_name(self, version: Version, gang: str, serial: int) -> str:
        """The name of the checkpoint that flush `serial` of a gang writes."""

    def working_name(self, version: Version, gang: str, serial: int) -> str:
        """The name of its folder while it is written."""

    def parse_leftover(self, name: str) -> tuple[ParsedFolderName, int] | None:
        """What the name of a working folder says, and the number of its flush; None: it is no working folder."""

    def is_open(self, working: str, final: str) -> bool:
        """Whether the working folder is there, and is no checkpoint yet."""

    def complete(self, working: str, final: str) -> None:
        """Make the working folder, whose metadata was written last, the checkpoint `final`.

        Raises:
            FileExistsError: there is a folder of that name already.
        """

    def retire(self, name: str, working: str) -> str:
        """Make a checkpoint none, without removing its files; returns the folder that has them now."""
