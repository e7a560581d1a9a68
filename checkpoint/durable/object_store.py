"""Durable checkpoints as objects of a store that fsspec reaches, such as S3.

An object is visible once it is uploaded as a whole, and not before. Objects can't be renamed without being copied, so
each flush writes objects under a prefix of its own, `step_00000123_g4_GANG.flush7/`. This is a checkpoint once
`.metadata` is there, which the flush writes last, and as long as each file is there that the manifest names, in the
size that it names. So neither an interrupted upload nor an interrupted removal is taken for one, nor a `.metadata` that
arrives late on behalf of a flush that was given up.

fsspec and the package for the store are imported only here. Credentials and endpoints come from where these packages
look for them: the environment, and files in the home folder, of the job's user.
"""

from __future__ import annotations

import errno
import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from muster.checkpoint.durable.durable_store import Entry, FoundFolder, all_gangs
from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.block_digests import BLOCK_BYTES
from muster.checkpoint.format.durable_folders import ParsedFolderName
from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.format.versions import Version

PART_BYTES = 32 << 20
"""Size of the parts in which a file is uploaded. S3 takes 10,000 parts: 335 GB for a rank."""

UPLOAD_BYTES = 3 * PART_BYTES
"""Memory of one upload: the part that is filled, the part that is sent, and a copy of it in the HTTP client."""


class PackageMissing(CheckpointError):
    """No package for this kind of store is installed here."""


