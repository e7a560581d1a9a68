"""Several users share a durable folder with the sticky bit, and one of them is hostile."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.checkpoint.durable.newest import finished_steps_of, is_complete, newest_checkpoint, older_checkpoint
from muster.checkpoint.durable.trusted_folder import TrustedFolder
from muster.checkpoint.format import durable_folders, layout
from muster.checkpoint.format.errors import FlushError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.flush import flush_version
from muster.checkpoint.testing.gang_in_one_process import InProcessGang, TorchlessRank
from muster.checkpoint.training.agent_connection import AgentConnection
from muster.v1 import agent_pb2

HOSTILE = 4711
"""The uid of the other user."""
KEPT = Version(1, 1)
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "durable"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
async def gang() -> AsyncIterator[InProcessGang]:
    """Nodes n0 and n1 hold the shards of ranks 0 and 1 at KEPT."""
    gang, places = InProcessGang("g1"), {0: "n0", 1: "n1"}
    await gang.add(*places.values())
    gang.begin(places)
    ranks = []
    for rank, node in places.items():
        metadata = pickle.dumps([(layout.offset_placeholder(n), layout.length_placeholder(n)) for n in (0, 100, 101)])
        connection = AgentConnection(gang.socket(rank, node), rank, gang.generation)
        ranks.append(TorchlessRank(connection, rank, len(places), b"" if rank else metadata))
    for one in ranks:
        await asyncio.to_thread(one.join)
    for one in ranks:
        assert not await asyncio.to_thread(one.layout, 1 << 20)
    for one in ranks:
        assert await asyncio.to_thread(one.step, 1, bytes([one.rank]) * (1 << 20), b"own", 5.0)
    end = asyncio.get_running_loop().time() + 10.0
    while any(node.committed() != KEPT for node in gang.nodes.values()):
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.002)
    yield gang
    for one in ranks:
        one.connection.close()
    await gang.close()


async def flush(gang: InProcessGang, folder: Path, *names: str) -> list[BaseException | None]:
    """Flush KEPT on the nodes with these names, or on all. For each node: what went wrong, or None."""
    plan = gang.plan(KEPT, agent_pb2.TIER_OWN)
    order = agent_pb2.FlushOrder(serial=1, version=KEPT.to_wire(), sources=plan.sources, reason="a test")
    async with asyncio.timeout(60):
        parts = [gang.nodes[name].checkpoint_service.flush(order, str(folder)) for name in names or gang.nodes]
        return await asyncio.gather(*parts, return_exceptions=True)


def of_hostile(path: Path) -> Path:
    os.chown(path, HOSTILE, HOSTILE, follow_symlinks=False)
    return path


async def test_no_link_of_another_user_leads_a_flush_to_other_files(gang: InProcessGang, shared: Path) -> None:
    """The name of the folder can be known: the gang's id stands in the names of its earlier checkpoints."""
    precious = shared.parent / "precious"
    precious.write_text("of the job's user")
    made = shared / durable_folders.temporary_folder_name(KEPT, "g1", 1)
    made.mkdir()
    for rank in (0, 1):
        (made / durable_folders.rank_file_name(rank)).symlink_to(precious)
        of_hostile(made / durable_folders.rank_file_name(rank))
    made.chmod(0o777)
    of_hostile(made)
    failed = await flush(gang, shared)
    assert precious.read_text() == "of the job's user"
    assert all(isinstance(error, FlushError) for error in failed)
    assert any(f"belongs to uid {HOSTILE}: another user has taken this name" in str(error) for error in failed)


async def test_no_mark_of_failure_is_left_where_a_link_of_another_user_leads(gang: InProcessGang, shared: Path) -> None:
    made = shared / durable_folders.temporary_folder_name(KEPT, "g1", 1)
    made.mkdir()
    (made / ".failed").symlink_to(shared.parent / "new")
    made.chmod(0o777)
    of_hostile(made)
    assert all(isinstance(error, FlushError) for error in await flush(gang, shared))
    assert not (shared.parent / "new").exists()


async def test_a_link_in_place_of_the_folder_is_refused(gang: InProcessGang, shared: Path) -> None:
    elsewhere = shared.parent / "elsewhere"
    elsewhere.mkdir()
    link = shared / durable_folders.temporary_folder_name(KEPT, "g1", 1)
    link.symlink_to(elsewhere)
    of_hostile(link)
    assert all(isinstance(error, FlushError) for error in await flush(gang, shared))
    assert list(elsewhere.iterdir()) == []


