"""durable_dir is tried before the first step."""

import os
from pathlib import Path

import pytest

from muster.daemon.agent.start_checks.node_problems import durable_token, problem_of_durable_dir
from muster.daemon.agent.start_checks.shared_folder import token_file


def test_all_nodes_see_the_folder_of_the_batch_host(tmp_path: Path) -> None:
    folder = str(tmp_path / "new" / "ck")
    word = durable_token(folder)
    assert word
    assert durable_token(folder) == word, "another job of the same folder"
    assert problem_of_durable_dir(folder, word) == ""


def test_a_folder_that_is_each_nodes_own_is_told(tmp_path: Path) -> None:
    word = durable_token(str(tmp_path / "n0"))
    durable_token(str(tmp_path / "n1"))
    for node in ("n1", "n2"):
        assert "not the folder that the job's first node sees" in problem_of_durable_dir(str(tmp_path / node), word)


def test_what_is_no_folder_is_told_by_every_node(tmp_path: Path) -> None:
    file = tmp_path / "ok.toml"
    file.touch()
    os.mkfifo(pipe := tmp_path / "pipe")  # to open it would wait for a writer
    for place in (file, file / "ck", pipe, pipe / "ck"):
        assert durable_token(str(place)) == ""
        assert "durable_dir = " in (words := problem_of_durable_dir(str(place), ""))
        assert "name another folder" in words


@pytest.mark.parametrize("mode", [0o757, 0o777, 0o2777])
def test_a_folder_that_others_can_write_to_is_told_before_training(tmp_path: Path, mode: int) -> None:
    """Its checkpoints would be refused when they are restored, hours later."""
    folder = tmp_path / "ck"
    word = durable_token(str(folder))
    folder.chmod(mode)
    problem = problem_of_durable_dir(str(folder), word)
    assert problem.startswith(f"durable_dir = {str(folder)!r}: all users can write to {folder} (mode {mode:04o})")
    assert problem.endswith(f"chmod o-w {folder} (or, if all of them share it, chmod +t {folder})")


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o775, 0o1777, 0o2770, 0o2775, 0o3775])
def test_a_folder_whose_checkpoints_would_be_restored_is_accepted(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "ck"
    word = durable_token(str(folder))
    folder.chmod(mode)
    assert problem_of_durable_dir(str(folder), word) == ""


@pytest.mark.parametrize("word", ["", "x"])
def test_nothing_is_asked_of_a_job_without_one(word: str) -> None:
    assert problem_of_durable_dir("", word) == ""


@pytest.mark.parametrize("kind", ["named pipe", "folder", "link to a device", "dangling link", "large", "no token"])
def test_what_another_user_has_made_in_place_of_the_token_holds_no_job_up(tmp_path: Path, kind: str) -> None:
    """A durable_dir that has the sticky bit may be shared by several users."""
    file = token_file(str(tmp_path))
    match kind:
        case "named pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "link to a device":
            file.symlink_to("/dev/zero")
        case "dangling link":
            file.symlink_to(tmp_path / "nowhere")
        case "large":
            with file.open("wb") as large:
                large.truncate(1 << 40)
        case _:
            file.write_bytes(b"0" * 31 + b"\0")
    word = durable_token(str(tmp_path))
    assert word, "the folders are compared all the same"
    assert problem_of_durable_dir(str(tmp_path), word) == ""
    assert not (tmp_path / "nowhere").exists()
    file.rename(tmp_path / "there before")
    (other := tmp_path / "of another node").mkdir()
    (tmp_path / "there before").rename(token_file(str(other)))
    assert "not the folder that the job's first node sees" in problem_of_durable_dir(str(other), word)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_the_token_of_another_user_is_not_compared(tmp_path: Path) -> None:
    """The other user could change it between two nodes."""
    assert durable_token(str(tmp_path))
    os.chown(token_file(str(tmp_path)), 4711, -1)
    word = durable_token(str(tmp_path))
    assert word not in ("", token_file(str(tmp_path)).read_text())
    assert problem_of_durable_dir(str(tmp_path), word) == ""


@pytest.mark.parametrize(("mode", "told"), [(0o2770, True), (0o3770, False), (0o700, False)])
def test_a_token_that_a_member_of_the_group_can_have_removed_is_named(tmp_path: Path, mode: int, told: bool) -> None:
    """Each of them can hold up a job of another so, and the job's user must not look for a network that fails."""
    folder = tmp_path / "ck"
    word = durable_token(str(folder))
    folder.chmod(mode)
    token_file(str(folder)).unlink()
    words = problem_of_durable_dir(str(folder), word)
    assert words.startswith(f"durable_dir = {str(folder)!r} is not the folder that the job's first node sees")
    assert (f"or another user has removed .muster-{os.geteuid()} from it" in words) == told


def test_each_user_has_a_token_of_their_own(tmp_path: Path) -> None:
    assert token_file(str(tmp_path)) != token_file(str(tmp_path), uid=4711)


def test_a_store_of_objects_is_looked_at_on_each_node() -> None:
    url = "muster-none://bucket/x"
    assert durable_token(url) == ""
    assert problem_of_durable_dir(url, "") == (
        f"durable_dir = {url!r} is in a store of objects: it needs checkpoint.trust_durable_store = true"
    )
    assert problem_of_durable_dir(url, "", trusts_store=True).startswith(f"durable_dir = {url!r} ")
