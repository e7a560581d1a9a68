"""Which checkpoint a script gets that names a path: that very checkpoint, or the newest one of its own in a folder."""

import json
import logging
import os
import re
from pathlib import Path

import pytest

from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training.durable_loading.named_checkpoint import find, find_for_script


def left(folder: Path, name: str, completed: int, **manifest: object) -> str:
    made = folder / name
    made.mkdir()
    (made / durable_folders.MANIFEST).write_text(json.dumps(manifest))
    (made / durable_folders.METADATA).touch()
    os.utime(made / durable_folders.METADATA, (completed, completed))
    return str(made)


def test_a_folder_never_gives_a_gang_the_newer_state_of_another_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = left(tmp_path, "step_00000010_g1_a", 10)
    other = left(tmp_path, "step_00000020_g1_b", 20)
    assert find_for_script(str(tmp_path), "a") == own
    assert find_for_script(str(tmp_path), "c") is None
    assert "holds checkpoints of other jobs alone, such as step_00000020_g1_b: none is loaded" in caplog.text
    caplog.set_level(logging.INFO)
    assert find_for_script(other, "a") == other
    assert f"{other}, which the script names, is a checkpoint of gang b" in caplog.text


def test_a_checkpoint_that_names_no_gang_is_nobodys(tmp_path: Path) -> None:
    converted = left(tmp_path, "step_00000000_g0", 10)
    assert find_for_script(str(tmp_path), "a") == converted
    assert find_for_script(str(tmp_path), "") == converted
    assert find_for_script(converted, "a") == converted


def test_without_a_gang_a_folder_of_one_job_gives_its_newest(tmp_path: Path) -> None:
    left(tmp_path, "step_00000030_g3_a", 10, job="one")
    last = left(tmp_path, "step_00000020_g1_b", 20, job="one")
    assert find_for_script(str(tmp_path), "") == last
    assert find_for_script(str(tmp_path / "absent"), "") is None


def test_without_a_gang_a_folder_of_several_jobs_is_refused(tmp_path: Path) -> None:
    left(tmp_path, "step_00000030_g3_a", 10, job="one")
    left(tmp_path, "step_00000020_g1_b", 20, job="two")
    words = "holds checkpoints of 2 jobs: name the one to load: step_00000020_g1_b, step_00000030_g3_a"
    with pytest.raises(CheckpointError, match=words):
        find_for_script(str(tmp_path), "")


@pytest.mark.parametrize("name", ["", "absent", "step*", "absent/step_00000001_g1_a", "step_00000030_g1_a"])
def test_what_a_job_shall_start_from_is_a_checkpoint_or_an_error(tmp_path: Path, name: str) -> None:
    """Never step 0, and never another job's state: the user has named it, or Muster has written it."""
    own = left(tmp_path, "step_00000020_g1_a", 20)
    copied = left(tmp_path, "best", 10)
    assert find(own) == own
    assert find(copied) == copied
    assert find(str(tmp_path / "step_00000010_g1_a")) == own, "a flush may write a newer version than its order names"
    with pytest.raises(CheckpointError, match=f"{re.escape(str(tmp_path / name))} is no complete checkpoint"):
        find(str(tmp_path / name))
