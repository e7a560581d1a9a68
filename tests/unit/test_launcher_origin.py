"""What a submitted job starts from: step 0, or a checkpoint of an earlier run, or the one that --resume names."""

import json
import os
import shlex
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.folder_names import JOB_IS_DONE
from muster.daemon.testing.scripted_world import ScriptedWorld
from muster.daemon.transport.gang_ids import differences, job_identity
from muster.daemon.transport.site_config import Site
from muster.launcher.commands.submit import prepare, prepared, submit
from muster.launcher.errors import LauncherError, Unavailable, WrongInput
from muster.launcher.main import parser
from muster.launcher.output.screen import Screen
from muster.launcher.output.tables import gang_details
from muster.launcher.submission.notes import notes
from muster.launcher.submission.origin import Asked, choose_origin
from muster.launcher.submission.registration import Registration
from muster.launcher.submission.storage_look import look
from muster.v1.api_pb2 import CheckpointView, GangRef, GangView
from muster.v1.common_pb2 import JobSpec

T = TypeVar("T")


class Known:
    """A coordinator that knows one gang."""

    def __init__(self, view: GangView | None) -> None:
        self._view = view

    async def newest_run(self, spec: JobSpec) -> GangView | None:
        return self._view

    async def describe(self, ref: GangRef) -> GangView:
        if self._view is None:
            raise WrongInput(f"Slurm job {ref.slurm_job_id} is not known to Muster")
        return self._view


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    return JobSpec(
        name="train", command=["python3", "train.py"], durable_dir=str(tmp_path / "durable"), memory_checkpoint=True
    )


def left(spec: JobSpec, step: int = 176, gang: str = "train-u0-0123456789ab", **manifest: object) -> str:
    """A complete checkpoint in the durable folder."""
    folder = Path(spec.durable_dir, f"step_{step:08}_g2_{gang}")
    folder.mkdir(parents=True)
    (folder / durable_folders.METADATA).touch()
    (folder / durable_folders.MANIFEST).write_text(json.dumps({"gang": gang, "step": step, **manifest}))
    return str(folder)


def ended(path: str, phase: str = "FAILED", exit_code: int = 98, reason: str = "the time limit is near") -> GangView:
    return GangView(
        name="train",
        slurm_job_ids=[7],
        phase=phase,
        final=True,
        exit_code=exit_code,
        reason=reason,
        checkpoint=CheckpointView(durable_path=path),
    )


@pytest.mark.parametrize("exit_code", [98, 94, 1, 97])
async def test_after_a_run_that_has_not_finished_the_next_one_goes_on(
    spec: JobSpec, capsys: pytest.CaptureFixture[str], exit_code: int
) -> None:
    path = left(spec)
    assert await choose_origin(spec, Asked(), Known(ended(path, exit_code=exit_code))) == path
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"goes on at step 176 from {path}" in err
    assert "job 7 (train), the last run of this job, has not finished (the time limit is near)" in err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"phase": "DONE", "exit_code": 0}, "is done. --resume 7 goes on at step 176 from its checkpoint"),
        ({"phase": "CANCELLED", "exit_code": 130}, "was cancelled. --resume 7 goes on at step 176"),
        ({"exit_code": 93}, "failed again and again. --resume 7 goes on at step 176"),
        ({"exit_code": 1, "not_finite": "loss: nan at step 9"}, "not finite (loss: nan at step 9). --resume 7 goes on"),
    ],
)
async def test_what_only_a_user_can_want_to_go_on_from_starts_afresh_and_says_so(
    spec: JobSpec, capsys: pytest.CaptureFixture[str], change: dict[str, object], words: str
) -> None:
    view = ended(left(spec))
    view.MergeFrom(GangView(**change))  # type: ignore[arg-type]
    assert await choose_origin(spec, Asked(), Known(view)) == ""
    err = capsys.readouterr().err
    assert "starts at step 0: job 7 (train), the last run of this job, " in err
    assert words in err
    assert await choose_origin(spec, Asked(resume="7"), Known(view)) == view.checkpoint.durable_path
    assert "goes on at step 176 from" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [Asked(), Asked(fresh=True), Asked(resume="7")])
async def test_while_a_run_is_queued_or_runs_another_is_refused(spec: JobSpec, asked: Asked) -> None:
    view = GangView(name="train", slurm_job_ids=[7], phase="RUNNING")
    with pytest.raises(WrongInput, match=r"job 7 \(train\) is the same job .*, and is RUNNING") as refused:
        await choose_origin(spec, asked, Known(view))
    assert "Nothing was queued" in refused.value.hint


