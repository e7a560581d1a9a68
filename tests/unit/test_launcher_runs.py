"""`muster runs`: what is kept of a run, what is left out, and what differs between two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from muster.daemon.agent.batch import run_summary
from muster.daemon.agent.batch.run_summary import Summarised
from muster.daemon.agent.training import hardware_file
from muster.daemon.preflight import inventory
from muster.launcher.errors import SiteFault, WrongInput
from muster.launcher.main import parser
from muster.launcher.runs import record, secrets
from muster.launcher.runs.difference import changes, differences, outcome_differences
from muster.launcher.runs.kept import RunRecord
from muster.launcher.runs.origins import MOST_DIFF_CHARS, origins, script_folder
from muster.launcher.runs.store import FILE, RunStore
from muster.launcher.spec import spec
from muster.launcher.submission.job_message import job_message
from muster.launcher.submission.script import Submission
from muster.v1.api_pb2 import GangView

JOB = """
name = "tiny"
nodes = 2
command = ["{python}", "train.py", "--api-key", "k3y", "--lr=1"]
run_dir = "{folder}/run"
work_dir = "{folder}"
[env]
WANDB_API_KEY = "xyz"
LR = "0.1"
[record]
data = "c4"
seed = 17
{more}
"""


def submission(folder: Path, more: str = "", gang: str = "g1") -> Submission:
    (folder / "run").mkdir(exist_ok=True)
    job = spec.parse(JOB.format(python=sys.executable, folder=folder, more=more), "job.toml")
    return Submission(job, job_message(job, ()), gang, "")


async def submit(folder: Path, store: Path, number: int = 1, more: str = "", **variables: str) -> None:
    environ = {"MUSTER_RUNS": str(store), "PATH": os.environ["PATH"], **variables}
    async with RunRecord(submission(folder, more, f"g{number}"), environ) as kept:
        kept.keep(number)


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """git and Python are asked here, and answer late on a busy machine."""
    monkeypatch.setattr("muster.launcher.runs.origins.DEADLINE_S", 60.0)


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


async def muster_runs(store: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    options = parser().parse_args(["runs", "--store", str(store), *words])
    assert await options.row.run(options) == 0
    return capsys.readouterr().out


async def test_a_run_is_kept_with_its_code_and_without_its_secrets(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "train.py").write_text("print(2)\n")
    await submit(repository, tmp_path / "runs", HF_TOKEN="t0p", DATABASE="https://me:pw@host/x", HOME="/h")
    shown = await muster_runs(tmp_path / "runs", capsys, "show", "tiny", "--json")
    found = json.loads(shown)
    for secret in ("t0p", "me:pw", "xyz", "k3y"):
        assert secret not in shown
    assert found["environment"] == {
        "DATABASE": secrets.LEFT_OUT, "HF_TOKEN": secrets.LEFT_OUT, "HOME": "/h",
        "MUSTER_RUNS": str(tmp_path / "runs"), "PATH": os.environ["PATH"],
    }  # fmt: skip
    assert found["spec"]["env"] == {"LR": "0.1", "WANDB_API_KEY": secrets.LEFT_OUT}
    assert found["spec"]["command"][1:] == ["train.py", "--api-key", secrets.LEFT_OUT, "--lr=1"]
    assert (found["data"], found["seed"]) == ("c4", "17")
    assert len(found["repository"]["commit"]) == 40
    assert "+print(2)" in found["repository"]["diff"]
    assert found["interpreter"]["packages"]["pytest"] == pytest.__version__
    assert found["outcome"] == {}


async def test_the_records_are_nobody_elses(repository: Path, tmp_path: Path) -> None:
    await submit(repository, tmp_path / "runs")
    new = tmp_path / "runs" / record.NEW
    assert [path.stat().st_mode & 0o777 for path in (new, *new.iterdir())] == [0o700, 0o600]
    RunStore(tmp_path / "runs").runs()
    assert (tmp_path / "runs" / FILE).stat().st_mode & 0o777 == 0o600
    assert list(new.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of another user")
async def test_no_record_goes_where_another_user_has_taken_the_name(repository: Path, tmp_path: Path) -> None:
    shared = tmp_path / "runs"
    (shared / record.NEW).mkdir(parents=True)
    os.chown(shared / record.NEW, 65534, 65534)
    await submit(repository, shared)
    assert list((shared / record.NEW).iterdir()) == []
    with pytest.raises(SiteFault, match="another user has taken this name"):
        RunStore(shared).runs()
    (shared / record.NEW).rmdir()
    (shared / FILE).unlink()
    (tmp_path / "theirs").touch()
    (shared / FILE).symlink_to(tmp_path / "theirs")
    with pytest.raises(SiteFault, match="it is a link"):
        RunStore(shared).runs()


async def test_two_runs_differ_in_what_was_changed(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await submit(repository, tmp_path / "runs", 1, LR="1")
    (repository / "train.py").write_text("print(2)\n")
    await submit(repository, tmp_path / "runs", 2, 'note = "again"', LR="2")
    lines = (await muster_runs(tmp_path / "runs", capsys, "diff", "1", "2")).splitlines()
    assert lines[:3] == ["key\tjob 1\tjob 2", "environment.LR\t1\t2", "note\t\tagain"]
    assert "++print(2)" in lines


async def test_the_folder_is_named_before_or_after_the_action(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await submit(repository, tmp_path / "runs")
    before = await muster_runs(tmp_path / "runs", capsys, "show", "1")
    assert await muster_runs(tmp_path / "none", capsys, "show", "1", "--store", str(tmp_path / "runs")) == before


async def test_a_run_on_a_workstation_has_no_record_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WrongInput) as refused:
        await muster_runs(tmp_path / "runs", capsys, "show", "local-0a1b2c3d")
    assert "keeps no record" in (refused.value.hint or "")


async def test_runs_are_listed_the_newest_first(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        await submit(repository, tmp_path / "runs", number)
    lines = (await muster_runs(tmp_path / "runs", capsys)).splitlines()
    assert [line.split("\t")[:2] for line in lines] == [["job", "name"], ["2", "tiny"], ["1", "tiny"]]
    assert await muster_runs(tmp_path / "runs", capsys, "list", "--name", "other") == ""


async def test_how_a_run_went_is_read_beside_its_logs(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The batch process of the job keeps it, for a job that was requeued, too."""
    await submit(repository, tmp_path / "runs")
    view = GangView(gang_id="g1", phase="RUNNING", generation=2, step=40)
    view.ranks.add(rank=0, node="n1")
    view.recoveries.add(generation=2, action="restart in place", cause="rank 0 exited")
    view.training.metrics.add(name="sampler_position", step=40, greatest=1280)

    class Coordinator:
        async def view(self, unlaunched: Any = ()) -> Any:
            return view

    seen = Summarised(Coordinator(), f"{repository}/run", "g1")
    await seen.view()
    view.phase, view.final, view.step = "DONE", True, 50
    view.ClearField("training")  # the view of an ended job has none
    assert await seen.view() is view
    shown = await muster_runs(tmp_path / "runs", capsys, "show", "1")
    assert "phase\tDONE, step 50, generation 2" in shown
    assert "ranks\tn1: 0" in shown
    assert "sampler\tposition 1,280 at step 40" in shown
    assert "recovery\tgeneration 2: restart in place: rank 0 exited" in shown


