"""A checkpoint that somebody else can have written is not believed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from muster.checkpoint.durable.trusted_folder import TrustedFolder
from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.errors import UntrustedCheckpoint

DATA = "__0_0.distcp"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of this user in a folder of checkpoints."""
    made = tmp_path / "durable" / "step_00000001_g1_g"
    made.mkdir(parents=True)
    (made / DATA).write_text("data")
    for path, mode in ((made.parent, 0o755), (made, 0o755), (made / DATA, 0o644)):
        path.chmod(mode)
    return made


def _read(folder: Path, uid: int | None = None) -> str:
    with TrustedFolder(folder, uid) as trusted:
        trusted.check_file(DATA)
        return (trusted.path / DATA).read_text()


def test_the_users_own_checkpoint_is_read(folder: Path) -> None:
    assert _read(folder) == "data"


@pytest.mark.parametrize("mode", [0o020, 0o002, 0o022])
@pytest.mark.parametrize("place", [".", DATA])
def test_what_others_can_write_is_not_read(folder: Path, place: str, mode: int) -> None:
    changed = (folder / place).resolve()
    changed.chmod(changed.stat().st_mode | mode)
    with pytest.raises(UntrustedCheckpoint, match="others can write to") as refused:
        _read(folder)
    assert f"{changed} (mode " in str(refused.value)
    assert f"chmod go-w {changed}" in str(refused.value)


def _write_manifest(folder: Path, **changed: object) -> None:
    manifest = {"gang": "g", "generation": 1, "step": 1, **changed}
    (folder / durable_folders.MANIFEST).write_text(json.dumps(manifest))
    (folder / durable_folders.MANIFEST).chmod(0o644)


@pytest.mark.parametrize("mode", [0o757, 0o777, 0o2777])
def test_a_folder_to_which_all_users_can_write_holds_no_checkpoint(folder: Path, mode: int) -> None:
    _write_manifest(folder)
    folder.parent.chmod(mode)
    with pytest.raises(UntrustedCheckpoint, match=f"all users can write to {folder.parent} .*chmod o-w"):
        _read(folder)


@pytest.mark.parametrize("mode", [0o770, 0o775, 0o2770])
def test_a_group_may_write_to_the_folder_that_a_checkpoint_lies_in(folder: Path, mode: int) -> None:
    _write_manifest(folder)
    folder.parent.chmod(mode)
    assert _read(folder) == "data"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("mode", [0o755, 0o2770])
def test_the_folder_that_a_checkpoint_lies_in_may_be_another_users(folder: Path, mode: int) -> None:
    _write_manifest(folder)
    folder.parent.chmod(mode)
    os.chown(folder.parent, 4711, -1)
    assert _read(folder) == "data"


@pytest.mark.parametrize("changed", [{"gang": "h"}, {"generation": 2}, {"step": 2}])
def test_where_others_can_rename_the_manifest_says_the_name(folder: Path, changed: dict[str, object]) -> None:
    _write_manifest(folder, **changed)
    assert _read(folder) == "data", "only the user can have renamed it"
    folder.parent.chmod(0o2770)
    with pytest.raises(UntrustedCheckpoint, match=r"others can rename .* may be another checkpoint of yours"):
        _read(folder)


@pytest.mark.parametrize("name", ["final", "step_00000001_g1_g"])
@pytest.mark.parametrize("text", ["", "[]", "no JSON"])
def test_where_others_can_rename_a_checkpoint_without_a_manifest_is_not_read(
    folder: Path, name: str, text: str
) -> None:
    if text:
        (folder / durable_folders.MANIFEST).write_text(text)
    folder = folder.rename(folder.with_name(name))
    assert _read(folder) == "data"
    folder.parent.chmod(0o2770)
    with pytest.raises(UntrustedCheckpoint, match="others can rename"):
        _read(folder)


@pytest.mark.parametrize("mode", [0o1777, 0o2770])
def test_a_link_that_others_can_have_laid_is_not_followed(folder: Path, tmp_path: Path, mode: int) -> None:
    _write_manifest(folder)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    (shared / folder.name).symlink_to(folder)
    with pytest.raises(UntrustedCheckpoint, match="it is a link, which others may have laid"):
        _read(shared / folder.name)


def test_a_link_that_only_the_user_can_have_laid_is_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("newest")
    (tmp_path / "newest").symlink_to(folder)
    assert _read(tmp_path / "latest") == "data"


def test_a_link_above_the_folder_of_checkpoints_is_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "home").symlink_to(folder.parent)
    assert _read(tmp_path / "home" / folder.name) == "data"


def test_a_folder_with_the_sticky_bit_may_hold_the_checkpoints_of_several_users(folder: Path) -> None:
    folder.parent.chmod(0o1777)
    assert _read(folder) == "data"
    folder.chmod(0o1777)  # in the checkpoint itself, others could still add files
    with pytest.raises(UntrustedCheckpoint):
        _read(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("place", [".", DATA])
def test_what_another_user_owns_is_not_read(folder: Path, place: str) -> None:
    os.chown(folder / place, 4711, -1)
    with pytest.raises(UntrustedCheckpoint, match=r"belongs to uid 4711, not to you \(uid 0\) or root"):
        _read(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="the files of this test belong to root")
def test_roots_checkpoint_is_read_by_everyone(folder: Path) -> None:
    assert _read(folder, uid=4711) == "data"


@pytest.mark.parametrize("kind", ["link", "hidden link", "device"])
def test_only_plain_files_are_read(folder: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "elsewhere").write_text("other")
    (folder / DATA).unlink()
    if kind == "device":
        os.mkfifo(folder / DATA)
    else:
        (folder / DATA).symlink_to(tmp_path / ("elsewhere" if kind == "link" else "nowhere"))
    with pytest.raises(UntrustedCheckpoint, match="must be a plain file"):
        _read(folder)


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/b"])
def test_a_file_outside_of_the_folder_is_not_read(folder: Path, name: str) -> None:
    with TrustedFolder(folder) as trusted, pytest.raises(UntrustedCheckpoint, match="not a file of this folder"):
        trusted.check_file(name)


def test_a_folder_that_is_exchanged_after_the_check_is_not_read(folder: Path) -> None:
    with TrustedFolder(folder) as trusted:
        trusted.check_file(DATA)
        folder.rename(folder.with_name("aside"))
        folder.mkdir()
        (folder / DATA).write_text("of somebody else")
        assert (trusted.path / DATA).read_text() == "data"