async def test_fresh_starts_at_step_0_whatever_is_left(spec: JobSpec) -> None:
    path = left(spec, job=job_identity(spec))
    assert await choose_origin(spec, Asked(fresh=True), Known(ended(path))) == ""
    assert await choose_origin(spec, Asked(fresh=True), Known(None)) == ""


async def test_a_checkpoint_that_is_gone_is_not_asked_for(spec: JobSpec, capsys: pytest.CaptureFixture[str]) -> None:
    left(spec, gang="other-u0-0123456789ab")
    gone = f"{spec.durable_dir}/step_00000176_g2_train-u0-0123456789ab"
    assert await choose_origin(spec, Asked(), Known(ended(gone))) == ""
    assert "has left no checkpoint" in capsys.readouterr().err


async def test_storage_that_this_host_does_not_see_is_believed(spec: JobSpec) -> None:
    path = "/on/compute/nodes/step_00000176_g2_train-u0-0123456789ab"
    assert await choose_origin(spec, Asked(), Known(ended(path))) == path


async def test_a_run_that_nobody_knows_is_found_in_the_folder_and_its_user_decides(spec: JobSpec) -> None:
    path = left(spec, job=job_identity(spec))
    left(spec, 900, "sweep-u0-0123456789ab", job="another")
    for coordinator in (Known(None), None):
        with pytest.raises(WrongInput, match=f"an earlier run of this job, {path}, and nobody knows") as refused:
            await choose_origin(spec, Asked(), coordinator)
        assert f"--resume {path}, or --fresh" in refused.value.hint
        assert await choose_origin(spec, Asked(resume=path), coordinator) == path