async def test_a_run_that_slurm_has_ended_is_not_queued_where_nobody_tells_how_it_went(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the coordinator is down. Slurm has forgotten job 4."""
    for number in (1, 2, 3, 4):
        await submit(repository, tmp_path / "runs", number)
    run_summary.write(f"{repository}/run", "g2", {"phase": "RUNNING", "step": 40})
    states = {1: "PENDING", 2: "RUNNING", 3: "CANCELLED"}
    jobs = [{"job_id": number, "job_state": [state]} for number, state in states.items()]
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\n[ $3 = --jobs=1,2,3,4 ] && echo '{json.dumps({'jobs': jobs})}'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    options = parser().parse_args(["runs", "--store", str(tmp_path / "runs")])
    capsys.readouterr()
    assert await options.row.run(options) == 0
    said = capsys.readouterr()
    assert said.err.startswith("muster: how runs go is as they and Slurm have told it: ")
    lines = said.out.splitlines()
    assert [line.split("\t")[3:5] for line in lines[1:]] == [
        ["not in Slurm", ""], ["CANCELLED", ""], ["RUNNING", "40"], ["QUEUED", ""]
    ]  # fmt: skip


async def test_slurm_has_no_word_on_a_run_of_another_cluster_with_the_same_home(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Job 1 trains on cluster a, job 2 waits there. Cluster b has a job 1 of its own, which failed, and no job 2."""
    failed = json.dumps({"jobs": [{"job_id": 1, "job_state": ["FAILED"]}]})
    for name, text in (("squeue", f"echo '{failed}'"), ("scontrol", "echo AccountingStorageHost = d\necho $SHOWN")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SHOWN", "ClusterName = a")
    for number in (1, 2):
        await submit(repository, tmp_path / "runs", number)
    run_summary.write(f"{repository}/run", "g1", {"phase": "RUNNING", "step": 40})
    for shown, phases in (("ClusterName = b", ["QUEUED", "RUNNING"]), ("ClusterName = a", ["not in Slurm", "FAILED"])):
        monkeypatch.setenv("SHOWN", shown)
        lines = (await muster_runs(tmp_path / "runs", capsys)).splitlines()
        assert [line.split("\t")[3] for line in lines[1:]] == phases


async def test_the_hardware_of_a_run_is_shown_and_compared(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, line in ((1, "8 x H100, 192 processors"), (2, "8 x H200, 192 processors")):
        await submit(repository, tmp_path / "runs", number)
        run_summary.write(f"{repository}/run", f"g{number}", {"phase": "DONE", "final": True})
        for node in ("n1", "n2"):
            hardware_file.write(f"{repository}/run", f"g{number}", node, line)
    assert "hardware\tn1 n2: 8 x H100, 192 processors" in await muster_runs(tmp_path / "runs", capsys, "show", "1")
    shown = await muster_runs(tmp_path / "runs", capsys, "diff", "1", "2")
    assert "hardware\t2 nodes with 8 x H100, 192 processors\t2 nodes with 8 x H200, 192 processors" in shown


def test_a_node_says_what_it_has_as_its_kernel_tells_it(tmp_path: Path) -> None:
    driver = tmp_path / "proc/driver/nvidia"
    for bus in ("0000:18:00.0", "0000:2a:00.0"):
        (driver / "gpus" / bus).mkdir(parents=True)
        (driver / "gpus" / bus / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 160\n")
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC 9654\n" * 2)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       1584718212 kB\n")
    rest = "AMD EPYC 9654, 2 processors, 1500 GiB"
    assert inventory.describe_node(tmp_path) == f"2 x NVIDIA H100 80GB HBM3, {rest}"
    for version in ("x86_64 Kernel Module  570.86.15  Thu Jan 23", "Open Kernel Module for x86_64  570.86.15  Rel"):
        (driver / "version").write_text(f"NVRM version: NVIDIA UNIX {version}\nGCC version:  gcc version 12.2.0\n")
        assert inventory.describe_node(tmp_path) == f"2 x NVIDIA H100 80GB HBM3, driver 570.86.15, {rest}"


async def test_storage_that_takes_no_summary_ends_no_job(tmp_path: Path) -> None:
    class Coordinator:
        async def view(self, unlaunched: Any = ()) -> Any:
            return GangView(gang_id="g1", phase="DONE", final=True)

    assert (await Summarised(Coordinator(), str(tmp_path / "none"), "g1").view()).final
    assert run_summary.read(str(tmp_path / "none"), "g1") == {}


async def test_a_store_that_can_not_be_written_is_said_and_the_job_is_queued(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    await submit(repository, tmp_path / "file" / "runs")
    assert "no record of this run is kept" in capsys.readouterr().err


async def test_no_record_is_kept_of_a_job_that_wants_none_or_was_refused(repository: Path, tmp_path: Path) -> None:
    await submit(repository, tmp_path / "runs", more="keep = false")
    async with RunRecord(submission(repository), {"MUSTER_RUNS": str(tmp_path / "runs")}):
        pass
    assert not (tmp_path / "runs").exists()


async def test_a_record_that_is_damaged_is_named_and_the_others_are_shown(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await submit(repository, tmp_path / "runs")
    (tmp_path / "runs" / record.NEW / "bad.json").write_text("{")
    assert "\ttiny\t" in await muster_runs(tmp_path / "runs", capsys)
    assert "bad.json" in RunStoreNotes(tmp_path / "runs")


def RunStoreNotes(folder: Path) -> dict[str, str]:
    store = RunStore(folder)
    store.runs()
    return store.left_out


def test_a_store_that_is_damaged_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("no database" * 100)
    with pytest.raises(SiteFault, match="can't be read or written: file is not a database"):
        RunStore(tmp_path).runs()


async def test_without_a_repository_that_is_said(tmp_path: Path) -> None:
    found = await origins(["sh", "x.sh"], str(tmp_path), os.environ)
    assert found["repository"] == {"unknown": f"{tmp_path} is in no repository with a commit"}
    assert found["interpreter"] == {"unknown": "the command starts with no Python that this host has"}


async def test_a_large_diff_is_cut(repository: Path) -> None:
    (repository / "train.py").write_text("x = 1\n" * MOST_DIFF_CHARS)
    found = (await origins(["python3", "train.py"], str(repository), os.environ))["repository"]
    assert len(found["diff"]) == MOST_DIFF_CHARS
    assert found["diff_cut"]


async def test_no_program_that_a_repository_names_is_executed(repository: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (repository / ".gitattributes").write_text("*.py filter=a=b\n")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "filtered")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(repository), "inner")
    for folder in (repository, repository / "inner"):
        for key in ("filter.a=b.clean", "filter.a=b.process", "core.fsmonitor"):
            git(folder, "config", key, f"touch {ran}; exit 1")
        git(folder, "config", "filter.a=b.required", "true")
        (folder / "train.py").write_text("print(7)\n")
    found = (await origins(["sh", "train.py"], str(repository), os.environ))["repository"]
    assert "+print(7)" in found["diff"]
    assert not ran.exists()


async def test_a_program_that_hangs_is_given_up(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.launcher.runs.origins.DEADLINE_S", 5.0)
    slow = tmp_path / "python3"
    slow.write_text("#!/bin/sh\nexec sleep 1000\n")
    slow.chmod(0o755)
    found = await origins([str(slow), "train.py"], str(repository), os.environ)
    assert "no answer within" in found["interpreter"]["unknown"]
    assert found["repository"]["commit"]


def test_the_folder_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "t.py").touch()
    assert script_folder(["python3", "-u", "a/t.py"], str(tmp_path)) == tmp_path / "a"
    assert script_folder(["python3", "-m", "train"], str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("WANDB_API_KEY", "x", True),
        ("MYTOKEN", "x", True),
        ("password", "x", True),
        ("MONKEY", "banana", False),
        ("KEYBOARD", "us", False),
        ("PATH", "/usr/bin", False),
        ("AUTHOR", "me", False),
        ("PROXY", "http://u:p@proxy:3128", True),
        ("X", "hf_abcdefghijklmnopqrst", True),
        ("X", "AKIAABCDEFGHIJKLMNOP", True),
        ("SLURM_JOB_ID", "4711", False),
        ("MYSQL_PWD", "x", True),
        ("PGPASS", "x", True),
        ("PWD", "/h", False),
        ("SLACK_WEBHOOK", "x", True),
        ("wandb.key", "x", True),
        ("PIP_INDEX_URL", "https://token@packages.example/simple", True),
        ("REDIS", "redis://:pw@host/0", True),
        ("REMOTE", "ssh://git@host/x", False),
        ("HEADER", "Authorization: Bearer abcdefghijklmnop", True),
        ("X", "ASIAABCDEFGHIJKLMNOP", True),
        ("X", "ghu_abcdefghijklmnopqrst", True),
        ("AWSKEY", "x", True),
        ("APIKEY", "x", True),
        ("sshKeys", "x", True),
        ("S3KEY_PROD", "x", True),
        ("DBPWD", "x", True),
        ("DBPASSWD", "x", True),
        ("CREDS", "x", True),
        ("CONNECTION_STRING", "x", True),
        ("OLDPWD", "/h", False),
        ("TURKEY_RUNS", "3", False),
        ("KEYRING_BACKEND", "file", False),
    ],
)
def test_what_looks_like_a_secret(name: str, value: str, secret: bool) -> None:
    assert secrets.is_secret(name, value) is secret


def test_a_variable_that_the_user_names_is_left_out() -> None:
    assert secrets.environment({"PLAIN": "x"}, ("PLAIN",)) == {"PLAIN": secrets.LEFT_OUT}


def test_a_command_keeps_what_is_no_secret() -> None:
    words = ["train.py", "--token=abc", "--password", "--lr", "0.1", "s3://u:p@h/x"]
    assert secrets.command(words) == [
        "train.py", f"--token={secrets.LEFT_OUT}", "--password", "--lr", "0.1", secrets.LEFT_OUT,
    ]  # fmt: skip
    words = ["login", "0123456789abcdef0123456789abcdef01234567", "a1B2c3D4e5F6g7H8i9J0k", "--rev", "0" * 40, "b" * 40]
    assert secrets.command(words) == ["login", secrets.LEFT_OUT, secrets.LEFT_OUT, "--rev", "0" * 40, secrets.LEFT_OUT]
    words = ["configs/Llama3-70b-a1B2c3D4e5F6g7H8i9J0k.py", "train_transformer_large_scale_baseline", "Llama-3-70B-v2"]
    assert secrets.command(words) == words
    words = ["+wandb.api_key=abc", "lr=1", "export HF_TOKEN=abc; python x", "https://u:p@h/?token=x", "token.py", "y"]
    out = secrets.LEFT_OUT
    assert secrets.command(words) == [
        f"+wandb.api_key={out}", "lr=1", f"export HF_TOKEN={out}", out, "token.py", "y",
    ]  # fmt: skip


def test_a_diff_keeps_what_is_no_secret() -> None:
    diff = '+password = "hunter2"\n+{"api_key": "x"}\n+token = encode(x)\n+name = "y"\n+-----BEGIN KEY-----\n+MII\n'
    out = secrets.LEFT_OUT
    kept = f'+password = "{out}"\n+{{"api_key": "{out}"}}\n+token = encode(x)\n+name = "y"\n+{out}'
    assert secrets.text(diff) == kept


def test_equal_records_have_no_difference() -> None:
    one = {"gang_id": "a", "spec": {"nodes": 2}, "repository": {"diff": "x"}}
    other = {"gang_id": "b", "spec": {"nodes": 2}, "repository": {"diff": "x"}}
    assert list(differences(one, other)) == []
    assert list(changes(one, other)) == []


def test_how_two_runs_went_differs_in_numbers_that_have_names() -> None:
    metrics = [{"name": "loss", "step": "9", "ranks": 2, "least": 1.0, "median": 1.25, "greatest": 2.0}]
    goodput = {"since_s": 1e9, "allocated_node_s": 200.0, "useful_node_s": 150.0}
    one = {
        "training": {"step_s": 0.1738117, "last_step": "400", "done_s": 1795836323.5, "metrics": metrics},
        "goodput": {**goodput, "lost": [{"category": "start", "node_s": 50.0}]},
    }
    other = {"training": {"step_s": 0.1738117, "metrics": [{"name": "loss", "median": "NaN"}]}, "goodput": goodput}
    assert list(outcome_differences(one, other)) == [
        ("goodput.start", "25.0%", "(absent)"),
        ("training.loss", "1.25", "nan"),
    ]


def test_tables_of_a_job_differ_key_by_key() -> None:
    one, other = ({"spec": {"estimate_tables": json.dumps({"model": {"layers": count}})}} for count in (2, 4))
    assert list(differences(one, other)) == [("spec.estimate_tables.model.layers", "2", "4")]


def test_to_look_into_a_folder_without_records_leaves_nothing_there(tmp_path: Path) -> None:
    assert RunStore(tmp_path).runs() == []
    assert [*tmp_path.iterdir()] == []
