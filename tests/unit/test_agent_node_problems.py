"""What a node lacks for a job is found when its agent starts."""

import os
import pwd
from pathlib import Path

import pytest

from muster.daemon.agent.start_checks import node_problems
from muster.daemon.host.process.cgroup_memory import MemoryLeft
from muster.v1.common_pb2 import JobSpec

PATH = os.defpath
NOBODY = 3_999_999_999
"""A uid that no host knows."""


def spec(folder: Path, *command: str, **keys: str) -> JobSpec:
    (folder / "run").mkdir(exist_ok=True)
    keys = {"run_dir": str(folder / "run"), "work_dir": str(folder), **keys}
    return JobSpec(command=command or ["sh"], **keys)  # type: ignore[arg-type]


def on_another_node(job: JobSpec, folder: Path, path: str = PATH) -> str:
    """What a node says whose `folder` lacks all that the first node has written into its own."""
    environ: dict[str, str] = {}
    first = JobSpec()
    first.CopyFrom(job)
    first.run_dir = str(folder / "of the first node")
    node_problems.write_tokens(first, environ)
    return node_problems.find_problems(job, environ, path)


def here(job: JobSpec, path: str = PATH) -> str:
    environ: dict[str, str] = {}
    node_problems.write_tokens(job, environ)
    return node_problems.find_problems(job, environ, path)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ["no-such-program"],
            "command: no program 'no-such-program' is in PATH: name its path, or set PATH (in job.toml: [env])",
        ),
        (
            ["KEY=s3cret", "x"],
            "command: no program 'KEY=...' is in PATH: name its path, or set PATH (in job.toml: [env])",
        ),
        (["./go.sh"], "command: the program {}/go.sh does not exist"),
        (["./plain"], "command: the program {}/plain can't be run by you"),
        (["sh", "go.sh"], "command: the script {}/go.sh does not exist"),
        (["sh", "-e", "go.sh"], ""),
        (["sh", "plain", "--lr", "1"], ""),
        (["{}/none/python3", "plain"], "command: the program {}/none/python3 does not exist"),
    ],
)
def test_a_command_that_can_not_start_is_told(command: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "plain").touch(0o644)
    job = spec(tmp_path, *(word.format(tmp_path) for word in command))
    assert here(job) == words.format(tmp_path)


def test_a_folder_that_python_can_run_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "python3").touch(0o755)
    job = spec(tmp_path, "python3", "app")
    assert here(job, str(tmp_path)) == f"command: the script {tmp_path}/app is a folder"
    (tmp_path / "app" / "__main__.py").touch()
    assert here(job, str(tmp_path)) == ""


def test_relative_folders_of_path_begin_at_work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent itself runs elsewhere."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "train").touch(0o755)
    (tmp_path / "elsewhere" / "wrong").mkdir(parents=True)
    (tmp_path / "elsewhere" / "wrong" / "eval").touch(0o755)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert here(spec(tmp_path, "train"), f"tools:{PATH}") == ""
    assert "no program 'eval' is in PATH" in here(spec(tmp_path, "eval"), f"wrong:{PATH}")


def test_a_user_whom_only_the_first_node_knows_is_told(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    node_problems.write_tokens(spec(tmp_path), environ)
    assert environ[node_problems.USER_NAME] == pwd.getpwuid(os.getuid()).pw_name
    assert node_problems.problem_of_user(os.getuid(), "ada") == ""
    assert node_problems.problem_of_user(NOBODY, "") == "", "no node knows them"
    words = f"the user ada is not known here, and is on the job's first node: getent passwd {NOBODY} must find them"
    assert node_problems.problem_of_user(NOBODY, "ada") == words


def test_a_missing_work_dir_is_told_once(tmp_path: Path) -> None:
    job = spec(tmp_path, "sh", "go.sh", work_dir=f"{tmp_path}/none")
    assert here(job) == f"work_dir = '{tmp_path}/none' does not exist"


def test_all_that_is_missing_is_told_together(tmp_path: Path) -> None:
    job = spec(tmp_path, "sh", f"{tmp_path}/go.sh", work_dir=f"{tmp_path}/none", durable_dir=f"{tmp_path}/run/x/y")
    (tmp_path / "run" / "x").touch()
    problems = here(job).split("; ")
    assert [problem.partition(" ")[0] for problem in problems] == ["work_dir", "command:", "durable_dir"]


def test_a_run_dir_that_each_node_has_for_itself_is_told(tmp_path: Path) -> None:
    """Whatever its file system is: the first node's token is not there."""
    job = spec(tmp_path)
    words = (
        f"run_dir = '{tmp_path}/run' is not the folder that the job's first node sees: name one that all nodes share"
    )
    assert on_another_node(job, tmp_path) == words
    node_problems.write_tokens(job, {})  # another job's, on this node alone
    assert on_another_node(job, tmp_path) == words
    assert here(job) == ""


def test_without_a_token_the_folder_must_exist(tmp_path: Path) -> None:
    """`muster run --local` writes none, nor does the batch process of an earlier version."""
    job = spec(tmp_path)
    assert node_problems.find_problems(job, {}, PATH) == ""
    job.run_dir += "/none"
    assert node_problems.find_problems(job, {}, PATH).startswith(f"run_dir = '{tmp_path}/run/none' does not exist: ")


def test_a_limit_below_what_memory_checkpoints_need_is_told_before_the_start(tmp_path: Path) -> None:
    limit = MemoryLeft(10**9, "the memory limit of the cgroup /job", 3 * 10**9)
    assert node_problems.problem_of_memory(3 * 10**9, limit) == ""
    assert node_problems.problem_of_memory(4 * 10**9, None) == ""
    assert node_problems.problem_of_memory(4 * 10**9, limit) == (
        "memory checkpoints need 4.0 GB of this node, and the memory limit of the cgroup /job is 3.0 GB: ask for more "
        "(--mem), or set checkpoint.memory = false"
    )
    job = spec(tmp_path)
    job.memory_bytes = 1 << 62
    assert "memory checkpoints need" in here(job)
