"""The commands with a real coordinator on loopback and an in-memory Slurm."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.host import clock, rank_log_files
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld, spec
from muster.daemon.transport import server_limits
from muster.daemon.transport.channel import IDENTITY_DEADLINE_S
from muster.daemon.transport.identity import IdentityUnavailable, Proof, SecretCredentials
from muster.daemon.transport.site_config import Site
from muster.launcher.command_line import since
from muster.launcher.commands.flush import Outcome as Flushed
from muster.launcher.commands.flush import outcome_of_flush
from muster.launcher.commands.submit import prepare, submit
from muster.launcher.commands.swap import Outcome, outcome_of_swap
from muster.launcher.coordinator_client import CALL_TIMEOUT_S, CoordinatorClient, gang_ref
from muster.launcher.errors import NoCredential, NotNow, SiteFault, Unavailable, WrongInput
from muster.launcher.main import COMMANDS, main, parser
from muster.launcher.output.node_tables import NodeFilter, node_lines
from muster.launcher.output.screen import Screen
from muster.launcher.submission import path_checks
from muster.launcher.submission.registration import Registration
from muster.slurm.client.backends.sbatch import Sbatch
from muster.slurm.client.errors import SlurmRefused
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.slurm.client.parsing.sbatch_request import JobRequest
from muster.slurm.client.types import Unknown
from muster.v1.agent_pb2 import LinkMeasurement
from muster.v1.api_pb2 import CheckpointView, EventsRequest, GangView, NodeView, RecoveryView, SwapReply

SPEC = """
name = "tiny"
nodes = 2
spares = 1
command = ["python3", "train.py"]
run_dir = "{run_dir}"
"""


class Terminal(io.StringIO):
    """Output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def words(world: ScriptedWorld, *command: str) -> list[str]:
    """A command line for the coordinator of `world`."""
    at = world.address if world.coordinator else "127.0.0.1:1"
    return [command[0], "--coordinator", at, "--auth", f"secret:{world.folder.parent}/secret", *command[1:]]


async def muster(world: ScriptedWorld, *command: str) -> int:
    """Runs one command to its end."""
    options = parser().parse_args(words(world, *command))
    return int(await options.row.run(options))


def job_file(folder: Path, top: str = "") -> Path:
    """A job.toml whose run folder is in `folder`. `top` is an additional line."""
    path = folder / "job.toml"
    path.write_text(top + SPEC.format(run_dir=folder / "run"))
    return path


async def queue(world: ScriptedWorld, folder: Path, *more: str, slurm: FakeSlurm | None = None, top: str = "") -> int:
    """Runs `muster submit` with the Slurm of `world`."""
    options = parser().parse_args(words(world, "submit", *more, str(job_file(folder, top))))
    site = Site.load(coordinator=options.coordinator, auth=options.auth)
    submission = prepare(options, site)
    async with Registration(site) as registration:
        return await submit(submission, options, slurm or world.slurm, registration)