async def test_another_user_declares_no_version(gang: InProcessGang, shared: Path) -> None:
    made = shared / flush_version.declarations_folder("g1", 1)
    made.mkdir()
    (made / "9-9-n0").touch()
    (made / "no version").touch()
    made.chmod(0o777)
    of_hostile(made)
    for name in ("n1", "n0"):  # n0 leads, and root can remove the folder of the other user
        (error,) = await flush(gang, shared, name)
        assert isinstance(error, FlushError)
        assert f"belongs to uid {HOSTILE}: another user has taken this name" in str(error)


async def test_a_manifest_that_is_no_file_does_not_hold_a_flush_up(gang: InProcessGang, shared: Path) -> None:
    made = shared / durable_folders.folder_name(KEPT, "g1")
    made.mkdir()
    os.mkfifo(made / durable_folders.MANIFEST)
    of_hostile(made)
    failed = await flush(gang, shared)
    assert any(isinstance(error, FlushError) and "is there already" in str(error) for error in failed)


def checkpoint(folder: Path, name: str, completed: int) -> Path:
    """A checkpoint whose metadata was written `completed` s after 1970."""
    made = folder / name
    made.mkdir()
    (made / durable_folders.METADATA).touch()
    os.utime(made / durable_folders.METADATA, (completed, completed))
    return made


def with_manifest(folder: Path) -> Path:
    """A checkpoint as a flush writes it: its manifest says what its name says."""
    label = durable_folders.parse_folder_name(folder.name)
    assert label is not None
    manifest = {"gang": label.gang, "generation": label.version.generation, "step": label.version.step}
    (folder / durable_folders.MANIFEST).write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("gang", ["", "a"])
def test_the_checkpoint_of_another_user_is_not_newer_than_an_own_one(shared: Path, gang: str) -> None:
    own = checkpoint(shared, "step_00000100_g1_a", 10)
    of_hostile(checkpoint(shared, "step_00000900_g9_a", 20))
    of_hostile(checkpoint(shared, "step_00000900_g9_b", 30))
    assert newest_checkpoint(str(shared), gang) == str(own)


def test_where_all_checkpoints_are_of_another_user_one_is_found_and_refused_later(shared: Path) -> None:
    other = of_hostile(checkpoint(shared, "step_00000100_g1_a", 10))
    assert newest_checkpoint(str(shared)) == str(other)


def test_a_manifest_of_another_user_is_not_read(shared: Path) -> None:
    """Reading a named pipe would never end."""
    own = checkpoint(shared, "step_00000100_g1", 10)
    (own / durable_folders.MANIFEST).write_text(json.dumps({"gang": "a"}))
    other = checkpoint(shared, "step_00000900_g9", 20)
    os.mkfifo(other / durable_folders.MANIFEST)
    of_hostile(other)
    assert newest_checkpoint(str(shared), "a") == str(own)
    assert finished_steps_of(str(other)) == 900


@pytest.mark.parametrize("gang", ["", "a"])
def test_a_link_to_another_checkpoint_is_none(shared: Path, gang: str) -> None:
    """It would lead to an older checkpoint of this user, or to one of another model, which belong to the right user."""
    own = checkpoint(shared, "step_00000100_g1_a", 10)
    (shared.parent / "elsewhere").mkdir()
    other_model = checkpoint(shared.parent / "elsewhere", "step_00000007_g1_b", 20)
    for name in ("step_00000900_g9_a", "step_00000900_g9_b"):
        (shared / name).symlink_to(other_model)
        of_hostile(shared / name)
    assert newest_checkpoint(str(shared), gang) == str(own)
    assert older_checkpoint(str(shared / "step_00000901_g9_a")) == str(own)


def test_metadata_that_is_a_link_completes_nothing(shared: Path) -> None:
    own = checkpoint(shared, "step_00000100_g1_a", 10)
    other = checkpoint(shared, "step_00000900_g9_a", 20)
    (other / durable_folders.METADATA).unlink()
    (other / durable_folders.METADATA).symlink_to(own / durable_folders.METADATA)
    assert newest_checkpoint(str(shared)) == str(own)
    assert not is_complete(str(other))


@pytest.fixture
def project(shared: Path) -> Path:
    """The folder of a project: it belongs to somebody else, and its group may write to it."""
    shared.chmod(0o2770)
    return of_hostile(shared)


