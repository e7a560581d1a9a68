"""Several users share a run folder, and one of them has made the names of another job's logs first."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from muster.daemon.agent import agent_log
from muster.daemon.agent.ranks.stack_dumps import StackDumps
from muster.daemon.host import rank_log_files
from muster.daemon.host.held_folder import HeldFolder, UntrustedPath

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
    agent_log.start("info", "text", str(run_dir), "g", "n1", "1")
    agent_log.stop()
    assert precious.read_text() == "of the job's user"
    assert re.search("no log in the run folder: .*another user has taken this name", capfd.readouterr().err)


async def test_no_stacks_of_a_rank_go_where_a_link_of_another_user_leads(run_dir: Path, precious: Path) -> None:
    _lay_link(rank_log_files.stacks_path(str(run_dir), "g", 1, 0), precious, run_dir)
    dumps = StackDumps(str(run_dir), "g")
    await dumps.write(1, {0: os.getpid()})
    dumps.close()
    assert precious.read_text() == "of the job's user"


def _log(run_dir: Path, gang: str = "g") -> Path:
    """The log of rank 0, after the rank has opened it once."""
    os.close(rank_log_files.open_log(str(run_dir), gang, 1, 0))
    return rank_log_files.log_path(str(run_dir), gang, 1, 0)


@pytest.mark.parametrize("kind", ["link", "hard link", "named pipe", "file of another user"])
def test_nothing_is_appended_to_what_others_have_laid_in_the_folder(run_dir: Path, precious: Path, kind: str) -> None:
    """As they can where the folder was made by an earlier version, whose folders followed the umask."""
    file = _log(run_dir)
    file.unlink()
    match kind:
        case "link":
            file.symlink_to(precious)
        case "hard link":
            file.hardlink_to(precious)
        case "named pipe":
            os.mkfifo(file)
        case _:
            file.touch()
            os.chown(file, HOSTILE, HOSTILE)
    with pytest.raises(OSError, match=r"is a link|another name|named pipe|belongs to uid"):
        os.write(rank_log_files.open_log(str(run_dir), "g", 1, 0), b"a line of the rank")
    assert precious.read_text() == "of the job's user"
    assert rank_log_files.log_tail(str(run_dir), "g", 1, 0) == ("of the job's user" if kind == "hard link" else "")


@pytest.mark.parametrize("kind", ["link", "hard link"])
async def test_stacks_replace_what_others_have_laid_in_the_folder(run_dir: Path, precious: Path, kind: str) -> None:
    _log(run_dir)
    file = rank_log_files.stacks_path(str(run_dir), "g", 1, 0)
    file.symlink_to(precious) if kind == "link" else file.hardlink_to(precious)
    dumps = StackDumps(str(run_dir), "g")
    await dumps.write(1, {0: os.getpid()})
    dumps.close()
    assert precious.read_text() == "of the job's user"
    assert f"process {os.getpid()} " in file.read_text()


def test_a_link_in_place_of_all_logs_is_refused(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run_dir / "logs").rmdir()
    (run_dir / "logs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=re.escape(f"{run_dir}/logs: it is a link, which others may have laid")):
        rank_log_files.open_log(str(run_dir), "g", 1, 0)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_link_to_the_run_folder_is_followed(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "home").symlink_to(run_dir)
    assert _log(tmp_path / "home").exists()


def test_a_folder_that_is_exchanged_while_it_is_held_changes_nothing(run_dir: Path, precious: Path) -> None:
    with rank_log_files.hold_log_folder(str(run_dir), "g", "g1") as held:
        (run_dir / "logs" / "g").rename(run_dir / "logs" / "aside")
        _lay_link(rank_log_files.log_path(str(run_dir), "g", 1, 0), precious, run_dir)
        os.write(held.append("rank0.log"), b"a line of the rank")
    assert precious.read_text() == "of the job's user"
    assert (run_dir / "logs" / "aside" / "g1" / "rank0.log").read_text() == "a line of the rank"


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_only_the_owner_can_write_to_the_folders_of_a_job(run_dir: Path, umask: int) -> None:
    (run_dir / "logs" / "g").mkdir()
    (run_dir / "logs" / "g").chmod(0o2775)
    before = os.umask(umask)
    try:
        file = _log(run_dir)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.parents[1].stat().st_mode) == 0o2755
    assert not file.parent.stat().st_mode & 0o022
    assert not file.stat().st_mode & 0o022


def test_a_link_to_an_own_folder_is_no_own_folder(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run_dir / "logs" / "g").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="it is a link, which others may have laid"):
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
    with HeldFolder.open(run_dir) as folder, pytest.raises(UntrustedPath):
        folder.make_own_folder("made")
    assert sorted(path.name for path in run_dir.iterdir()) == ["logs", "made"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp"])
def test_a_name_is_no_path(run_dir: Path, name: str) -> None:
    with HeldFolder.open(run_dir) as folder, pytest.raises(UntrustedPath, match="must be one name"):
        folder.create(name)
