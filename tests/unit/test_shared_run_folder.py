"""Several users share a run folder, and one of them has made the names of another job's logs first."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from muster.daemon.agent import agent_log
from muster.daemon.host import own_folder, rank_log_files

HOSTILE = 4711
"""The uid of the other user."""
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The other user has made the folder of all logs."""
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    folder.chmod(0o1777)
    (folder / "logs").chmod(0o777)
    os.chown(folder / "logs", HOSTILE, HOSTILE)
    return folder


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """Another file of the job's user."""
    file = tmp_path / "precious"
    file.write_text("of the job's user")
    return file


def _lay_link(link: Path, target: Path, run_dir: Path) -> None:
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    for folder in link.parents:
        if folder == run_dir:
            return
        folder.chmod(0o777)
        os.chown(folder, HOSTILE, HOSTILE)


def test_no_log_of_a_rank_goes_where_a_link_of_another_user_leads(run_dir: Path, precious: Path) -> None:
    _lay_link(rank_log_files.log_path(str(run_dir), "g", 1, 0), precious, run_dir)
    with pytest.raises(OSError, match=f"belongs to uid {HOSTILE}: another user has taken this name"):
        os.write(rank_log_files.open_log(str(run_dir), "g", 1, 0), b"a line of the rank")
    assert precious.read_text() == "of the job's user"


def test_no_log_of_an_agent_goes_where_a_link_of_another_user_leads(
    run_dir: Path, precious: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _lay_link(agent_log.path(str(run_dir), "g", "n1"), precious, run_dir)
    agent_log.start("info", str(run_dir), "g", "n1")
    agent_log.stop()
    assert precious.read_text() == "of the job's user"
    assert re.search("no log in the run folder: .*another user has taken this name", capfd.readouterr().err)


def test_a_link_to_an_own_folder_is_no_own_folder(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run_dir / "logs" / "g").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="it is no folder"):
        rank_log_files.open_log(str(run_dir), "g", 1, 0)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_logs_of_a_user_may_lie_in_the_folder_of_another_one(run_dir: Path) -> None:
    os.close(rank_log_files.open_log(str(run_dir), "g", 1, 0))
    os.close(rank_log_files.open_log(str(run_dir), "g", 1, 0))
    assert rank_log_files.log_path(str(run_dir), "g", 1, 0).is_file()


def test_nothing_is_left_of_the_look_at_whom_new_files_belong_to(run_dir: Path) -> None:
    made = run_dir / "made"
    made.mkdir()
    os.chown(made, HOSTILE, HOSTILE)
    with pytest.raises(FileExistsError):
        own_folder.make(made)
    assert sorted(path.name for path in run_dir.iterdir()) == ["logs", "made"]


def test_where_all_files_belong_to_one_user_each_folder_is_an_own_one(tmp_path: Path) -> None:
    """As on a file server that maps all users to one."""
    (tmp_path / "made").mkdir()
    own_folder.make(tmp_path / "made", uid=HOSTILE)
