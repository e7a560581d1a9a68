"""Which durable checkpoints a gang removes: its own alone, by number and age."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.checkpoint.durable.newest import newest_checkpoint
from muster.checkpoint.durable.posix_folder import PosixFolder
from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.flush.retention import Retention, remove_old

GANG = "g1"
HOUR = 3600


def complete(folder: Path, version: Version, gang: str = GANG, age_h: float = 0.0, manifest_gang: str = "") -> Path:
    """A complete checkpoint that was completed `age_h` hours before the others."""
    path = folder / durable_folders.folder_name(version, gang)
    path.mkdir()
    (path / durable_folders.METADATA).write_bytes(b"meta")
    manifest = {"gang": manifest_gang or gang, "step": version.step, "generation": version.generation}
    (path / durable_folders.MANIFEST).write_text(json.dumps(manifest))
    (path / durable_folders.rank_file_name(0)).write_bytes(b"bytes")
    at = 1_700_000_000 - age_h * HOUR
    os.utime(path / durable_folders.METADATA, (at, at))
    return path


def kept(folder: Path) -> list[int]:
    """The steps of the checkpoints that are there."""
    labels = (durable_folders.parse_folder_name(path.name) for path in folder.iterdir())
    return sorted(label.version.step for label in labels if label)


@pytest.mark.parametrize(
    ("retention", "steps"),
    [
        (Retention(), [1, 2, 3, 4]),
        (Retention(keep=3), [2, 3, 4]),
        (Retention(keep=9), [1, 2, 3, 4]),
        (Retention(keep_s=2.5 * HOUR), [2, 3, 4]),
        (Retention(keep_s=1), [4]),
        (Retention(keep=2, keep_s=2.5 * HOUR), [2, 3, 4]),
        (Retention(keep=4, keep_s=1), [1, 2, 3, 4]),
    ],
)
def test_the_newest_stay_and_older_ones_for_a_time(tmp_path: Path, retention: Retention, steps: list[int]) -> None:
    paths = [complete(tmp_path, Version(1, step), age_h=4 - step) for step in (1, 2, 3, 4)]
    assert set(remove_old(PosixFolder(tmp_path), paths[-1].name, GANG, 9, retention)) == {
        paths[step - 1].name for step in {1, 2, 3, 4} - set(steps)
    }
    assert kept(tmp_path) == steps


def test_the_newest_is_the_newest_version_not_the_last_written(tmp_path: Path) -> None:
    newest = complete(tmp_path, Version(2, 5))
    complete(tmp_path, Version(1, 90), age_h=-3)
    remove_old(PosixFolder(tmp_path), newest.name, GANG, 9, Retention(keep=1))
    assert kept(tmp_path) == [5]


def test_a_folder_with_a_file_of_somebody_else_stays(tmp_path: Path) -> None:
    old, newest = complete(tmp_path, Version(1, 1)), complete(tmp_path, Version(1, 2))
    (old / "notes.txt").write_text("the best run so far")
    assert remove_old(PosixFolder(tmp_path), newest.name, GANG, 9, Retention(keep=1)) == []
    assert (old / "notes.txt").read_text() == "the best run so far"
    assert newest_checkpoint(str(old)) == str(old)


def test_a_crash_while_one_is_removed_leaves_nothing_that_looks_like_a_checkpoint(tmp_path: Path) -> None:
    old, newest = complete(tmp_path, Version(1, 1)), complete(tmp_path, Version(1, 2))

    class Crashing(PosixFolder):
        def remove(self, *names: str) -> None:
            raise OSError("the node lost power")

    with pytest.raises(OSError, match="lost power"):
        remove_old(Crashing(tmp_path), newest.name, GANG, 9, Retention(keep=1))
    assert not old.exists()
    assert newest_checkpoint(str(tmp_path)) == str(newest)
    [left] = [path.name for path in tmp_path.iterdir() if path != newest]
    assert durable_folders.parse_temporary_folder_name(left) is not None, "the next flush of the gang removes it"


def _tree(folder: Path) -> dict[str, bytes | str]:
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
    return found


gangs = st.sampled_from([GANG, "g", "g11", "g1_2", "other-u1000-5c0ffee5d0d0"])
strangers = st.sampled_from(
    ["mine", "step_1", "step_00000001_g1", ".step_00000001_g1_g1.3.tmp", ".flush-g1-4", "step_00000009_g9_g1.tar"]
)


@given(
    st.lists(st.tuples(gangs, st.integers(1, 3), st.integers(1, 30), st.booleans()), max_size=12),
    st.sets(strangers),
    st.integers(0, 4),
    st.sampled_from([0.0, 1.0, 10.0 * HOUR]),
)
def test_nothing_is_removed_but_the_gang_s_own_complete_checkpoints(
    written: list[tuple[str, int, int, bool]], others: set[str], keep: int, keep_s: float
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="muster-retention-"))
    try:
        newest = complete(folder, Version(4, 1))
        own = {newest.name}
        for gang, generation, step, forged in written:
            version = Version(generation, step)
            if not (folder / durable_folders.folder_name(version, gang)).exists():
                path = complete(folder, version, gang, age_h=step, manifest_gang="another" if forged else "")
                own |= {path.name} if gang == GANG and not forged else set()
        for name in others - {path.name for path in folder.iterdir()}:
            (folder / name).mkdir()
            (folder / name / durable_folders.METADATA).write_bytes(b"x")
        (folder / "step_00000002_g9_g1").symlink_to(newest)
        before = _tree(folder)
        removed = set(remove_old(PosixFolder(folder), newest.name, GANG, 9, Retention(keep, keep_s)))
        after = _tree(folder)
        assert removed <= own - {newest.name}
        assert after == {name: found for name, found in before.items() if name.partition("/")[0] not in removed}
        left = len(own) - len(removed)
        assert left >= min(len(own), max(1, keep))
        if keep and not keep_s:
            assert left == min(len(own), keep)
        if not keep and not keep_s:
            assert not removed
    finally:
        shutil.rmtree(folder)