async def test_a_run_that_nobody_knows_and_that_was_done_is_no_obstacle(
    spec: JobSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    left(spec, job=job_identity(spec), reason=JOB_IS_DONE)
    assert await choose_origin(spec, Asked(), Known(None)) == ""
    assert "starts at step 0: an earlier run of this job is done" in capsys.readouterr().err


SWEEP: list[dict[str, Any]] = [{"command": ["--lr=3"]}, {"env": {"LR": "3"}}, {"work_dir": "/x"}]


def changed(spec: JobSpec, change: dict[str, Any]) -> JobSpec:
    other = JobSpec()
    other.CopyFrom(spec)
    other.MergeFrom(JobSpec(**change))
    return other


@pytest.mark.parametrize("change", SWEEP)
async def test_the_jobs_of_a_sweep_inherit_nothing_from_each_other_and_say_so(
    spec: JobSpec, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path, other = left(spec, job=job_identity(spec)), changed(spec, change)
    assert job_identity(other) != job_identity(spec)
    assert await choose_origin(other, Asked(), Known(None)) == ""
    assert (
        "starts at step 0: durable_dir holds a checkpoint of a job train with another command, env or work_dir. "
        f"--resume {path} goes on from it\n" in capsys.readouterr().err
    )


@pytest.mark.parametrize("change", [{"name": "x"}, {"durable_dir": "/x"}])
async def test_jobs_of_other_names_and_folders_are_not_spoken_of(
    spec: JobSpec, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    left(spec, job=job_identity(spec))
    other = changed(spec, change)
    assert job_identity(other) != job_identity(spec)
    assert await choose_origin(other, Asked(), Known(None)) == ""
    assert capsys.readouterr().err == ""
    assert job_identity(JobSpec(name="train")) == "", "without a durable folder there is nothing to inherit"


async def test_a_checkpoint_whose_folder_names_no_gang_is_that_of_its_manifest(
    spec: JobSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier versions named folders so."""
    left(spec, gang="other-u0-0123456789ab", job="another")
    [folder] = Path(spec.durable_dir).iterdir()
    unnamed = folder.rename(folder.with_name("step_00000176_g2"))
    assert await choose_origin(spec, Asked(), Known(None)) == ""
    assert capsys.readouterr().err == "", "it is no job train"
    spec.name = "other"
    assert await choose_origin(spec, Asked(), Known(None)) == ""
    assert f"holds a checkpoint of a job other with another command, env or work_dir. --resume {unnamed} goes on" in (
        capsys.readouterr().err
    )


def test_what_differs_is_named_without_values() -> None:
    one = JobSpec(command=["a"], work_dir="/w", env={"LR": "1", "SEED": "2", "KEY": "secret", "SAME": "x"})
    other = JobSpec(command=["b"], work_dir="/w", env={"LR": "3", "SEED": "2", "SAME": "x", "EMPTY": ""})
    assert differences(one, other) == ["command", "env.EMPTY", "env.KEY", "env.LR"]
    assert differences(one, one) == []


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        (["command"], "its command differs"),
        (["work_dir", "env.LR"], "its work_dir and env.LR differ"),
        ([f"env.V{number}" for number in range(9)], "env.V4, env.V5 and 3 more differ"),
    ],
)
async def test_a_job_that_differs_starts_afresh_and_says_what_differs(
    spec: JobSpec, capsys: pytest.CaptureFixture[str], differs: list[str], words: str
) -> None:
    path = left(spec, job="another")
    view = ended(path)
    view.differs.extend(differs)
    for phase, final in (("FAILED", True), ("RUNNING", False)):
        view.phase, view.final = phase, final
        assert await choose_origin(spec, Asked(), Known(view)) == ""
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        runs = "" if final else " is RUNNING,"
        assert f"starts at step 0: job 7 (train){runs} has the same durable_dir, and is another job: " in err
        assert f"{words}. --resume 7 goes on at step 176 from its checkpoint" in err
    assert await choose_origin(spec, Asked(resume="7"), Known(view)) == path


async def test_an_own_run_that_nobody_knows_comes_before_another_job(spec: JobSpec) -> None:
    path = left(spec, job=job_identity(spec))
    view = ended(left(spec, 900, "train-u0-ba9876543210", job="another"))
    view.differs.append("command")
    with pytest.raises(WrongInput, match=f"an earlier run of this job, {path}, and nobody knows"):
        await choose_origin(spec, Asked(), Known(view))


async def test_another_job_that_has_nothing_left_is_not_spoken_of(
    spec: JobSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(spec.durable_dir).mkdir()
    view = ended(f"{spec.durable_dir}/step_00000176_g2_train-u0-0123456789ab")
    view.differs.append("command")
    assert await choose_origin(spec, Asked(), Known(view)) == ""
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("differs", "is_said"), [(["work_dir"], True), (["command"], False)])
async def test_the_same_job_from_another_folder_is_told_while_it_runs_and_not_those_of_a_sweep(
    spec: JobSpec, capsys: pytest.CaptureFixture[str], differs: list[str], is_said: bool
) -> None:
    view = ended("", phase="RUNNING")
    view.final = False
    view.differs.extend(differs)
    assert await choose_origin(spec, Asked(), Known(view)) == ""
    words = (
        "job 7 (train) is RUNNING, has the same durable_dir, and is another job: its work_dir differs. Both will run"
    )
    assert (words in capsys.readouterr().err) == is_said


async def test_resume_takes_the_newest_checkpoint_that_is_left_of_a_job(
    spec: JobSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    """Retention has removed the one that the coordinator knows, and the gang has written on."""
    newer = left(spec, 300)
    left(spec, 900, "other-u0-0123456789ab")
    gone = f"{spec.durable_dir}/step_00000176_g2_train-u0-0123456789ab"
    assert await choose_origin(spec, Asked(resume="7"), Known(ended(gone))) == newer
    words = f"goes on at step 300 from {newer}, the newest that is left of job 7 (train), which had {Path(gone).name}"
    assert words in capsys.readouterr().err
    assert await choose_origin(spec, Asked(resume="7"), Known(ended(newer))) == newer
    assert f"from {newer}, of job 7 (train)\n" in capsys.readouterr().err


@pytest.mark.parametrize("gang", ["_train-u0-0123456789ab", ""])
async def test_a_job_of_which_nothing_is_left_cannot_be_resumed(spec: JobSpec, gang: str) -> None:
    Path(spec.durable_dir).mkdir()
    gone = f"{spec.durable_dir}/step_00000176_g2{gang}"
    with pytest.raises(WrongInput, match=f"job 7 .train., which had {gone}, has none left"):
        await choose_origin(spec, Asked(resume="7"), Known(ended(gone)))
    with pytest.raises(WrongInput, match="has no durable checkpoint"):
        await choose_origin(spec, Asked(resume="7"), Known(ended("")))


@pytest.mark.parametrize("gang", ["_train-u0-0123456789ab", ""])
async def test_a_run_of_which_nothing_is_left_is_followed_from_step_0(spec: JobSpec, gang: str) -> None:
    Path(spec.durable_dir).mkdir()
    assert await choose_origin(spec, Asked(), Known(ended(f"{spec.durable_dir}/step_00000176_g2{gang}"))) == ""


async def hangs(place: str, call: Callable[[], T]) -> T:
    """Storage that does not answer."""
    raise Unavailable(f"{place} can't be looked at")


@pytest.mark.parametrize("asked", [Asked(), Asked(resume="7"), Asked(resume="/durable/step_00000176_g2")])
@pytest.mark.parametrize("known", [True, False])
async def test_storage_that_hangs_ends_the_submission_with_a_sentence(spec: JobSpec, asked: Asked, known: bool) -> None:
    view = ended(left(spec)) if known or asked.resume == "7" else None
    with pytest.raises(Unavailable, match="can't be looked at"):
        await choose_origin(spec, asked, Known(view), hangs)


async def test_a_look_at_storage_has_a_deadline_and_stops_nothing_else() -> None:
    answers = threading.Event()
    with pytest.raises(Unavailable, match="the durable folder can't be looked at: its storage has not answered for 0"):
        await look("the durable folder", answers.wait, deadline_s=0.01)
    answers.set()
    assert await look("the durable folder", answers.wait)


async def test_a_job_toml_whose_storage_hangs_ends_the_submission_with_a_sentence(tmp_path: Path) -> None:
    os.mkfifo(job := tmp_path / "job.toml")  # to open it waits for a writer
    options = parser().parse_args(["submit", str(job)])
    with pytest.raises(Unavailable, match=r"job.toml can't be looked at: its storage has not answered for 0.01 s"):
        await prepared(options, Site(), deadline_s=0.01)
    os.close(os.open(job, os.O_WRONLY))  # the thread ends


@pytest.mark.parametrize("error", [FileNotFoundError("no"), WrongInput("no")])
async def test_what_is_wrong_with_storage_is_raised(error: Exception) -> None:
    def call() -> None:
        raise error

    with pytest.raises(type(error), match="no"):
        await look("a place", call)


async def test_resume_says_whose_checkpoint_it_is(spec: JobSpec, capsys: pytest.CaptureFixture[str]) -> None:
    path = left(spec, gang="other-u0-0123456789ab")
    for resume in (path, Path(path).name):
        assert await choose_origin(spec, Asked(resume=resume), None) == path
    assert f"goes on at step 176 from {path}, of gang other-u0-0123456789ab" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("resume", "error", "words"),
    [
        ("{durable}", WrongInput, "is no complete checkpoint"),
        ("step_00000001_g1_a", WrongInput, "--resume {durable}/step_00000001_g1_a is no complete checkpoint"),
        ("s3://bucket/step_00000001_g1_a.flush1", WrongInput, "does not say who has written"),
        ("7", Unavailable, "only the coordinator knows the checkpoints of a job"),
    ],
)
async def test_what_resume_cannot_mean_is_refused(
    spec: JobSpec, resume: str, error: type[LauncherError], words: str
) -> None:
    left(spec)
    with pytest.raises(error, match=words.format(durable=spec.durable_dir)) as refused:
        await choose_origin(spec, Asked(resume=resume.format(durable=spec.durable_dir)), None)
    assert "Nothing was queued" in refused.value.hint


async def test_a_checkpoint_that_only_nodes_may_see_is_told(spec: JobSpec, capsys: pytest.CaptureFixture[str]) -> None:
    path = "/of-nodes-alone/step_00000007_g1_x"
    assert await choose_origin(spec, Asked(resume=path), None) == path
    assert f"--resume {path}: this host has no /of-nodes-alone: the nodes must have it" in capsys.readouterr().err


async def test_a_job_whose_checkpoints_muster_does_not_load_has_none_to_resume(spec: JobSpec) -> None:
    spec.memory_checkpoint = False
    with pytest.raises(WrongInput, match="Muster loads no checkpoint"):
        await choose_origin(spec, Asked(resume=left(spec)), None)


async def test_a_job_whose_checkpoints_muster_does_not_load_inherits_none(
    spec: JobSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    path = left(spec, job=job_identity(spec))
    spec.memory_checkpoint = False
    for coordinator in (Known(ended(path)), Known(None)):
        assert await choose_origin(spec, Asked(), coordinator) == ""
    assert capsys.readouterr().err == ""
    with pytest.raises(WrongInput, match="is the same job"):
        await choose_origin(spec, Asked(), Known(GangView(slurm_job_ids=[7], phase="RUNNING")))


async def test_a_place_that_cannot_be_looked_at_is_named(spec: JobSpec, tmp_path: Path) -> None:
    path = str(tmp_path / ("step_" + "0" * 300))
    with pytest.raises(WrongInput, match=f"{path}.* can't be read: File name too long") as refused:
        await choose_origin(spec, Asked(resume=path), None)
    assert "Nothing was queued" in refused.value.hint


def test_spares_cost_node_hours() -> None:
    spec = JobSpec(nodes=4, spares=1, durable_dir="/durable", memory_checkpoint=True)
    assert list(notes(spec, 86400)) == [
        "spares hold 1 of 5 nodes for the whole run: 24 of 120 node hours at the time limit"
    ]
    (_, short) = notes(spec, None, "r[1-2]n[01-02]")
    assert short.startswith("--nodelist=r[1-2]n[01-02] names 4 of 5 nodes, and Slurm chooses the others: any of them")
    assert len(list(notes(spec, None, "n[1-5]"))) == len(list(notes(spec, None, "./nodes"))) == 1
    (_, reserved) = notes(spec, None, reservation="res1")
    assert reserved.startswith("the end of reservation res1 ends the job")
    assert len(list(notes(spec, 86400, reservation="res1"))) == 1
    assert list(notes(spec, None)) == ["spares hold 1 of 5 nodes for the whole run; no time limit is named"]
    spec.spares = 0
    assert list(notes(spec, 86400)) == []


def test_a_job_that_keeps_nothing_beyond_its_end_is_told_so() -> None:
    spec = JobSpec(nodes=4, memory_checkpoint=True)
    (note,) = notes(spec, None)
    assert "without durable_dir" in note
    assert list(notes(JobSpec(nodes=4), None)) == [], "its script keeps what it needs"


async def queue(
    world: ScriptedWorld, folder: Path, *more: str, sbatch: tuple[str, ...] = (), env: Mapping[str, str] = {}
) -> int:
    """Runs `muster submit` with the Slurm of `world`. `sbatch`: options after the --. `env`: of job.toml."""
    job = folder / "job.toml"
    job.write_text(
        f'name = "tiny"\nnodes = 2\nspares = 1\ncommand = ["python3", "train.py"]\nrun_dir = "{folder}/run"\n'
        f'durable_dir = "{folder}/durable"\n[slurm]\ntime = "1-00:00:00"\n[env]\n'
        + "".join(f'{name} = "{value}"\n' for name, value in env.items())
    )
    words = [
        "submit",
        "--coordinator",
        world.address,
        "--auth",
        f"secret:{world.folder.parent}/secret",
        *more,
        str(job),
        "--",
        *sbatch,
    ]
    options = parser().parse_args(words)
    site = Site.load(coordinator=options.coordinator, auth=options.auth)
    async with Registration(site) as registration:
        return await submit(prepare(options, site), options, world.slurm, registration)


async def test_the_coordinator_finds_the_run_before_and_the_next_one_starts_from_its_checkpoint(
    world: ScriptedWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "durable").mkdir()
    path = left(JobSpec(durable_dir=str(tmp_path / "durable")))
    first = await queue(world, tmp_path, "--resume", path)
    assert "spares hold 1 of 3 nodes for the whole run: 24 of 72 node hours" in capsys.readouterr().err
    assert world.coordinator
    gangs = world.coordinator.engine.core.state.gangs
    (gang,) = (gang for gang in gangs.values() if gang.slurm.job == first)
    assert (gang.checkpoint.durable_path, gang.spec.resume_from) == (path, path)
    assert gang.checkpoint.durable_version is not None
    assert (gang.checkpoint.durable_version.generation, gang.checkpoint.durable_version.step) == (0, 176)
    (script,) = (tmp_path / "run").glob("*.sbatch")
    assert os.path.basename(path) in script.read_text(), "the job registers itself with it if it must"
    with pytest.raises(WrongInput, match=f"job {first} .tiny. is the same job"):
        await queue(world, tmp_path)
    options = parser().parse_args(
        ["cancel", "--coordinator", world.address, "--auth", f"secret:{world.folder.parent}/secret", str(first)]
    )
    assert await options.row.run(options) == 0
    second = await queue(world, tmp_path)
    assert f"--resume {first} goes on at step 176" in capsys.readouterr().err
    (gang,) = (gang for gang in gangs.values() if gang.slurm.job == second)
    assert gang.checkpoint.durable_path == ""


async def test_the_coordinator_says_what_makes_the_job_another_one(
    world: ScriptedWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "durable").mkdir()
    path = left(JobSpec(durable_dir=str(tmp_path / "durable")))
    first = await queue(world, tmp_path, "--resume", path, env={"LR": "1", "KEY": "secret-one"})
    capsys.readouterr()
    second = await queue(world, tmp_path, env={"LR": "3", "KEY": "secret-two"})
    err = capsys.readouterr().err
    assert (
        f"job {first} (tiny) is SUBMITTED, has the same durable_dir, and is another job: its env.KEY and env.LR differ"
        in err
    )
    assert f"--resume {first} goes on at step 176" in err
    assert "secret" not in err
    with pytest.raises(WrongInput, match=f"job {second} .tiny. is the same job"):
        await queue(world, tmp_path, env={"LR": "3", "KEY": "secret-two"})


async def test_a_start_later_on_is_no_obstacle_to_the_notes(
    world: ScriptedWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await queue(world, tmp_path, sbatch=("--begin=now+1hour", "--time=2:00:00"))
    assert "2 of 6 node hours at the time limit" in capsys.readouterr().err


async def test_a_durable_folder_that_others_can_write_to_is_refused_before_it_is_searched(
    world: ScriptedWorld, tmp_path: Path
) -> None:
    spec = JobSpec(name="tiny", command=["python3", "train.py"], durable_dir=str(tmp_path / "durable"))
    left(spec, job=job_identity(spec), generation=2)
    Path(spec.durable_dir).chmod(0o777)
    with pytest.raises(WrongInput, match="all users can write to"):
        await queue(world, tmp_path)


@pytest.mark.parametrize(
    ("command", "starter"),
    [
        (["torchrun", "--nproc-per-node=2", "train.py"], "torchrun"),
        (["/opt/venv/bin/torchrun", "train.py"], "torchrun"),
        (["srun", "python3", "train.py"], "srun"),
        (["accelerate", "launch", "train.py"], "accelerate"),
        (["python3", "-m", "torch.distributed.run", "train.py"], "torch.distributed.run"),
        (["python3", "train.py", "torchrun"], ""),
        (["python3", "-m", "train"], ""),
        (["accelerate", "env"], ""),
    ],
)
def test_a_command_that_starts_ranks_itself_is_noted(command: list[str], starter: str) -> None:
    found = [note for note in notes(JobSpec(command=command), None) if "starts processes of its own" in note]
    assert bool(found) == bool(starter)
    assert all(note.startswith(f"command: {starter} starts") for note in found)


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("module load cuda && python3 train.py", "&&"),
        ("cd /shared/tiny; python3 train.py", "/shared/tiny;"),
        ("KEY=secret python3 train.py", "KEY="),
        ("python3 train.py >log.txt", ">log.txt"),
        ("python3 train.py 2>&1", "2>&1"),
        ("python3 train.py --out ${SCRATCH}/x", "${SCRATCH}/x"),
        ("python3 ~/train.py", "~/train.py"),
        ("bash -c 'cd /x && python3 $HOME/train.py > log'", ""),
        ("/bin/sh run.sh ~/x", ""),
        ("python3 train.py --pad '<pad>' --lr=1 --pattern a|b --cost 5$ --sep=';x'", ""),
    ],
)
def test_a_command_that_only_a_shell_would_understand_is_noted(command: str, word: str) -> None:
    found = [note for note in notes(JobSpec(command=shlex.split(command)), None) if "no shell reads it" in note]
    assert bool(found) == bool(word)
    assert all(f"and {word!r} reaches the program as it stands" in note for note in found)


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (GangView(phase="FAILED", exit_code=98), "; submitted again, the job goes on from it"),
        (GangView(phase="CANCELLED", exit_code=130), "; muster submit --resume 7 goes on from it"),
        (GangView(phase="FAILED", exit_code=93), "; muster submit --resume 7 goes on from it"),
        (GangView(phase="FAILED", exit_code=98, not_finite="nan"), "; muster submit --resume 7 goes on from it"),
        (GangView(phase="DONE"), ""),
    ],
)
def test_status_of_an_ended_job_says_what_it_has_left(ended: GangView, words: str) -> None:
    ended.slurm_job_ids.append(7)
    ended.final = True
    assert "durable" not in "\n".join(gang_details(ended, Screen()))
    ended.checkpoint.durable_path = "/shared/ck/step_00000442_g2_x"
    assert f"durable\tnewest: /shared/ck/step_00000442_g2_x{words}" in list(gang_details(ended, Screen()))