class ObjectStore:
    """A `DurableStore` below a URL of fsspec, such as s3://bucket/prefix.

    Raises:
        PackageMissing: a package for such a store is not installed.
        CheckpointError: the URL is wrong.
    """

    poll_s = 0.5  # each look is a request, of every node, that the site may pay for

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._files, self._root = _open(url)

    @property
    def where(self) -> str:
        """The URL."""
        return self._url

    @property
    def files(self) -> Any:
        """The file system of fsspec."""
        return self._files

    def path(self, name: str) -> str:
        """The path of a name as fsspec's file system takes it."""
        return f"{self._root}/{name}" if name else self._root

    def prepare(self) -> None:
        """A bucket is not made: its owner and its place are for the site to choose."""

    def names(self, folder: str = "") -> list[str]:
        """The names below a prefix; none if there is no such prefix."""
        return [entry.name for entry in self.entries(folder)]

    def entries(self, folder: str = "") -> list[Entry]:
        """The same with their sizes, which come at no cost."""
        return [
            Entry(found["name"].rstrip("/").rpartition("/")[2], int(found.get("size") or 0), found["type"] == "file")
            for found in self._list(folder)
        ]

    def folders(self, is_asked: Callable[[str], bool] = all_gangs) -> Iterator[FoundFolder]:
        """The prefixes with the name of a checkpoint."""
        for entry in self.entries():
            label = None if entry.is_plain else durable_folders.parse_folder_name(entry.name)
            if label is not None and is_asked(label.gang):
                yield FoundFolder(entry.name, label, self._completed_ns(entry.name), None, may_be_renamed=False)

    def make_folder(self, name: str) -> None:
        """A prefix needs not be made."""

    def create(self, name: str) -> ObjectFile:
        """Begin an upload."""
        with self.errors(name, writes=True):
            file = self._files.open(self.path(name), "wb", block_size=PART_BYTES, autocommit=False)
        return ObjectFile(self, name, file)

    def write(self, name: str, data: bytes) -> None:
        """Upload a small object."""
        with self.errors(name, writes=True):
            self._files.pipe_file(self.path(name), data)

    def read(self, name: str, most_bytes: int) -> bytes:
        """Read a small object."""
        with self.errors(name):
            data: bytes = self._files.cat_file(self.path(name), start=0, end=most_bytes + 1)
        if len(data) > most_bytes:
            raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", self._name(name))
        return data

    def open(self, name: str) -> ReadableObject:
        """Open an object."""
        with self.errors(name):
            return ReadableObject(self, name, int(self._files.size(self.path(name))))

    def remove(self, *names: str) -> None:
        """Remove objects."""
        for name in names:
            with self.errors(name), suppress(FileNotFoundError):
                self._files.rm_file(self.path(name))

    def remove_folder(self, name: str) -> None:
        """Remove all objects below a prefix, the metadata first."""
        with suppress(OSError):
            self.remove(f"{name}/{durable_folders.METADATA}")
            self.remove(*(f"{name}/{file}" for file in self.names(name)))

    def remove_empty_folder(self, name: str) -> None:
        """A prefix without objects is none."""

    def final_name(self, version: Version, gang: str, serial: int) -> str:
        """Each flush has a prefix of its own: two of one version do not write, nor remove, each other's objects."""
        return durable_folders.folder_name(version, gang, serial)

    def working_name(self, version: Version, gang: str, serial: int) -> str:
        """The final name."""
        return self.final_name(version, gang, serial)

    def parse_leftover(self, name: str) -> tuple[ParsedFolderName, int] | None:
        """Read a final name: without metadata it is a leftover."""
        label = durable_folders.parse_folder_name(name)
        return (label, label.serial) if label is not None and label.serial else None

    def is_open(self, working: str, final: str) -> bool:
        """The prefix is no checkpoint."""
        return self._completed_ns(final) is None

    def complete(self, working: str, final: str) -> None:
        """The metadata has made it one."""

    def retire(self, name: str, working: str) -> str:
        """Remove the metadata. The prefix stays what it is."""
        self.remove(f"{name}/{durable_folders.METADATA}")
        return name

    def check(self) -> None:
        """Write an object, look for it as a restore looks for checkpoints, and remove it again.

        Raises:
            OSError: the bucket is missing, may not be written to or listed, or can't be reached.
        """
        name = f".muster-check-{id(self):x}"
        self.write(name, b"")
        try:
            self.names()
        finally:
            self.remove(name)

    @staticmethod
    def is_absent(error: OSError) -> bool:
        """Whether an error of `check` says that there is no such bucket."""
        return error.errno == errno.ENXIO

    def _list(self, folder: str) -> list[dict[str, Any]]:
        with self.errors(folder):
            try:
                found = self._files.ls(self.path(folder), detail=True, refresh=True)
            except FileNotFoundError:
                return []
        own = self.path(folder).rstrip("/")
        return [one for one in found if one["name"].rstrip("/") != own]

    def _completed_ns(self, folder: str) -> int | None:
        found = {one["name"].rpartition("/")[2]: one for one in self._list(folder) if one["type"] == "file"}
        metadata = found.get(durable_folders.METADATA)
        if metadata is None:
            return None
        manifest = self._manifest(folder)
        files = manifest.get("ranks")
        if not isinstance(files, dict):
            return None
        if manifest.get("metadata_bytes", metadata.get("size")) != metadata.get("size"):
            return None  # some stores, as sftp and smb, show a file before it is whole
        for note in files.values():
            name = note.get("file") if isinstance(note, dict) else ""
            if name is not None and (name not in found or found[name].get("size") != note.get("file_bytes")):
                return None
        return _modified_ns(metadata)

    def _manifest(self, folder: str) -> dict[str, Any]:
        try:
            manifest = json.loads(
                self.read(f"{folder}/{durable_folders.MANIFEST}", durable_folders.MOST_MANIFEST_BYTES)
            )
        except (FileNotFoundError, ValueError):
            return {}
        return manifest if isinstance(manifest, dict) else {}

    def _name(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url

    @contextmanager
    def errors(self, name: str, *, writes: bool = False) -> Iterator[None]:
        """Give every error of the packages the form that the rest of Muster knows."""
        try:
            yield
        except FileNotFoundError as error:
            if writes:  # a prefix needs not be there, a bucket does
                raise OSError(errno.ENXIO, f"there is no such bucket: {_words(error)}", self._name(name)) from error
            raise
        except OSError as error:
            if error.filename is None:  # errors of storage have a number; those of fsspec often have none
                kind = type(error) if isinstance(error, FileNotFoundError | PermissionError) else OSError
                raise kind(error.errno or errno.EIO, _words(error), self._name(name)) from error
            raise
        except Exception as error:
            raise OSError(errno.EIO, _words(error), self._name(name)) from error


class ObjectFile:
    """An upload in parts."""

    def __init__(self, store: ObjectStore, name: str, file: Any) -> None:
        self._store, self._name, self._file = store, name, file

    def write(self, data: memoryview) -> None:
        """Upload full parts."""
        with self._store.errors(self._name, writes=True):
            self._file.write(data)

    def finish(self) -> None:
        """Upload the last part, then have the store join all of them."""
        try:
            with self._store.errors(self._name, writes=True):
                self._file.close()
                self._file.commit()
        except OSError:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Have the store forget the parts, if it answers. It does so by itself where the bucket has a rule for that."""
        with suppress(AttributeError):  # a file of the local file system has no such flag
            self._file.closed = True  # otherwise the collector of garbage would upload the last part
        with suppress(OSError), self._store.errors(self._name, writes=True):
            self._file.discard()


class ReadableObject:
    """An object of which each thread asks for parts."""

    blocks_at_once = PART_BYTES // BLOCK_BYTES  # each part is a request

    def __init__(self, store: ObjectStore, name: str, size: int) -> None:
        self._store, self._name, self.size = store, name, size

    def read_into(self, offset: int, view: memoryview) -> None:
        """Ask for all of it."""
        with self._store.errors(self._name):
            data = self._store.files.cat_file(self._store.path(self._name), start=offset, end=offset + len(view))
            if len(data) != len(view):
                raise OSError(errno.EIO, f"the object has {offset + len(data)} bytes")
        view[:] = data

    def close(self) -> None:
        """Nothing is open."""


def _open(url: str) -> tuple[Any, str]:
    scheme, _, place = url.partition("://")
    if not place.strip("/"):
        raise CheckpointError(f"{url!r} names no bucket: write {scheme}://BUCKET/PREFIX")
    try:
        fsspec = importlib.import_module("fsspec")
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise PackageMissing(
            f"{url!r} needs a Python package that is missing ({error}): install muster[s3], or fsspec and the package "
            f"for {scheme}://, where the job's agents and ranks run"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{url!r} is no URL that fsspec knows: {error}") from None
    except Exception as error:
        raise CheckpointError(f"{url!r} can't be opened: {_words(error)}") from error
    return files, str(root).rstrip("/")


def _words(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _modified_ns(found: dict[str, Any]) -> int:
    """When an object was last written, in ns since 1970; 0: the store does not say."""
    value = found.get("LastModified") or found.get("last_modified") or found.get("mtime") or found.get("updated")
    if isinstance(value, str):
        with suppress(ValueError):
            value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        return int(value.timestamp() * 1e9)
    return int(value * 1e9) if isinstance(value, int | float) else 0
