"""A store of objects: what is taken for a checkpoint there, and how its errors read."""

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from muster.checkpoint.durable import locations, object_store
from muster.checkpoint.durable.newest import finished_steps_of, newest_checkpoint
from muster.checkpoint.durable.object_store import ObjectStore, PackageMissing
from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.flush.retention import Retention, remove_old

local = pytest.importorskip("fsspec.implementations.local")
GANG = "tiny-u1000-5c0ffee5d0d0"


class WholeFiles(local.LocalFileSystem):  # type: ignore[misc]
    """Files that are visible once they are complete, as the objects of S3 are. A small one is written in one call."""

    cachable = False

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(value)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(file.name, path)


def local_objects(folder: Path) -> ObjectStore:
    """A store whose objects are files."""
    store = ObjectStore(f"file://{folder}")
    store._files = WholeFiles(auto_mkdir=True)
    store.poll_s = 0.001
    return store


def complete(store: ObjectStore, step: int, serial: int, gang: str = GANG) -> str:
    """Write a checkpoint of one rank, as a flush does."""
    name = store.final_name(Version(1, step), gang, serial)
    file = store.create(f"{name}/__0_0.distcp")
    file.write(memoryview(b"rank 0"))
    file.finish()
    ranks = {"0": {"file": "__0_0.distcp", "file_bytes": 6}, "1": {"file": None, "file_bytes": 0}}
    manifest = {"gang": gang, "generation": 1, "step": step, "ranks": ranks}
    store.write(f"{name}/{durable_folders.MANIFEST}", json.dumps(manifest).encode())
    store.write(f"{name}/{durable_folders.METADATA}", b"metadata")
    return name


def test_a_metadata_file_that_is_not_whole_completes_nothing(tmp_path: Path) -> None:
    """Over SFTP, SMB and HDFS a file is seen while it is written."""
    store = local_objects(tmp_path)
    name = complete(store, 1, 1)
    manifest = json.loads(store.read(f"{name}/{durable_folders.MANIFEST}", 1000)) | {"metadata_bytes": 8}
    store.write(f"{name}/{durable_folders.MANIFEST}", json.dumps(manifest).encode())
    assert steps(store) == [1]
    store.write(f"{name}/{durable_folders.METADATA}", b"meta")
    assert steps(store) == []
    assert store.is_open(name, name)


class OwnError(Exception):
    """As packages for stores have them, with no class that Python knows."""


def test_each_error_of_a_package_is_an_error_of_the_store(tmp_path: Path) -> None:
    store = local_objects(tmp_path)
    name = complete(store, 1, 1)

    class Failing(WholeFiles):
        def __getattribute__(self, attribute: str) -> Any:
            if attribute in ("ls", "open", "pipe_file", "cat_file", "rm_file", "size"):
                raise OwnError("quota exceeded\nand more")
            return super().__getattribute__(attribute)

    store._files = Failing(auto_mkdir=True)
    for operation in (
        lambda: store.names(),
        lambda: list(store.folders()),
        lambda: store.create("file"),
        lambda: store.write("file", b""),
        lambda: store.read("file", 10),
        lambda: store.open("file"),
        lambda: store.remove("file"),
        lambda: store.is_open(name, name),
        lambda: store.check(),
    ):
        with pytest.raises(OSError, match="quota exceeded:") as raised:
            operation()
        assert raised.value.errno == errno.EIO


def test_a_store_that_may_not_be_listed_is_told_before_a_job_is_queued(tmp_path: Path) -> None:
    class Unlisted(WholeFiles):
        def ls(self, path: str, detail: bool = False, **more: Any) -> Any:
            raise PermissionError(errno.EACCES, "Access Denied")

    store = local_objects(tmp_path)
    store._files = Unlisted(auto_mkdir=True)
    with pytest.raises(PermissionError, match="Access Denied"):
        store.check()
    assert not list(tmp_path.iterdir()), "what was written is removed"


def steps(store: ObjectStore) -> list[int]:
    return sorted(found.label.version.step for found in store.folders() if found.completed_ns is not None)