def outputs(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """The new output on stdout and stderr."""
    seen = capsys.readouterr()
    return seen.out, seen.err


async def test_submit_queues_and_registers(
    world: ScriptedWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = await queue(world, tmp_path)
    out, err = outputs(capsys)
    assert out == f"{job}\n"
    assert f"tiny is job {job} (2 nodes and 1 spare)" in err
    assert (await world.slurm.jobs([job]))[job].name == "tiny"  # type: ignore[index, union-attr]
    assert world.coordinator
    gangs = world.coordinator.engine.core.state.gangs
    [gang] = [gang for gang in gangs.values() if gang.slurm.job == job]
    assert (gang.account.name, gang.spec.nodes, gang.spec.spares) == ("tiny", 2, 1)
    assert (tmp_path / "run" / f"{gang.id}.sbatch").exists()


async def test_a_job_submitted_by_another_job_starts_with_restart_count_zero(
    world: ScriptedWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environs: list[Mapping[str, str] | None] = []

    class Sbatch(FakeSlurm):
        async def submit(self, *given: Any, **more: Any) -> int:
            environs.append(more["env"])
            return await super().submit(*given, **more)

    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("OF_THE_USER", "kept")
    await queue(world, tmp_path, slurm=Sbatch(world.cluster))
    (environ,) = environs
    assert environ is not None
    assert "SLURM_RESTART_COUNT" not in environ
    assert environ["OF_THE_USER"] == "kept"


async def test_the_whole_command_calls_sbatch_once_and_registers(
    world: ScriptedWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = world.cluster.submit(JobRequest(nodes=1, no_kill=True))
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\necho {waiting}\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nfiler:/home {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr(path_checks, "MOUNTS", mounts)
    job = job_file(tmp_path)
    job.write_text(job.read_text().replace("nodes = 2\nspares = 1", "nodes = 1"))
    assert await muster(world, "submit", str(job)) == 0
    (script,) = (tmp_path / "run").iterdir()
    assert (tmp_path / "calls").read_text() == f"--parsable {script}\n"
    out, err = outputs(capsys)
    assert out == f"{waiting}\n"
    assert f"tiny is job {waiting} (1 node)" in err
    assert world.coordinator
    [gang] = [gang for gang in world.coordinator.engine.core.state.gangs.values() if gang.slurm.job == waiting]
    assert script.stem == gang.id


async def test_submit_prints_json_for_scripts(
    world: ScriptedWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = await queue(world, tmp_path, "--json")
    said = json.loads(outputs(capsys)[0])
    assert (said["slurm_job_id"], said["registered"]) == (job, True)
    assert Path(said["script"]).read_text().startswith("#!/bin/bash")


async def test_without_a_coordinator_nothing_is_queued(world: ScriptedWorld, tmp_path: Path) -> None:
    await world.stop_coordinator()
    before = set(world.cluster.jobs())
    with pytest.raises(Unavailable) as refused:
        await queue(world, tmp_path)
    assert "the coordinator at 127.0.0.1:1 does not answer" in refused.value.message
    assert "Nothing was queued. With --force" in refused.value.hint
    assert set(world.cluster.jobs()) == before
    assert not (tmp_path / "run").exists()


async def test_without_a_credential_force_is_no_way_out(world: ScriptedWorld, tmp_path: Path) -> None:
    with pytest.raises(NoCredential) as refused:
        await queue(world, tmp_path, "--auth", f"secret:{tmp_path}/none")
    assert refused.value.hint.endswith("Nothing was queued")


async def test_force_queues_without_a_coordinator(
    world: ScriptedWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.stop_coordinator()
    job = await queue(world, tmp_path, "--force")
    out, err = outputs(capsys)
    assert out == f"{job}\n"
    assert f"job {job} is queued but not registered yet" in err
    assert "the job registers itself when its agents start" in err


async def test_a_silent_slurm_leaves_no_script_behind(world: ScriptedWorld, tmp_path: Path) -> None:
    silent = FakeSlurm(world.cluster)
    silent.unavailable_reason = "slurmctld is paused"
    with pytest.raises(Unavailable) as refused:
        await queue(world, tmp_path, slurm=silent)
    assert "check with squeue --me before you submit again" in refused.value.hint
    assert not list((tmp_path / "run").iterdir())


async def test_a_number_of_nodes_that_a_torus_has_no_shape_for(world: ScriptedWorld, tmp_path: Path) -> None:
    class Torus(FakeSlurm):
        async def submit(self, *_: Any, **__: Any) -> int:
            raise SlurmRefused("submit", "Requested topology configuration is not available")

    with pytest.raises(WrongInput) as refused:
        await queue(world, tmp_path, slurm=Torus(world.cluster))
    assert refused.value.hint.startswith("nodes + spares must be the size of a shape that the torus has")
    assert refused.value.hint.endswith("Nothing was queued")


async def test_a_run_folder_that_cannot_be_made(world: ScriptedWorld, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(WrongInput, match="can't be written"):
        await queue(world, tmp_path)


@pytest.mark.parametrize("place", ["in the way", "in the way/ck"])
async def test_an_impossible_durable_folder_is_refused(world: ScriptedWorld, tmp_path: Path, place: str) -> None:
    (tmp_path / "in the way").touch()
    with pytest.raises(WrongInput, match=r"durable_dir = .* is not a folder"):
        await queue(world, tmp_path, top=f'durable_dir = "{tmp_path / place}"\n')


async def test_a_durable_folder_that_others_can_write_to_is_refused(world: ScriptedWorld, tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    folder.mkdir()
    folder.chmod(0o777)
    top, before = f'durable_dir = "{folder}"\n', set(world.cluster.jobs())
    with pytest.raises(
        WrongInput, match=rf"durable_dir = .*: all users can write to {folder} \(mode 0777\)"
    ) as refused:
        await queue(world, tmp_path, top=top)
    assert f"chmod o-w {folder}" in refused.value.message
    assert refused.value.hint == "Nothing was queued"
    assert set(world.cluster.jobs()) == before
    folder.chmod(0o755)
    await queue(world, tmp_path, top=top)
    assert len(world.cluster.jobs()) == len(before) + 1


async def test_an_impossible_job_id_is_unknown(world: ScriptedWorld) -> None:
    with pytest.raises(WrongInput, match="99999999999999"):
        await muster(world, "status", "99999999999999")


async def test_a_missing_secret_is_the_sites_fault(world: ScriptedWorld, tmp_path: Path) -> None:
    (tmp_path / "secret").unlink()
    with pytest.raises(SiteFault, match="can't authenticate"):
        await muster(world, "nodes")


async def test_dry_run_prints_the_script_and_calls_nobody(
    world: ScriptedWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.stop_coordinator()
    assert await muster(world, "submit", "--dry-run", str(job_file(tmp_path)), "--", "--nice=3") == 0
    out, _ = outputs(capsys)
    assert out.startswith("#!/bin/bash\n# tiny: 2 nodes and 1 spare, 1 rank each.")
    assert "#SBATCH --nice=3\n" in out
    assert not (tmp_path / "run").exists()


async def test_dry_run_names_the_paths_that_would_be_refused_on_this_host(
    world: ScriptedWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await muster(world, "submit", "--dry-run", "--run-dir", "/sahred/run", str(job_file(tmp_path))) == 0
    out, err = outputs(capsys)
    assert out.startswith("#!/bin/bash\n")
    assert "on this host the job would be refused: run_dir = '/sahred/run': /sahred does not exist" in err


def test_a_wrong_file_is_named_also_where_no_coordinator_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MUSTER_COORDINATOR", raising=False)
    job, config = job_file(tmp_path), tmp_path / "muster.toml"
    config.touch()
    assert main(["submit", "--config", str(config), str(job)]) == 78
    assert "no coordinator is configured" in outputs(capsys)[1]
    job.write_text(job.read_text().replace("command", "comand"))
    for more in ([], ["--dry-run"]):
        assert main(["submit", "--config", str(config), *more, str(job)]) == 64
        assert "comand" in outputs(capsys)[1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("submit --node 3 job.toml", "there is no option --node: did you mean --nodes?"),
        ("submit --node=3 job.toml", "there is no option --node: did you mean --nodes?"),
        ("submit --time 1:00 job.toml", "there is no option --time: did you mean --slurm.time?"),
        ("submit --gpus_per_nodes 8 job.toml", "there is no option --gpus_per_nodes: did you mean --gpus-per-node?"),
        ("submit --nproc_per_node 8 job.toml", "there is no option --nproc_per_node: did you mean --ranks-per-node?"),
        ("submit job.toml -N 4", "there is no option -N: did you mean --nodes?"),
        ("submit --tensor 4 job.toml", "did you mean --parallelism.tensor or --placement.tensor?"),
        ("submit job.toml --steps 50", "no option --steps: an argument of the script belongs into command of job.toml"),
        ("submit job.toml -u", "no option -u: an argument of the script belongs into command of job.toml"),
        ("submit --node 3 --lr 1 job.toml", "there is no option --node: did you mean --nodes?"),
        ("run --local train.py --steps 50", "no option --steps: the command of the ranks, with its arguments, comes"),
        ("run --local --nproc-per-node 2 x.py", "did you mean --ranks-per-node?"),
        ("plan job.toml --node 3", "did you mean --nodes?"),
        ("nodes --sort sate", "--sort sate: did you mean state?"),
        ("goodput --by zz", "--by zz: there are account, cause, node, leaf, job"),
        ("nodes --state LSOT", "there is no state LSOT: did you mean LOST? There are FIT, "),
        ("status --state QUEUED", "there is no state QUEUED: did you mean REQUEUED? There are SUBMITTED, "),
        ("status --folow 1", "there is no option --folow: did you mean --follow?"),
        ("events --rank 0 1", "muster events: there is no option --rank\n"),
        ("status --since 7", "'7' must be a number with s, min, h or d, as 12h or 7d"),
        ("status --state asleep", "--state"),
        ("logs --tail 0 1", "'0' must be a whole number from 1 on"),
        ("events --after -1 1", "'-1' must be a whole number from 0 on, with 18 digits at most"),
        ("nodes n1 --before 9999999999999999999", "must be a whole number from 0 on, with 18 digits at most"),
        ("nodes n1 --limit -1", "'-1' must be a whole number from 0 on"),
        ("status 1 2", "muster status: nothing is expected in place of 2\n"),
        ("policy check x --bogus", "muster policy check: there is no option --bogus\n"),
        ("policy explian x", "muster policy: there is no action explian: did you mean explain?\n"),
        ("pki remove x", "muster pki: there is no action remove: there are init, renew, show\n"),
        ("events --after x", "argument --after: 'x' must be a whole number from 0 on, with 18 digits at most\n"),
        ("run --local --hang-after x -- true", "argument --hang-after: 'x' must be a number\n"),
        ("pki init x h --days x", "argument --days: 'x': must be a whole number from 1 to 3650\n"),
    ],
)
def test_an_option_that_does_not_exist_is_refused_with_what_was_meant(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *_ = given = line.split()
    with pytest.raises(SystemExit) as ended:
        parser(given[:1]).parse_args(given)
    assert ended.value.code == WrongInput.status
    err = outputs(capsys)[1]
    assert words in err
    assert err.startswith(f"usage: muster {command}")


def test_an_argument_behind_the_file_is_refused_with_advice(tmp_path: Path) -> None:
    options = parser().parse_args(["submit", str(job_file(tmp_path)), "50"])
    with pytest.raises(WrongInput, match="'50' is no option of sbatch") as refused:
        prepare(options, Site())
    assert "belong into command of job.toml" in refused.value.hint


async def test_status_of_a_running_gang(world: ScriptedWorld, capsys: pytest.CaptureFixture[str]) -> None:
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    assert await muster(world, "status", "1") == 0
    text, _ = outputs(capsys)
    for seen in (
        "train (Slurm job 1, gang ",
        "generation\t1",
        "2 with ranks, 1 spare",
        "n3",
        "step\tnone is known, committed none",
    ):
        assert seen in text
    assert await muster(world, "status", "--json", "1") == 0
    view = json.loads(outputs(capsys)[0])
    assert (view["generation"], view["name"], view["final"], len(view["nodes"])) == ("1", "train", False, 3)
    assert await muster(world, "status") == 0
    assert "train" in outputs(capsys)[0]


@pytest.mark.parametrize(
    ("filters", "listed"),
    [
        ((), True),
        (("--state", "running", "--state", "failed"), True),
        (("--state", "FAILED"), False),
        (("--name", "tr*"), True),
        (("--name", "tr"), False),
        (("--user", str(os.getuid())), True),
        (("--user", "1"), False),
        (("--since", "1h"), True),
        (("--state", "failed", "--json"), False),
    ],
)
async def test_status_lists_the_jobs_that_were_asked_for(
    world: ScriptedWorld, capsys: pytest.CaptureFixture[str], filters: tuple[str, ...], listed: bool
) -> None:
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    assert await muster(world, "status", *filters) == 0
    out, err = outputs(capsys)
    assert ("train" in out) is listed
    assert ("are not shown: 1" in err) is (not listed and "--json" not in filters)


async def test_a_filter_that_nothing_can_match_is_refused(world: ScriptedWorld) -> None:
    with pytest.raises(WrongInput, match="this host knows no user 'nobody-of-that-name'"):
        await muster(world, "status", "--user", "nobody-of-that-name")


async def test_on_a_terminal_status_is_one_screen_and_full_has_all_tables(
    world: ScriptedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    with contextlib.redirect_stdout(Terminal()) as short:
        assert await muster(world, "status", "1") == 0
    assert len(short.getvalue().splitlines()) <= 24
    assert "2 with ranks: n[1-2]; 1 spare: n3" in short.getvalue()
    assert "\x1b" not in short.getvalue()
    with contextlib.redirect_stdout(Terminal()) as full:
        assert await muster(world, "status", "1", "--full") == 0
    assert "ready to" in full.getvalue()


async def test_cancel_then_follow_to_the_end(world: ScriptedWorld, capsys: pytest.CaptureFixture[str]) -> None:
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    assert await muster(world, "cancel", "1") == 0
    assert "CANCELLED" in outputs(capsys)[0]
    await world.wait_for_slurm()
    status = await muster(world, "status", "-f", "1")
    assert "CANCELLED" in outputs(capsys)[0]
    assert status != 0


async def test_without_a_coordinator_scancel_is_named(world: ScriptedWorld, tmp_path: Path) -> None:
    cancel = words(world, "cancel", "42")
    await world.stop_coordinator()
    options = parser().parse_args(cancel)
    with pytest.raises(Unavailable) as refused:
        await options.row.run(options)
    assert refused.value.hint.endswith("\n  scancel 42 ends the job without the coordinator")
    options.auth = f"secret:{tmp_path}/none"
    with pytest.raises(NoCredential) as refused_here:
        await options.row.run(options)
    assert "scancel" not in refused_here.value.hint


class NoMunge:
    """Credentials on a host whose munged is down."""

    def issue(self, payload: str) -> str:
        raise AssertionError("nothing is called from this host")

    def check(self, token: str) -> Proof:
        raise IdentityUnavailable("no munge credential can be checked on ctl: munged does not answer on its socket")


async def test_where_the_coordinators_munged_is_down_munge_is_named(world: ScriptedWorld) -> None:
    await world.stop_coordinator()
    world.settings["credentials"] = NoMunge()
    await world.start_coordinator()
    with pytest.raises(Unavailable, match=r"can't tell who calls: no munge .* on ctl: munged does not") as refused:
        await muster(world, "status", "1")
    assert refused.value.hint == "look there with: systemctl status munge"


async def test_an_array_is_listed_and_cancelled_with_all_its_tasks(
    world: ScriptedWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has launched is cancelled by the coordinator, what has not by Slurm."""
    site = Site.load(coordinator=world.address, auth=f"secret:{world.folder.parent}/secret")
    async with Registration(site) as registration:
        for id, task in (("g1", "9_10"), ("g2", "9_2")):
            job = world.cluster.submit(JobRequest(nodes=1))
            await registration.register(id, job, spec(array_task=task))
    assert await muster(world, "status", "9") == 0
    out, err = outputs(capsys)
    assert [line.split("\t")[0] for line in out.splitlines()] == ["job", "9_2", "9_10"]
    assert "muster status 9_2 shows one" in err
    with pytest.raises(WrongInput, match="job 9 is an array: name one of its tasks: 9_2, 9_10"):
        await muster(world, "logs", "9")
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$*" >{tmp_path}/cancelled\n')
    (tmp_path / "scancel").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert await muster(world, "cancel", "9") == 0
    assert outputs(capsys)[0].count("is CANCELLED") == 2
    assert (tmp_path / "cancelled").read_text() == "--quiet 9\n"


async def _training(world: ScriptedWorld, **spec: Any) -> None:
    """Both ranks have finished step 3, and keep it."""
    await world.start_agents(NODES, **spec)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    for rank, name in enumerate(["n1", "n2"]):
        await world.agents[name].step(3)
        await world.agents[name].report_shards(1, 3, [rank])
    await world.wait_for_facts(facts.FirstStep)


async def _obey_the_swap(world: ScriptedWorld) -> None:
    """The ranks exit when they are asked to, and the next generation finishes a step."""
    await world.wait_for_facts(facts.SwapPlanned)
    for name in ("n1", "n2"):
        await world.agents[name].end_ranks(0)
    await world.wait_for_duty("RUN 2", ["n1", "n3"])
    for name in ("n1", "n3"):
        await world.agents[name].step()


async def test_swap_waits_for_the_outcome(world: ScriptedWorld, capsys: pytest.CaptureFixture[str]) -> None:
    await _training(world)
    obeying = asyncio.create_task(_obey_the_swap(world))
    assert await muster(world, "swap", "--reason", "its fan is loud", "1", "n2") == 0
    await obeying
    said = outputs(capsys)[0].splitlines()
    assert said[0] == "at the end of a step, a spare takes the place of n2 in train (job 1)"
    assert said[1].startswith("n3 took the place of n2 after step 3: no step was repeated, ")
    with pytest.raises(NotNow):
        await muster(world, "swap", "1", "n1")


async def test_flush_waits_for_the_durable_checkpoint(world: ScriptedWorld, capsys: pytest.CaptureFixture[str]) -> None:
    await _training(world, durable_dir="/durable")
    async with CoordinatorClient(world.address, SecretCredentials(world.folder.parent / "secret")) as coordinator:
        async for view in coordinator.watch(gang_ref("1")):
            if view.committed.step == 3:
                break
    assert await muster(world, "flush", "1") == 0
    gang = gang_of(world, 1)
    assert outputs(capsys)[0].splitlines() == [f"/durable/step_00000003_g1_{gang}"]
    assert await muster(world, "flush", "--no-wait", "1") == 0
    assert outputs(capsys)[0].splitlines() == ["flush 2 is ordered"]


async def test_flush_of_a_job_without_a_durable_folder(world: ScriptedWorld) -> None:
    await _training(world)
    with pytest.raises(WrongInput, match="this job has no durable_dir to flush to"):
        await muster(world, "flush", "1")


@pytest.mark.parametrize(
    ("view", "outcome"),
    [
        (GangView(), None),
        (GangView(checkpoint=CheckpointView(flush_serial=2)), None),
        (GangView(checkpoint=CheckpointView(flush_serial=3, flushing=True)), None),
        (
            GangView(checkpoint=CheckpointView(flush_serial=3, durable_path="/d/step_7")),
            Flushed(True, "/d/step_7"),
        ),
        (
            GangView(checkpoint=CheckpointView(flush_serial=3, flush_error="n1: /d is full", durable_path="/d/step_1")),
            Flushed(False, "flush 3 failed: n1: /d is full"),
        ),
        (
            GangView(final=True, phase="CANCELLED", reason="asked for by root"),
            Flushed(False, "flush 3 did not end: the job is CANCELLED: asked for by root"),
        ),
        (
            GangView(checkpoint=CheckpointView(flush_serial=4, flushing=True)),
            Flushed(False, "flush 3 was followed by another one before its end was seen: see muster events"),
        ),
    ],
    ids=["unknown", "earlier", "runs", "complete", "failed", "cancelled", "another"],
)
def test_the_outcome_of_a_flush(view: GangView, outcome: Flushed | None) -> None:
    assert outcome_of_flush(view, 3) == outcome


async def test_drain_prints_what_becomes_of_each_job(world: ScriptedWorld, capsys: pytest.CaptureFixture[str]) -> None:
    await _training(world)
    assert await muster(world, "drain", "n2", "--reason", "its fan is loud") == 0
    assert outputs(capsys)[0].splitlines() == [
        "Slurm is told to start nothing more on n2",
        "job 1 (train): at the end of a step, a spare takes the place of n2",
    ]
    with pytest.raises(WrongInput):
        await muster(world, "drain", "n9", "--reason", "its fan is loud")


async def test_swap_only_makes_the_request_if_asked(world: ScriptedWorld, capsys: pytest.CaptureFixture[str]) -> None:
    await _training(world)
    assert await muster(world, "swap", "--no-wait", "1", "n2") == 0
    assert len(outputs(capsys)[0].splitlines()) == 1
    with pytest.raises(WrongInput):
        await muster(world, "swap", "1", "n9")


@pytest.mark.parametrize(
    ("view", "outcome"),
    [
        (GangView(), None),
        (GangView(recoveries=[RecoveryView(generation=3, nodes_out=["n2"])]), None),
        (GangView(recoveries=[RecoveryView(generation=4, nodes_out=["n2"], started_s=9)]), None),
        (
            GangView(recoveries=[RecoveryView(generation=4, cause="no spare is left", started_s=9)]),
            Outcome(False, "n2 keeps its ranks: no spare is left"),
        ),
        (
            GangView(phase="REQUEUED", reason="preempted"),
            Outcome(False, "n2 was not swapped: the job is REQUEUED: preempted"),
        ),
        (
            GangView(
                recoveries=[
                    RecoveryView(generation=4, nodes_out=["n2"], nodes_in=["n5"], step_before=7, step_restored=5),
                    RecoveryView(generation=5, first_step_s=12.5),
                ]
            ),
            Outcome(True, "n5 took the place of n2 after step 7: 2 steps were repeated, 4.5 s"),
        ),
    ],
    ids=["planned", "an earlier recovery", "started", "no spare", "requeued", "left"],
)
def test_the_outcome_of_a_swap(view: GangView, outcome: Outcome | None) -> None:
    assert outcome_of_swap(view, SwapReply(generation=3, planned_s=8.0), "n2") == outcome


async def test_following_survives_a_restart_of_the_coordinator(
    world: ScriptedWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    seen: asyncio.Queue[str] = asyncio.Queue()
    at, secret = world.address, SecretCredentials(world.folder.parent / "secret")
    async with CoordinatorClient(at, secret) as coordinator:

        async def follow() -> list[str]:
            views = []
            async for view in coordinator.follow(gang_ref("1"), seen.put_nowait):
                views.append(view.phase)
                seen.put_nowait(view.phase)
            return views

        async def read() -> list[int]:
            request = EventsRequest(gang=gang_ref("1"))
            records = coordinator.follow_events(request, lambda words: None)
            return [record.position async for record in records if not record.sentinel]

        following, reading = asyncio.create_task(follow()), asyncio.create_task(read())
        await seen.get()
        await world.stop_coordinator()
        while "coordinator at" not in await seen.get():
            pass
        await world.start_coordinator(listen=at)
        assert await muster(world, "cancel", "1") == 0
        assert (await following)[-1] == "CANCELLED"
        await world.wait_for_slurm()
        positions = await reading
    assert positions == sorted(set(positions))


async def test_events_are_one_line_each(world: ScriptedWorld, capsys: pytest.CaptureFixture[str]) -> None:
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    assert await muster(world, "events", "1") == 0
    lines = outputs(capsys)[0].splitlines()
    assert any("n1 joined from job 1" in line for line in lines)
    assert await muster(world, "events", "--json", "1") == 0
    records = [json.loads(line) for line in outputs(capsys)[0].splitlines()]
    assert [r["sentinel"] for r in records] == [False] * len(lines) + [True]


def gang_of(world: ScriptedWorld, job: int) -> str:
    assert world.coordinator
    return next(gang.id for gang in world.coordinator.engine.core.state.gangs.values() if gang.slurm.job == job)


async def test_jobs_that_share_a_run_folder_have_logs_of_their_own(
    world: ScriptedWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [await queue(world, tmp_path), await queue(world, tmp_path)]
    outputs(capsys)
    for job in jobs:
        log = rank_log_files.log_path(str(tmp_path / "run"), gang_of(world, job), 1, 0)
        log.parent.mkdir(parents=True)
        log.write_text(f"job {job}\n")
    for job in jobs:
        assert await muster(world, "logs", str(job)) == 0
        assert outputs(capsys)[0] == f"g1 rank 0: job {job}\n"


async def test_logs_come_from_the_run_folder(
    world: ScriptedWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = await queue(world, tmp_path)
    outputs(capsys)
    waits = f"no rank has written anything: the job is SUBMITTED, and waits for Slurm to start job {job}"
    with pytest.raises(WrongInput, match=waits):
        await muster(world, "logs", str(job))
    for generation in (1, 2):
        folder = tmp_path / "run" / "logs" / gang_of(world, job) / f"g{generation}"
        folder.mkdir(parents=True)
        for rank in (0, 1):
            (folder / f"rank{rank}.log").write_text(f"hello {generation} {rank}\nunended")
    assert await muster(world, "logs", str(job)) == 0
    assert outputs(capsys)[0].splitlines() == [
        "g2 rank 0: hello 2 0",
        "g2 rank 0: unended",
        "g2 rank 1: hello 2 1",
        "g2 rank 1: unended",
    ]
    assert await muster(world, "logs", "--rank", "1", "--generation", "1", str(job)) == 0
    assert outputs(capsys)[0] == "hello 1 1\nunended\n"
    with pytest.raises(WrongInput) as refused:
        await muster(world, "logs", "--rank", "9", str(job))
    assert "generations with logs: 1, 2" in refused.value.hint
    assert await muster(world, "logs", "--tail", "1", str(job)) == 0
    assert outputs(capsys)[0].splitlines() == ["g2 rank 0: unended", "g2 rank 1: unended"]
    assert await muster(world, "logs", "--all", "--rank", "0", "--grep", "HELLO 1", str(job)) == 0
    assert outputs(capsys)[0] == "hello 1 0\n"
    with pytest.raises(WrongInput, match=r"no logs with 'bye' under"):
        await muster(world, "logs", "--grep", "bye", str(job))


async def test_without_a_coordinator_a_job_is_found_by_its_number_and_by_its_name(
    world: ScriptedWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gangs = [f"train-u1000-{at:012x}" for at in range(3)]
    for at, gang in enumerate(gangs):
        written = rank_log_files.open_log(str(tmp_path), gang, 1, 0)
        os.write(written, f"of run {at}\n".encode())
        os.close(written)
        with rank_log_files.hold_log_folder(str(tmp_path), gang, rank_log_files.AGENTS) as agents:
            rank_log_files.note_job(agents, str(100 + at))
        os.utime(rank_log_files.log_folder(str(tmp_path), gang), (at, at))
    assert await muster(world, "logs", "--run-dir", str(tmp_path), "101") == 0
    assert outputs(capsys)[0] == "g1 rank 0: of run 1\n"
    assert await muster(world, "logs", "--run-dir", str(tmp_path), "train") == 0
    assert outputs(capsys) == (
        "g1 rank 0: of run 2\n", f"muster: these are the logs of gang {gangs[2]}, the newest of 3 with this name\n"
    )  # fmt: skip
    with pytest.raises(WrongInput, match="'103' is no gang id"):
        await muster(world, "logs", "--run-dir", str(tmp_path), "103")


async def test_logs_are_read_without_a_coordinator(
    world: ScriptedWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for gang in ("g1", "g2"):
        log = rank_log_files.log_path(str(tmp_path), gang, 1, 0)
        log.parent.mkdir(parents=True)
        log.write_text(f"of {gang}\n")
    await world.stop_coordinator()
    with pytest.raises(Unavailable) as unreached:
        await muster(world, "logs", "1")
    assert "muster logs --run-dir DIR 1" in unreached.value.hint
    assert await muster(world, "logs", "--run-dir", str(tmp_path), "g2") == 0
    assert outputs(capsys)[0] == "g1 rank 0: of g2\n"
    with pytest.raises(WrongInput, match="'1' is no gang id, Slurm job id or name of a job with logs") as unnamed:
        await muster(world, "logs", "--run-dir", str(tmp_path), "1")
    assert sorted(unnamed.value.hint.removeprefix(f"{tmp_path} has logs of ").split(", ")) == ["g1", "g2"]
    with pytest.raises(WrongInput, match="--node needs the coordinator"):
        await muster(world, "logs", "--run-dir", str(tmp_path), "--node", "n1", "g2")
    shutil.rmtree(rank_log_files.log_folder(str(tmp_path), "g1"))
    assert await muster(world, "logs", "--run-dir", str(tmp_path), "1") == 0
    words = f"muster: these are the logs of gang g2: there are no others in {tmp_path}\n"
    assert outputs(capsys) == ("g1 rank 0: of g2\n", words)


async def test_logs_of_one_node_are_those_of_its_ranks(
    world: ScriptedWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.start_agents(NODES, run_dir=str(tmp_path))
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    assert world.coordinator
    (gang,) = world.coordinator.engine.core.state.gangs
    write_rank_logs(tmp_path, gang, 1, "n1", "n2")
    assert await muster(world, "logs", "--node", "n2", "1") == 0
    assert outputs(capsys)[0] == "by n2\n"
    with pytest.raises(WrongInput, match="n3 has carried no rank of the job") as refused:
        await muster(world, "logs", "--node", "n3", "1")
    assert refused.value.hint == "its ranks are on n1 n2"


async def test_logs_of_a_node_that_has_left_are_what_its_own_ranks_wrote_last(
    world: ScriptedWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.start_agents(NODES, run_dir=str(tmp_path))
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    await world.send_signal("n2", 79)
    await world.wait_for_duty("RUN 2", ["n1", "n3"])
    assert world.coordinator
    (gang,) = world.coordinator.engine.core.state.gangs
    write_rank_logs(tmp_path, gang, 1, "n1", "n2")
    write_rank_logs(tmp_path, gang, 2, "n1", "n3")
    assert await muster(world, "logs", "--node", "n2", "1") == 0
    assert outputs(capsys)[0] == "by n2\n"
    assert await muster(world, "logs", "--node", "n3", "1") == 0
    assert outputs(capsys)[0] == "by n3\n"
    with pytest.raises(WrongInput, match="n3 has carried no rank of the job in generation 1"):
        await muster(world, "logs", "--node", "n3", "--generation", "1", "1")


def write_rank_logs(run_dir: Path, gang: str, generation: int, *nodes: str) -> None:
    for rank, node in enumerate(nodes):
        log = rank_log_files.log_path(str(run_dir), gang, generation, rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"by {node}\n")


async def test_following_a_job_says_what_it_waits_for_and_why_it_ends_without_logs(
    world: ScriptedWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = await queue(world, tmp_path)
    outputs(capsys)
    following = asyncio.ensure_future(muster(world, "logs", "--follow", str(job)))
    said = f"muster: nothing is written yet: the job is SUBMITTED, and waits for Slurm to start job {job}"
    async with asyncio.timeout(60):
        while said not in outputs(capsys)[1]:  # noqa: ASYNC110 - a captured stream tells nobody
            await asyncio.sleep(0)
    await muster(world, "cancel", str(job))
    with pytest.raises(WrongInput, match="no rank has written anything: the job is CANCELLED: cancelled by"):
        await following


async def test_stacks_of_every_generation_are_shown_on_request(
    world: ScriptedWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = await queue(world, tmp_path)
    outputs(capsys)
    with pytest.raises(WrongInput, match="no rank has written anything"):
        await muster(world, "logs", "--stacks", str(job))
    for generation in (1, 2):
        log = rank_log_files.log_path(str(tmp_path / "run"), gang_of(world, job), generation, 0)
        log.parent.mkdir(parents=True)
        log.write_text("hello\n")
    rank_log_files.stacks_path(str(tmp_path / "run"), gang_of(world, job), 1, 0).write_text("in train\n")
    assert await muster(world, "logs", "--stacks", str(job)) == 0
    assert outputs(capsys)[0] == "g1 rank 0: in train\n"


async def test_an_unknown_job(world: ScriptedWorld) -> None:
    with pytest.raises(WrongInput, match="Slurm job 4711: no such job, or not yours"):
        await muster(world, "status", "4711")


async def test_nodes_before_any_daemon(world: ScriptedWorld, capsys: pytest.CaptureFixture[str]) -> None:
    assert world.coordinator
    roster, world.slurm.private = world.coordinator.roster, Unknown("another form")
    roster.nodes, roster.unknown, roster.private_unknown = {}, "slurmctld is away", "another form"
    assert await muster(world, "nodes") == 0
    out, err = outputs(capsys)
    assert out == "no nodes to show: no node daemon has attached yet, or others are private here and you have none\n"
    assert err == (
        "users see the nodes of their own jobs only: PrivateData is not known: another form\n"
        "nodes without musterd are not listed: slurmctld is away\n"
    )


async def test_nodes_without_a_daemon_are_listed(world: ScriptedWorld, capsys: pytest.CaptureFixture[str]) -> None:
    assert world.coordinator
    world.cluster.leaves = {"n1": "s0", "n3": "s1"}
    await world.send_signal("n2", 79)
    await world.wait_for_slurm()
    await world.coordinator.roster.refresh()
    await world.coordinator.fabric.read()
    assert await muster(world, "nodes") == 0
    table = [line.split() for line in outputs(capsys)[0].splitlines()]
    assert table[0] == ["node", "verdict", "job", "role", "since", "musterd", "heard", "leaf", "why"]
    assert table[1][:5] == ["n1", "UNHEARD", "away", "never", "s0"]
    assert " ".join(table[1][5:]).startswith("no musterd was ever heard; in service in Slurm")
    assert table[2][:2] == ["n2", "UNFIT"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", table[2][2])
    assert table[3][:5] == ["n3", "UNHEARD", "away", "never", "s1"]


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        (("--state", "unfit"), ["n2"]),
        (("--state", "UNFIT", "--state", "UNHEARD", "--sort", "state"), ["n2", "n1", "n3"]),
        (("--signal", "xid 79"), ["n2"]),
        (("--leaf", "s1"), ["n3"]),
        (("--sort", "since"), ["n2", "n1", "n3"]),
    ],
)
async def test_nodes_are_listed_as_asked_for(
    world: ScriptedWorld, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], listed: list[str]
) -> None:
    assert world.coordinator
    world.cluster.leaves = {"n1": "s0", "n3": "s1"}
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    await world.send_signal("n2", 79)
    await world.wait_for_slurm()
    await world.coordinator.roster.refresh()
    await world.coordinator.fabric.read()
    assert await muster(world, "nodes", "--json", *options) == 0
    assert [json.loads(line)["node"] for line in outputs(capsys)[0].splitlines()] == listed


async def test_a_job_that_nobody_knows_is_no_empty_list_of_nodes(
    world: ScriptedWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    with pytest.raises(WrongInput, match="Slurm job 99: no such job, or not yours"):
        await muster(world, "nodes", "--job", "99")
    assert await muster(world, "nodes", "--job", "1", "--state", "LOST") == 0
    assert "none is as asked for" in outputs(capsys)[0]


async def test_events_begin_where_they_are_asked_to(world: ScriptedWorld, capsys: pytest.CaptureFixture[str]) -> None:
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    for node in ("n1", "n2"):
        await world.agents[node].step()
    await world.wait_for_facts(facts.FirstStep)
    await world.wait_for_facts(facts.JobChanged)  # by a look at Slurm; nothing follows
    assert await muster(world, "events", "1") == 0
    every = outputs(capsys)[0]
    assert "generation 1 starts" in every
    for early in ("1d", "2020-01-01", "2020-01-01T08:30"):
        assert await muster(world, "events", "--since", early, "1") == 0
        assert outputs(capsys)[0] == every
    assert await muster(world, "events", "--since", "0s", "1") == 0
    assert outputs(capsys)[0] == ""


@pytest.mark.parametrize("command", ["goodput", "status", "events"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("7", "must be a number with s, min, h or d"),
        ("soon", "or a date, as 2026-11-20"),
        ("2999-01-01", "yet to come"),
    ],
)
def test_a_wrong_moment_is_explained(command: str, text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([command, "--since", text])
    assert words in " ".join(outputs(capsys)[1].split())


def test_a_date_is_a_moment_in_the_zone_of_this_host() -> None:
    begins = datetime(2026, 11, 20).astimezone().timestamp()  # of this host
    for text, at in (
        ("2026-11-20", begins),
        ("2026-11-20T00:00+00:00", 1795132800.0),
        ("2026-11-20T08:30", begins + 30600),
    ):
        before = clock.wall()
        assert before - at <= since(text) <= clock.wall() - at


async def test_one_node_has_its_health_its_jobs_and_its_signals_in_its_history(
    world: ScriptedWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    await world.send_signal("n2", 79)
    await world.wait_for_slurm()
    assert await muster(world, "nodes", "n2") == 0
    out, err = outputs(capsys)
    now, records = out.split("\n\n")
    assert "\nn2\tUNFIT\t" in now
    texts = [line.split("\t")[2] for line in records.splitlines()[1:]]
    judged = next(at for at, text in enumerate(texts) if "Xid 79" in text)
    joined = next(at for at, text in enumerate(texts) if "joined from job" in text)
    assert judged < joined, "the newest record stands first"
    assert err == ""
    assert await muster(world, "nodes", "n2", "--limit", "1", "--json") == 0
    out, err = outputs(capsys)
    (newest,) = map(json.loads, out.splitlines())
    assert await muster(world, "nodes", "n2", "--limit", "1", "--json", "--before", newest["position"]) == 0
    (older,) = map(json.loads, outputs(capsys)[0].splitlines())
    assert int(older["position"]) < int(newest["position"])
    assert err == f"there may be older records: --before {newest['position']}\n"
    with pytest.raises(WrongInput, match="'n9' is no node that you may see"):
        await muster(world, "nodes", "n9")


def test_nodes_are_chosen_by_job_and_by_signals_that_hold() -> None:
    nodes = [NodeView(node="n1", slurm_job_ids=[4]), NodeView(node="n2", signals=["gpu-throttle 64 on GPU 2"])]
    assert [NodeFilter(jobs=(1, 4)).includes(node) for node in nodes] == [True, False], "a pool job is of the job"
    assert [NodeFilter(signal="GPU-Throttle").includes(node) for node in nodes] == [False, True]


def test_nodes_are_listed_in_columns() -> None:
    nodes = [
        NodeView(node="n1", verdict="FIT", heard_s_ago=-1.0, leaf="s0", slurm_job_ids=[4, 5]),
        NodeView(node="node10", verdict="LOST", heard_s_ago=61.25, musterd_attached=True, reason="power"),
    ]
    coloured = Screen(80, lambda word, colour: f"<{colour}>{word}</>" if colour else word)
    assert list(node_lines(nodes, coloured)) == [
        "node    verdict  job  musterd  heard               leaf  why",
        "n1      <green>FIT</>      4 5  <red>away</>     before the restart  s0",
        "node10  <red>LOST</>          <green>here</>     61.2 s ago                power",
    ]


def test_exit_status_and_next_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = ["--coordinator", "127.0.0.1:1"]
    assert main(["submit", *site, "--dry-run", str(tmp_path / "none.toml")]) == 64
    out, err = outputs(capsys)
    assert out == ""
    assert "none.toml does not exist" in err
    assert "docs/JOBTOML.md" in err
    (tmp_path / "secret").write_text("x" * 64)
    (tmp_path / "secret").chmod(0o600)
    assert main(["nodes", "--coordinator", "127.0.0.1:1", "--auth", f"secret:{tmp_path}/secret"]) == 69
    err = outputs(capsys)[1]
    assert "the coordinator at 127.0.0.1:1 does not answer: nothing listens at 127.0.0.1:1" in err
    assert "systemctl status muster-coordinator" in err
    assert main(["nodes", "--coordinator", "nowhere"]) == 78
    with pytest.raises(SystemExit) as ended:
        main(["subnit"])
    assert ended.value.code == 64
    assert "muster: there is no command subnit: did you mean submit?\n" in outputs(capsys)[1]


def test_every_command_is_in_the_table_once() -> None:
    names = [command.name for command in COMMANDS]
    assert len(set(names)) == len(names)
    assert all(command.help for command in COMMANDS)


async def test_without_slurm_the_error_names_the_next_step(
    world: ScriptedWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    options = parser().parse_args(words(world, "submit", str(job_file(tmp_path))))
    site = Site.load(coordinator=options.coordinator, auth=options.auth)
    submission = prepare(options, site)
    with pytest.raises(SiteFault) as refused:
        async with Registration(site) as registration:
            await submit(submission, options, Sbatch(), registration)
    assert "sbatch is not on PATH" in refused.value.message
    assert "muster run --local. Nothing was queued" in refused.value.hint


async def test_a_job_is_diagnosed_also_where_slurm_does_not_answer(
    world: ScriptedWorld, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    for name in NODES:
        world.agents[name].link = LinkMeasurement(bytes=9_000_000, seconds=1.0 if name == "n2" else 0.01)
    assert await muster(world, "diagnose", "1", "--measure", "--json") == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert [(one["nodes"], one["side"]) for one in found["slow_links"]] == [(["n2"], "sends")]
    assert "n2 to n3: 9 MB/s" in shown.err
    assert len(found["links"]) == 6
    assert found["network"].startswith("the leaves that the coordinator knows (Slurm does not answer: ")
    assert await muster(world, "diagnose", "1") == 0
    assert "SLOW: n2 sends slowly, 9 MB/s" in capsys.readouterr().out
    with pytest.raises(WrongInput, match="Slurm job 77: no such job, or not yours"):
        await muster(world, "diagnose", "77")


def test_a_command_waits_until_the_coordinator_has_said_why_it_gives_up_a_call() -> None:
    """It gave up before, and told its user that the coordinator does not answer."""
    share = server_limits.API_CALLS
    assert IDENTITY_DEADLINE_S + share.reading_wait_s + share.first_message_s < CALL_TIMEOUT_S
