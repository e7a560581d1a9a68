"""Paths of a job that a login node can judge, and those that it leaves to the nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from muster.launcher.errors import WrongInput
from muster.launcher.submission.path_checks import check_paths, doubt_of_output
from muster.v1.common_pb2 import JobSpec

OTHER = 4711


def spec(folder: Path, *command: str, run_dir: str = "", work_dir: str = "") -> JobSpec:
    """A job of `folder`, which is a file system of its own."""
    return JobSpec(command=command, run_dir=run_dir or str(folder / "run"), work_dir=work_dir or str(folder))


def look(job: JobSpec, mounts: str, beside: Path = Path("/nowhere")) -> list[str]:
    return check_paths(job, mounts, "/usr/bin:/bin", beside)


def shared(folder: Path, kind: str = "nfs4") -> str:
    return f"/dev/sda1 / ext4 rw 0 0\nfiler:/x {folder} {kind} rw 0 0\n"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["python3", "train.py"], "the script {}/train.py does not exist"),
        (["python3", "-u", "{}/none.py", "--lr", "1"], "the script {}/none.py does not exist"),
        (["bash", "go.sh"], "the script {}/go.sh does not exist"),
        (["{}/venv/bin/python", "-m", "x"], "the program {}/venv/bin/python does not exist"),
        (["./file"], "the program {}/file can't be run by you"),
        (["python3", "."], "the script {} is a folder"),
        (["python3", 300 * "x"], "xxx can't be reached: File name too long"),
    ],
)
def test_what_is_missing_on_shared_storage_is_refused(command: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o644)
    job = spec(tmp_path, *(word.format(tmp_path) for word in command))
    with pytest.raises(WrongInput) as refused:
        look(job, shared(tmp_path))
    assert words.format(tmp_path) in refused.value.message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders to another user")
@pytest.mark.parametrize(
    ("mode", "uid", "gid", "doubtful"),
    [
        (0o2770, 0, OTHER, True),
        (0o3770, 0, OTHER, True),
        (0o777, 0, OTHER, True),
        (0o1777, OTHER, OTHER, True),
        (0o755, OTHER, OTHER, True),
        (0o1777, 0, OTHER, False),
        (0o755, 0, OTHER, False),
        (0o775, 0, 0, False),
    ],
)
def test_a_folder_in_which_others_lead_slurms_output_elsewhere_is_told(
    mode: int, uid: int, gid: int, doubtful: bool, tmp_path: Path
) -> None:
    os.chown(tmp_path, uid, gid)
    tmp_path.chmod(mode)
    words = f"run_dir = '{tmp_path}' (mode {mode:04o}) lets others lay links there"
    assert doubt_of_output(tmp_path).startswith(words) == doubtful
    assert bool(doubt_of_output(tmp_path)) == doubtful


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    job = spec(tmp_path, "python3", f"{tmp_path}/train.py", work_dir=f"{tmp_path}/none", run_dir="/sahred/run")
    with pytest.raises(WrongInput) as refused:
        look(job, shared(tmp_path))
    for words in (
        "/sahred does not exist: is it misspelt?",
        f"work_dir = '{tmp_path}/none' does not exist",
        f"the script {tmp_path}/train.py does not exist",
    ):
        assert words in refused.value.message


@pytest.mark.parametrize(("kind", "is_local"), [("tmpfs", True), ("ext4", True), ("nfs4", False), ("lustre", False)])
def test_a_run_dir_that_is_local_to_the_host_is_refused(kind: str, is_local: bool, tmp_path: Path) -> None:
    mounts = f"/dev/sda1 / ext4 rw 0 0\nx /tmp {kind} rw 0 0\n"
    job = spec(tmp_path, "true", run_dir="/tmp/run")
    if is_local:
        with pytest.raises(WrongInput, match=f"run_dir = '/tmp/run' is local to each host .{kind}.: name a folder"):
            look(job, mounts)
    else:
        assert look(job, mounts) == []


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_durable_dir_that_is_local_to_the_host_is_said_and_refused_for_several_nodes(
    nodes: int, tmp_path: Path
) -> None:
    mounts = f"{shared(tmp_path)}x /tmp tmpfs rw 0 0\n"
    job = spec(tmp_path, "true")
    job.nodes, job.durable_dir = nodes, "/tmp/checkpoints"
    words = "durable_dir = '/tmp/checkpoints' is local to each host (tmpfs): name a folder that all nodes share"
    if nodes == 1:
        assert look(job, mounts) == [words]
    else:
        with pytest.raises(WrongInput) as refused:
            look(job, mounts)
        assert refused.value.message == words


@pytest.mark.parametrize(
    ("durable_dir", "said"),
    [
        ("/sahred/ck", ["durable_dir = '/sahred/ck': this host has no /sahred: is it misspelt?"]),
        ("/usr/none/ck", []),
        ("s3://bucket/ck", []),
        ("", []),
    ],
)
def test_a_durable_dir_that_may_be_misspelt_is_said(durable_dir: str, said: list[str], tmp_path: Path) -> None:
    job = spec(tmp_path, "true")
    job.durable_dir = durable_dir
    assert look(job, shared(tmp_path)) == said


def test_what_only_compute_nodes_may_have_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (doubt,) = look(spec(tmp_path, "/opt/of-nodes/python", "train.py"), shared(tmp_path))
    assert doubt == "command: the program /opt/of-nodes/python does not exist on this host: the nodes must have it"


@pytest.mark.parametrize(
    "command",
    [["env", "x"], ["python3", "-m", "x"], ["python3", "-c", "x"], ["python3", "-W", "x", "y"]],
)
def test_what_nobody_can_judge_is_left_alone(command: list[str], tmp_path: Path) -> None:
    assert look(spec(tmp_path, *command), shared(tmp_path)) == []


def test_a_program_that_is_not_in_the_path_is_said_and_left_to_the_nodes(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (doubt,) = look(spec(tmp_path, "pyton3", "train.py"), shared(tmp_path))
    assert doubt == "command: no program 'pyton3' is in PATH on this host: the nodes must have it"


def test_the_path_of_env_is_searched(tmp_path: Path) -> None:
    job = spec(tmp_path, "train")
    job.env["PATH"] = str(tmp_path)
    (tmp_path / "train").touch(0o755)
    assert look(job, shared(tmp_path)) == []


@pytest.mark.parametrize(("script", "hint"), [("train.py", True), ("{}/train.py", False)])
def test_a_script_that_lies_beside_job_toml_is_found(script: str, hint: bool, tmp_path: Path) -> None:
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir(), project.mkdir()
    (project / "train.py").touch()
    job = spec(tmp_path, "python3", script.format(home), work_dir=str(home))
    words = f"does not exist: {project}/train.py does: submit from {project}, or set work_dir"
    try:
        said = look(job, shared(tmp_path), beside=project)[0]
    except WrongInput as error:
        said = error.message
    assert said.startswith("command: the script ")
    assert (words in said) == hint


@pytest.mark.parametrize(("version", "is_old"), [("3.8", True), ("2.7", True), ("3.9", False), ("3.14", False)])
def test_an_interpreter_that_is_too_old_for_a_quick_restart_is_said(tmp_path: Path, version: str, is_old: bool) -> None:
    (tmp_path / f"python{version}").touch(0o755)
    (tmp_path / "python").symlink_to(f"python{version}")
    (tmp_path / "train.py").touch()
    doubts = look(spec(tmp_path, f"{tmp_path}/python", "train.py"), shared(tmp_path))
    assert [f"is Python {version}: each restart of a rank takes the time of its imports" in one for one in doubts] == [
        True
    ] * is_old