def test_a_prefix_is_a_checkpoint_once_all_is_there_that_its_manifest_names(tmp_path: Path) -> None:
    store = local_objects(tmp_path)
    name = complete(store, 7, 3)
    assert name == f"step_00000007_g1_{GANG}.flush3"
    assert steps(store) == [7]
    assert not store.is_open(name, name)
    for missing in (durable_folders.METADATA, durable_folders.MANIFEST, "__0_0.distcp"):
        complete(store, 7, 3)
        store.remove(f"{name}/{missing}")
        assert steps(store) == [], missing
        assert store.is_open(name, name)
    complete(store, 7, 3)
    store.write(f"{name}/__0_0.distcp", b"half")
    assert steps(store) == []


def test_an_upload_is_visible_once_it_is_complete_and_not_at_all_once_it_is_given_up(tmp_path: Path) -> None:
    store = local_objects(tmp_path)
    file = store.create("a/file")
    file.write(memoryview(b"bytes"))
    assert store.entries("a") == []
    file.finish()
    assert [(entry.name, entry.size, entry.is_plain) for entry in store.entries("a")] == [("file", 5, True)]
    other = store.create("a/other")
    other.write(memoryview(b"bytes"))
    other.abandon()
    del other
    assert [entry.name for entry in store.entries("a")] == ["file"]


def test_two_flushes_of_a_version_touch_not_each_other_s_objects(tmp_path: Path) -> None:
    store = local_objects(tmp_path)
    names = [complete(store, 7, serial) for serial in (3, 4)]
    store.remove_folder(names[0])
    assert steps(store) == [7]
    assert not store.is_open(names[1], names[1])


def test_retention_removes_older_ones_of_the_gang_and_leaves_what_others_have_put_there(tmp_path: Path) -> None:
    store = local_objects(tmp_path)
    names = [complete(store, step, step) for step in (1, 2, 3, 4)]
    other = complete(store, 1, 9, "other")
    store.write(f"{names[1]}/notes.txt", b"mine")
    assert remove_old(store, names[3], GANG, 5, Retention(keep=2)) == [names[0]]
    assert steps(store) == [1, 2, 3, 4]
    assert not store.is_open(other, other)
    assert store.entries(names[0]) == []


def test_where_a_url_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "_LOCAL", ())
    store = local_objects(tmp_path)
    name = complete(store, 7, 3)
    newer = complete(store, 9, 4)
    where = f"file://{tmp_path}"
    assert newest_checkpoint(where) == f"{where}/{newer}"
    assert newest_checkpoint(f"{where}/{name}") == f"{where}/{name}"
    assert newest_checkpoint(where, "another") is None
    assert finished_steps_of(f"{where}/{name}") == 7


def test_what_is_no_url_of_a_store_is_told() -> None:
    with pytest.raises(CheckpointError, match="name a folder by its path, '/shared/x'"):
        locations.open_store("file:///shared/x")
    with pytest.raises(CheckpointError, match="is no URL that fsspec knows: Protocol not known: s4"):
        locations.open_store("s4://bucket/x")
    assert "is no URL that fsspec knows" in locations.find_problem("s4://bucket/x")
    with pytest.raises(CheckpointError, match="names no bucket: write memory://BUCKET/PREFIX"):
        locations.open_store("memory://")


def test_a_missing_package_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(object_store.importlib, "import_module", missing)
    with pytest.raises(PackageMissing, match=r"needs a Python package that is missing .* install muster\[s3\]"):
        locations.find_problem("s3://bucket/x")


@pytest.mark.parametrize(
    ("error", "number", "words"),
    [
        (FileNotFoundError("The specified bucket does not exist"), errno.ENXIO, "there is no such bucket"),
        (PermissionError("Access Denied"), errno.EIO, "Access Denied"),
        (OSError(errno.EBUSY, "Please reduce your request rate"), errno.EBUSY, "reduce your request rate"),
        (TimeoutError(), errno.EIO, "TimeoutError"),
    ],
)
def test_every_error_names_the_object_and_says_what_the_store_said(
    tmp_path: Path, error: OSError, number: int, words: str
) -> None:
    class Failing:
        def pipe_file(self, path: str, data: bytes) -> None:
            raise error

    store = local_objects(tmp_path)
    store._files = Failing()
    with pytest.raises(OSError, match=words) as raised:
        store.write("step/.metadata", b"")
    assert raised.value.errno == number
    assert raised.value.filename == f"file://{tmp_path}/step/.metadata"
    assert isinstance(raised.value, PermissionError) == isinstance(error, PermissionError)
