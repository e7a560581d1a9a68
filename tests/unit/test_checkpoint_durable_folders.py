"""How durable checkpoints are named and found where several jobs share a folder."""

import json
import os
from pathlib import Path

import pytest

from muster.checkpoint.durable.newest import finished_steps_of, last_completed_first, newest_checkpoint
from muster.checkpoint.durable.posix_folder import PosixFolder
from muster.checkpoint.format import durable_folders, folder_names
from muster.checkpoint.format.durable_folders import ParsedFolderName, parse_folder_name, parse_temporary_folder_name
from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.flush import flush_version
from muster.daemon.coordinator.core.recovery.flushing import durable_path
from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.account import Account
from muster.daemon.coordinator.core.state.events import GangSpec
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.slurm_jobs import SlurmJob


def whole(folder: Path, name: str, completed: int, **manifest: object) -> Path:
    """A checkpoint whose metadata was written `completed` s after 1970."""
    path = folder / name
    path.mkdir()
    (path / durable_folders.METADATA).touch()
    os.utime(path / durable_folders.METADATA, (completed, completed))
    if manifest:
        (path / durable_folders.MANIFEST).write_text(json.dumps(manifest))
    return path


@pytest.mark.parametrize("gang", ["tiny-0a1b2c3d", "a_g1_b.7.tmp", "step_00000001_g1"])
def test_a_folder_name_holds_version_and_gang(gang: str) -> None:
    label = ParsedFolderName(Version(4, 123), gang)
    assert parse_folder_name(durable_folders.folder_name(*label)) == label
    assert parse_folder_name(durable_folders.folder_name(label.version, gang, 12)) == label._replace(serial=12)
    assert parse_temporary_folder_name(durable_folders.temporary_folder_name(*label[:2], serial=7)) == (label, 7)
    assert parse_folder_name(durable_folders.temporary_folder_name(*label[:2], serial=7)) is None
    assert parse_temporary_folder_name(durable_folders.folder_name(*label)) is None


def test_a_name_with_a_number_that_no_message_holds_is_none() -> None:
    assert parse_folder_name(f"step_{'9' * 18}_g1_a") is not None
    for name in (f"step_{'9' * 19}_g1_a", f"step_1_g{'9' * 10}_a", f"step_{'9' * 5000}_g1_a"):
        assert parse_folder_name(name) is None


def test_folder_names_without_a_gang_are_read() -> None:
    assert parse_folder_name("step_00000123_g4") == ParsedFolderName(Version(4, 123), "")
    assert parse_temporary_folder_name(".step_00000123_g4.tmp") is None, (
        "its gang is unknown, so that no gang may remove it"
    )
    assert parse_folder_name("notes") is None


def test_the_coordinator_gives_a_folder_the_name_that_its_agents_do() -> None:
    for where, serial in (("/d", 0), ("s3://bucket/d", 9)):
        account = Account(1000, "tiny", "", 0.0)
        gang = Gang("tiny-0a1b2c3d", GangSpec(2, 0, durable_dir=where), account, SlurmJob(1))
        name = durable_folders.folder_name(Version(4, 123), "tiny-0a1b2c3d", serial)
        assert durable_path(gang, events.Version(4, 123), 9) == f"{where}/{name}"
        assert folder_names.parse_path(f"{where}/{name}/") == (123, 4, "tiny-0a1b2c3d", serial)
    assert folder_names.parse_path("/d/notes") is None


def test_the_newest_checkpoint_of_a_gang_is_its_newest_version_whenever_it_was_written(tmp_path: Path) -> None:
    whole(tmp_path, "step_00000300_g1_a", 30)
    newest = whole(tmp_path, "step_00000100_g3_a", 20)
    (tmp_path / "step_00000900_g9_a").mkdir()
    assert newest_checkpoint(str(tmp_path)) == str(newest)
    assert newest_checkpoint(str(newest)) == str(newest)


def test_between_gangs_the_checkpoint_that_was_completed_last_is_the_newest(tmp_path: Path) -> None:
    """A job with two faults ended at step 100; the next one went on from there to step 300."""
    first = whole(tmp_path, "step_00000100_g3_a", 10)
    second = whole(tmp_path, "step_00000300_g1_b", 20)
    assert newest_checkpoint(str(tmp_path)) == str(second)
    assert newest_checkpoint(str(tmp_path), "a") == str(first)
    assert newest_checkpoint(str(tmp_path), "c") is None


def test_folders_without_a_gang_belong_to_the_gang_that_their_manifest_names(tmp_path: Path) -> None:
    old = whole(tmp_path, "step_00000400_g2", 10, step=400, gang="a")
    whole(tmp_path, "step_00000300_g1_a", 20)
    assert newest_checkpoint(str(tmp_path)) == newest_checkpoint(str(tmp_path), "a") == str(old)
    unknown = whole(tmp_path, "step_00000001_g0", 30)
    assert newest_checkpoint(str(tmp_path)) == str(unknown)


def test_of_each_gang_that_is_asked_for_the_newest_comes_and_its_manifest_is_read_only_then(tmp_path: Path) -> None:
    whole(tmp_path, "step_00000100_g1_a", 10)
    first = whole(tmp_path, "step_00000200_g1_a", 20, step=200)
    second = whole(tmp_path, "step_00000900_g1_b", 15, step=900)
    whole(tmp_path, "step_00000001_g1_other", 30)
    found = last_completed_first(str(tmp_path), lambda gang: gang in ("a", "b"))
    assert next(found) == (str(first), {"step": 200})
    (second / durable_folders.MANIFEST).write_text(json.dumps({"step": 901}))
    assert list(found) == [(str(second), {"step": 901})]


def test_the_step_is_read_from_the_manifest_or_the_name(tmp_path: Path) -> None:
    assert finished_steps_of(str(whole(tmp_path, "renamed", 1, step=7))) == 7
    assert finished_steps_of(str(whole(tmp_path, "step_00000008_g1_a", 1))) == 8
    broken = whole(tmp_path, "broken", 1)
    (broken / durable_folders.MANIFEST).write_text("[]")
    with pytest.raises(CheckpointError, match="doesn't say which step it holds: rename it to step_00000123_g0"):
        finished_steps_of(str(broken))


def test_declarations_of_another_gang_are_never_removed(tmp_path: Path) -> None:
    others = {".flush-a-1-3", ".flush-b-3", ".flush-a-9", ".flush-a-x"}
    for name in {*others, ".flush-a-3", ".flush-a-8"}:
        (tmp_path / name).mkdir()
    flush_version.remove_declarations(PosixFolder(tmp_path), "a", 8)
    assert {path.name for path in tmp_path.iterdir()} == others
    flush_version.remove_declarations(PosixFolder(tmp_path / "absent"), "a", 8)
