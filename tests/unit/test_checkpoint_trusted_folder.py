"""A checkpoint that somebody else can have written is not believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from muster.checkpoint.format.errors import UntrustedCheckpoint
from muster.checkpoint.format.trusted_folder import TrustedFolder

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
@pytest.mark.parametrize("place", ["..", ".", DATA])
def test_what_others_can_write_is_not_read(folder: Path, place: str, mode: int) -> None:
    changed = (folder / place).resolve()
    changed.chmod(changed.stat().st_mode | mode)
    with pytest.raises(UntrustedCheckpoint, match="others can write to") as refused:
        _read(folder)
    assert f"{changed} (mode " in str(refused.value)
    assert f"chmod go-w {changed}" in str(refused.value)


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