@pytest.mark.parametrize("gang", ["", "a"])
def test_in_the_folder_of_a_project_the_newest_own_checkpoint_is_found(project: Path, gang: str) -> None:
    with_manifest(checkpoint(project, "step_00000050_g1_a", 5))
    own = with_manifest(checkpoint(project, "step_00000100_g1_a", 10))
    of_hostile(with_manifest(checkpoint(project, "step_00000900_g9_a", 20)))
    assert newest_checkpoint(str(project), gang) == str(own)


@pytest.mark.parametrize("gang", ["", "a"])
def test_a_member_of_the_group_renames_an_older_checkpoint_and_another_model(project: Path, gang: str) -> None:
    for old, new in (
        ("step_00000050_g1_a", "step_00000900_g9_a"),
        ("step_00000050_g1_b", "step_00000901_g9_a"),
        ("step_00000051_g1_b", "step_00000902_g9_b"),
    ):
        with_manifest(checkpoint(project, old, 20)).rename(project / new)
    own = with_manifest(checkpoint(project, "step_00000100_g1_a", 10))
    assert newest_checkpoint(str(project), gang) == str(own)
    assert older_checkpoint(str(project / "step_00000999_g9_a")) == str(own)


async def test_a_flush_into_the_folder_of_a_project_is_restored(gang: InProcessGang, project: Path) -> None:
    before = os.umask(0o002)
    try:
        assert await flush(gang, project) == [KEPT.to_wire(), None]
    finally:
        os.umask(before)
    made = project / durable_folders.folder_name(KEPT, "g1")
    assert newest_checkpoint(str(project)) == str(made)
    with TrustedFolder(made) as trusted:
        for file in made.iterdir():
            trusted.check_file(file.name)


async def test_what_a_member_of_the_group_gives_the_name_of_a_flush_is_neither_written_nor_removed(
    gang: InProcessGang, project: Path
) -> None:
    """Such a member can rename folders of this user, in the same folder, and can't write into them."""
    names = [
        durable_folders.temporary_folder_name(KEPT, "g1", 1),
        durable_folders.temporary_folder_name(KEPT, "g1", 0),
        flush_version.declarations_folder("g1", 0),
    ]
    for name in names:
        (project / name).mkdir()
        (project / name / "notes.txt").write_text("of the job's user")
        (project / name / "data").mkdir()
    await flush(gang, project)
    notes = sorted(path.read_text() for path in project.rglob("notes.txt"))
    assert notes == ["of the job's user"] * 3


@pytest.mark.parametrize("files", [("2024-01-15-loss.csv",), ("manifest.json", "__0.part", "notes.txt")])
async def test_a_folder_of_the_user_that_gets_the_name_of_an_earlier_flush_keeps_all_its_files(
    gang: InProcessGang, project: Path, files: tuple[str, ...]
) -> None:
    """Some of them have names that a flush gives its files, too."""
    for name in (durable_folders.temporary_folder_name(KEPT, "g1", 0), flush_version.declarations_folder("g1", 0)):
        (project / name).mkdir()
        for file in files:
            (project / name / file).write_text("of the job's user")
    assert await flush(gang, project) == [KEPT.to_wire(), None]
    kept = [path.name for path in project.rglob("*") if path.is_file() and path.read_bytes() == b"of the job's user"]
    assert sorted(kept) == sorted(2 * files)


async def test_no_flush_writes_into_a_folder_of_the_user_that_was_given_its_name(
    gang: InProcessGang, project: Path
) -> None:
    other = project / durable_folders.temporary_folder_name(KEPT, "g1", 1)
    other.mkdir()
    for file in ("manifest.json", "notes.txt"):
        (other / file).write_text("of the job's user")
    failed = await flush(gang, project)
    assert any("notes.txt, which no flush has written" in str(error) for error in failed)
    assert {file.name: file.read_text() for file in other.iterdir()} == dict.fromkeys(
        ("manifest.json", "notes.txt"), "of the job's user"
    )


async def test_no_flush_writes_into_a_checkpoint_that_was_given_its_name(gang: InProcessGang, project: Path) -> None:
    older = with_manifest(checkpoint(project, "step_00000050_g1_b", 10))
    (older / durable_folders.rank_file_name(0)).write_text("another model")
    aside = older.rename(project / durable_folders.temporary_folder_name(KEPT, "g1", 1))
    failed = await flush(gang, project, "n1", "n0")
    assert all(isinstance(error, FlushError) for error in failed)
    assert not (aside / durable_folders.rank_file_name(1)).exists()
    assert (aside / durable_folders.rank_file_name(0)).read_text() == "another model"
    assert (aside / durable_folders.METADATA).exists()
