"""The command-line backend, with scripts in place of Slurm's commands."""

from __future__ import annotations

import _ctypes
import asyncio
import json
import math
import os
from pathlib import Path

import pytest

from muster.slurm.client.backends import completion
from muster.slurm.client.backends.commands import CliSlurm
from muster.slurm.client.backends.pyslurm_backend import PyslurmSlurm
from muster.slurm.client.deadline import no_lease
from muster.slurm.client.errors import BatchHostRefused, NotPermitted, SlurmRefused, SlurmTimeout, SlurmUnavailable
from muster.slurm.client.states import JobFlag, JobState, NodeState
from muster.slurm.client.types import GONE, Job, Node, Unknown


def number(value: int) -> dict[str, object]:
    return {"set": True, "infinite": False, "number": value}


UNSET = {"set": False, "infinite": True, "number": 0}

# Trimmed from `squeue --json --states=all` and `scontrol show node --json` of Slurm 26.05.5.
JOB = {
    "job_id": 7, "job_state": ["RUNNING", "COMPLETING"], "name": "gang", "user_id": 2001, "user_name": "alice",
    "account": "physics", "partition": "main", "state_reason": "None", "nodes": "n[1-3]", "batch_host": "n1",
    "excluded_nodes": "n4", "restart_cnt": 1, "comment": "hello", "requeue": True, "hold": False, "dependency": "",
    "exit_code": {"status": ["SUCCESS"], "return_code": number(0), "signal": {"id": UNSET, "name": ""}},
    "submit_time": number(1795247925), "start_time": number(1795247926), "end_time": number(1795249726),
    "time_limit": number(30), "current_working_directory": "/home/alice",
}  # fmt: skip
NODE = {
    "name": "n1", "state": ["IDLE", "DRAIN", "NOT_RESPONDING"], "address": "10.0.0.2", "hostname": "n1",
    "reason": "muster: [node] Xid 79", "reason_set_by_user": "slurm", "reason_changed_at": number(1795247000),
    "boot_time": number(1795240000), "slurmd_start_time": number(1795247905), "last_busy": number(1795247905),
    "active_features": ["a", "b"], "partitions": ["main"], "gres": "gpu:8", "cpus": 4, "real_memory": 1000,
    "version": "26.05.5",
}  # fmt: skip


class Commands:
    """A folder of scripts. Each script appends its arguments to the file `said`, then does what the test defines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = folder / "said"

    def have(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>{self.said}\n{script}\n')
        path.chmod(0o755)

    def answer(self, name: str, document: object) -> None:
        (self.folder / f"{name}.json").write_text(json.dumps(document, indent=1))
        self.have(name, f"cat {self.folder}/{name}.json")

    def lines(self) -> list[str]:
        return self.said.read_text().splitlines()


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


@pytest.fixture
def slurm(commands: Commands) -> CliSlurm:
    return CliSlurm(commands.folder)


async def test_a_job_in_full(commands: Commands, slurm: CliSlurm) -> None:
    commands.answer("squeue", {"jobs": [JOB], "meta": {}, "errors": []})
    answer = await slurm.jobs([7, 8])
    assert answer == {
        7: Job(
            7, JobState.RUNNING, frozenset({JobFlag.COMPLETING}), name="gang", user_id=2001, user_name="alice",
            partition="main", account="physics", nodes=("n1", "n2", "n3"), batch_host="n1", excluded=("n4",),
            restart_count=1, start_time=1795247926.0, end_time=1795249726.0, time_limit_s=1800,
            comment="hello", requeue=True, work_dir="/home/alice",
        ),
        8: GONE,
    }  # fmt: skip
    assert commands.lines() == ["squeue --json --states=all --jobs=7,8"]


OF_COMMANDS = """
SQUEUE_USERS SQUEUE_PARTITION SQUEUE_ACCOUNT SQUEUE_QOS SQUEUE_NAMES SQUEUE_LICENSES SQUEUE_STATES SQUEUE_FORMAT
SCANCEL_NAME SCANCEL_STATE SCANCEL_INTERACTIVE SCANCEL_USER SCANCEL_BATCH SCONTROL_FUTURE SINFO_PARTITION
SLURM_CLUSTERS SLURM_JSON SLURM_YAML SLURM_TIME_FORMAT SLURM_BITSTR_LEN SLURM_TOPO_LEN SLURM_DEBUG_FLAGS
SBATCH_TIMELIMIT SBATCH_PARTITION
"""


@pytest.mark.parametrize("command", ["jobs", "nodes", "cancel", "topologies", "estimate_start", "max_switch_wait_s"])
async def test_no_variable_of_a_shell_changes_what_is_asked(
    command: str, commands: Commands, slurm: CliSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hide jobs, cut lines, change the form of times, or let scancel leave a job alone."""
    for name in (*OF_COMMANDS.split(), "SLURM_CONF", "SLURM_SACK_SOCKET", "TERM_OF_A_USER"):
        monkeypatch.setenv(name, "7")
    for name in ("squeue", "scontrol", "scancel", "sbatch"):
        commands.have(name, f"env >{commands.folder}/env")
    match command:
        case "cancel":
            with pytest.raises(SlurmUnavailable):  # the answer of squeue is no JSON
                await slurm.cancel(7)
        case "estimate_start":
            await slurm.estimate_start(commands.folder / "x", cwd=commands.folder)
        case _:
            await getattr(slurm, command)()
    seen = {line.partition("=")[0] for line in (commands.folder / "env").read_text().splitlines()}
    assert not seen & set(OF_COMMANDS.split())
    assert {"SLURM_CONF", "SLURM_SACK_SOCKET", "TERM_OF_A_USER"} <= seen


async def test_a_node_in_full(commands: Commands, slurm: CliSlurm) -> None:
    commands.answer("scontrol", {"nodes": [NODE], "last_update": number(1)})
    states = frozenset({NodeState.IDLE, NodeState.DRAIN, NodeState.NOT_RESPONDING})
    assert await slurm.nodes() == {
        "n1": Node(
            "n1", states, address="10.0.0.2", hostname="n1", reason="muster: [node] Xid 79",
            reason_at=1795247000.0, boot_time=1795240000.0, partitions=("main",), gres="gpu:8", memory_mib=1000,
        )
    }  # fmt: skip


async def test_a_job_that_is_held_after_its_launch_says_so_and_is_released(commands: Commands, slurm: CliSlurm) -> None:
    """Slurm gives the reason of a hold that the user has set, and the true one as its description."""
    held = {"job_state": ["PENDING"], "hold": True, "state_reason": "JobHeldUser", "restart_cnt": 1}
    commands.answer("squeue", {"jobs": [JOB | held | {"state_description": "launch failed requeued held"}]})
    commands.have("scontrol", "true")
    found = await slurm.jobs([7])
    assert not isinstance(found, Unknown)
    assert isinstance(job := found[7], Job)
    assert (job.reason, job.held) == ("launch failed requeued held", True)
    await slurm.requeue(7, restarts=0)
    assert commands.lines()[-1] == "scontrol release 7"


async def test_one_job_that_slurm_does_not_have(commands: Commands, slurm: CliSlurm) -> None:
    commands.have("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert await slurm.jobs([999]) == {999: GONE}


@pytest.mark.parametrize(
    "script",
    [
        "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1",
        "echo 'squeue: error: Socket timed out on send/recv operation' >&2; exit 1",
        "echo 'slurm_load_jobs error: Something new and strange' >&2; exit 1",
        "kill -SEGV $$",
        'echo \'{"jobs": [{"job_id": 7}]}\'',
        "echo 'squeue: unrecognized option'",
        "true",
    ],
)
async def test_no_answer_is_unknown_and_not_gone(commands: Commands, slurm: CliSlurm, script: str) -> None:
    commands.have("squeue", script)
    assert isinstance(await slurm.jobs([999]), Unknown)


@pytest.mark.parametrize(
    "fields",
    [
        {"job_state": [None]},
        {"job_state": [3]},
        {"job_state": ["FAILED"], "exit_code": 3},
        {"start_time": math.inf},
        {"job_id": [7]},
        {"name": ["gang"]},
        {"user_id": "alice"},
        {"nodes": "n[0-99999999999]"},
    ],
)
async def test_a_record_of_another_form_is_unknown(
    commands: Commands, slurm: CliSlurm, fields: dict[str, object]
) -> None:
    commands.answer("squeue", {"jobs": [{**JOB, **fields}]})
    assert isinstance(await slurm.jobs(), Unknown)


async def test_an_answer_that_is_nested_too_deeply_is_unknown(commands: Commands, slurm: CliSlurm) -> None:
    text = commands.folder / "nested"
    text.write_text('{"jobs": ' + 100_000 * "[")
    commands.have("squeue", f"cat {text}")
    assert isinstance(await slurm.jobs(), Unknown)


async def test_a_slurm_that_is_not_installed_is_unknown(slurm: CliSlurm) -> None:
    answer = await slurm.nodes()
    assert isinstance(answer, Unknown)
    assert "installed" in answer.reason
    with pytest.raises(SlurmUnavailable):
        await slurm.drain("n1", "why")


async def test_a_hanging_command_ends_at_its_timeout(commands: Commands, slurm: CliSlurm) -> None:
    commands.have("scontrol", "echo $$ >$0.pid; sleep 100000 & sleep 100000")
    told, group, timeout_s = commands.folder / "scontrol.pid", "", 0.2
    assert isinstance(await slurm.nodes(timeout_s=timeout_s), Unknown)
    while not group:  # a busy machine may not even start a command in so short a time
        with pytest.raises(SlurmTimeout):
            await slurm.drain("n1", "why", timeout_s=timeout_s)
        group, timeout_s = told.read_text() if told.is_file() else "", 2 * timeout_s
    async with asyncio.timeout(60):  # the kernel ends a killed process when it runs it next
        while int(group) in map(process_group, Path("/proc").glob("[0-9]*")):  # noqa: ASYNC110 - processes tell nobody
            await asyncio.sleep(0.01)


def process_group(process: Path) -> int | None:
    """The process group of a running process; None if it has ended."""
    try:
        state, _, group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return None
    return None if state == "Z" else int(group)


async def test_down_drains_first(commands: Commands, slurm: CliSlurm) -> None:
    commands.have("scontrol", "")
    await slurm.down("n3", "muster: \x1b lost\nits power")
    assert commands.lines() == [
        "scontrol update NodeName=n3 State=DRAIN Reason=muster: lost its power",
        "scontrol update NodeName=n3 State=DOWN Reason=muster: lost its power",
    ]


async def test_refusals_by_kind(commands: Commands, slurm: CliSlurm) -> None:
    commands.have("scontrol", "echo 'slurm_update error: Invalid user id' >&2; exit 1")
    with pytest.raises(NotPermitted, match="refused to drain n1: Invalid user id"):
        await slurm.drain("n1", "why")
    commands.have("scontrol", "echo 'slurm_update error: Invalid node name specified' >&2; exit 1")
    with pytest.raises(SlurmRefused) as caught:
        await slurm.drain("n1", "why")
    assert type(caught.value) is SlurmRefused
    assert caught.value.message == "Invalid node name specified"


async def test_remove_node_requests_the_other_nodes(commands: Commands, slurm: CliSlurm) -> None:
    commands.answer("squeue", {"jobs": [JOB]})
    commands.have("scontrol", "exit 1")
    with pytest.raises(SlurmRefused):
        await slurm.remove_node(7, "n2")
    assert "scontrol update JobId=7 NodeList=n1,n3" in commands.lines()


async def test_a_batch_host_refusal_has_its_own_error(commands: Commands, slurm: CliSlurm) -> None:
    commands.answer("squeue", {"jobs": [JOB]})
    commands.have("scontrol", "echo 'Invalid node name specified for job 7' >&2; exit 1")
    with pytest.raises(BatchHostRefused):
        await slurm.remove_node(7, "n1")
    with pytest.raises(SlurmRefused) as caught:
        await slurm.remove_node(7, "n2")
    assert type(caught.value) is SlurmRefused
    commands.answer("squeue", {"jobs": [{**JOB, "nodes": "n[2-3]"}]})
    with pytest.raises(BatchHostRefused):
        await slurm.remove_node(7, "n3")
    await slurm.remove_node(7, "n9")


async def test_requeue_moves_the_start_after_completing(commands: Commands, slurm: CliSlurm) -> None:
    """COMPLETING is over at the third query. Only then may the start time be moved."""
    states = [["RUNNING"], ["PENDING", "COMPLETING"], ["PENDING"]]
    for at, state in enumerate(states, 1):
        document = {"jobs": [{**JOB, "job_state": state, "excluded_nodes": "n4"}]}
        (commands.folder / f"look{at}").write_text(json.dumps(document))
    commands.have("squeue", f"cd {commands.folder}; cat look$(grep -c squeue said)")
    commands.have("scontrol", "")
    await slurm.requeue(7, ["n1", "n4"], restarts=1)
    assert [line for line in commands.lines() if line.startswith("scontrol")] == [
        "scontrol requeue 7",
        "scontrol update JobId=7 ExcNodeList=n4,n1",
        "scontrol update JobId=7 StartTime=now",
    ]
    assert commands.lines()[-1].endswith("StartTime=now")


SWITCHES = {"required_switches": 1, "maximum_switch_wait_time": 300}


async def test_a_requeued_job_waits_for_its_switches_again(commands: Commands, slurm: CliSlurm) -> None:
    for at, state in enumerate([["RUNNING"], ["PENDING"]], 1):
        document = {"jobs": [{**JOB, **SWITCHES, "job_state": state}]}
        (commands.folder / f"look{at}").write_text(json.dumps(document))
    commands.have("squeue", f"cd {commands.folder}; cat look$(grep -c squeue said)")
    commands.have("scontrol", "case $* in *Switches*) echo 'Job is no longer pending execution' >&2; exit 1;; esac")
    await slurm.requeue(7, restarts=1)
    assert [line for line in commands.lines() if line.startswith("scontrol")] == [
        "scontrol requeue 7",
        "scontrol update JobId=7 Switches=1@0:05:00",
        "scontrol update JobId=7 StartTime=now",
    ]


@pytest.mark.parametrize(
    ("count", "wait_s", "words"),
    [(0, 0, ""), (2, 0, "2"), (2, 5, "2@0:01:00"), (1, 61, "1@0:02:00"), (3, 86400, "3@24:00:00")],
)
async def test_switches_as_scontrol_takes_them(
    commands: Commands, slurm: CliSlurm, count: int, wait_s: int, words: str
) -> None:
    """scontrol reads a part of a minute as a minute."""
    record = {**JOB, "required_switches": count, "maximum_switch_wait_time": wait_s}
    commands.answer("squeue", {"jobs": [record]})
    answer = await slurm.jobs([7])
    assert isinstance(answer, dict)
    job = answer[7]
    assert isinstance(job, Job)
    assert job.switches == words


async def test_requeue_succeeds_when_the_job_starts_before_its_start_time_is_moved(
    commands: Commands, slurm: CliSlurm
) -> None:
    """Slurm may start the job between the query and the update. It refuses the update then."""
    for at, state in enumerate([["RUNNING"], ["PENDING"]], 1):
        (commands.folder / f"look{at}").write_text(json.dumps({"jobs": [{**JOB, "job_state": state}]}))
    commands.have("squeue", f"cd {commands.folder}; cat look$(grep -c squeue said)")
    refusal = "Job is no longer pending execution for job 7"
    commands.have("scontrol", f"case $* in *StartTime*) echo '{refusal}' >&2; exit 1;; esac")
    await slurm.requeue(7, restarts=1)
    assert commands.lines()[-1] == "scontrol update JobId=7 StartTime=now"


async def test_requeue_reports_another_refusal_of_the_start_time(commands: Commands, slurm: CliSlurm) -> None:
    for at, state in enumerate([["RUNNING"], ["PENDING"]], 1):
        (commands.folder / f"look{at}").write_text(json.dumps({"jobs": [{**JOB, "job_state": state}]}))
    commands.have("squeue", f"cd {commands.folder}; cat look$(grep -c squeue said)")
    commands.have("scontrol", "case $* in *StartTime*) echo 'Job has already finished for job 7' >&2; exit 1;; esac")
    with pytest.raises(SlurmRefused, match="already finished"):
        await slurm.requeue(7, restarts=1)


async def test_the_lease_guard_is_called_before_each_change(commands: Commands) -> None:
    """A procedure may take half a minute. After the first step another coordinator may be the leader."""

    def permit() -> float:
        with commands.said.open("a") as said:
            said.write("may I?\n")
        return 4.0

    slurm = CliSlurm(commands.folder, permit)
    for at, state in enumerate([["RUNNING"], ["PENDING"]], 1):
        document = {"jobs": [{**JOB, "job_state": state, "excluded_nodes": "n4"}]}
        (commands.folder / f"look{at}").write_text(json.dumps(document))
    commands.have("squeue", f"cd {commands.folder}; cat look$(grep -c squeue said)")
    commands.have("scontrol", "")
    commands.have("scancel", "")
    await slurm.requeue(7, ["n1"], restarts=1)
    await slurm.down("n1", "why")
    await slurm.cancel(7)
    assert [line.partition(" ")[0] for line in commands.lines()] == [
        *("squeue", "may", "scontrol", "may", "scontrol", "squeue", "may", "scontrol"),
        *("may", "scontrol", "may", "scontrol", "may", "scancel"),
    ]


async def test_a_step_ends_with_the_lease(commands: Commands) -> None:
    commands.have("scontrol", "sleep 60")
    with pytest.raises(SlurmTimeout, match=r"no answer within 0\.2 s"):
        await CliSlurm(commands.folder, lambda: 0.2).drain("n1", "why")


async def test_a_killed_step_is_not_a_refusal(commands: Commands, slurm: CliSlurm) -> None:
    commands.have("scontrol", "kill -KILL $$")
    with pytest.raises(SlurmTimeout, match="killed before it answered"):
        await slurm.drain("n1", "why")


async def test_a_second_requeue_changes_nothing(commands: Commands, slurm: CliSlurm) -> None:
    commands.answer("squeue", {"jobs": [{**JOB, "job_state": ["RUNNING"]}]})
    await slurm.requeue(7, ["n1"], restarts=0)
    assert commands.lines() == ["squeue --json --states=all --jobs=7"]


async def test_a_requeue_that_cannot_finish_times_out(commands: Commands, slurm: CliSlurm) -> None:
    commands.answer("squeue", {"jobs": [{**JOB, "job_state": ["PENDING", "COMPLETING"]}]})
    commands.have("scontrol", "")
    with pytest.raises(SlurmTimeout):
        await slurm.requeue(7, timeout_s=0.3)


async def test_submit_uses_the_given_folder_and_environment(commands: Commands, slurm: CliSlurm) -> None:
    where = commands.folder / "home"
    where.mkdir()
    commands.have("sbatch", f'echo "$PWD $TOKEN" >{commands.folder}/where; echo "12;cluster"')
    env = {"TOKEN": "x", "PATH": "/usr/bin:/bin"}
    assert await slurm.submit(Path("job.sh"), ["-N2"], cwd=where, env=env) == 12
    assert (commands.folder / "where").read_text() == f"{where} x\n"
    assert commands.lines() == ["sbatch --parsable -N2 job.sh"]
    commands.have("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    with pytest.raises(SlurmRefused, match="invalid partition"):
        await slurm.submit(Path("job.sh"), cwd=where)


async def test_cancel_of_an_ended_job_is_no_error(commands: Commands, slurm: CliSlurm) -> None:
    commands.answer("squeue", {"jobs": []})
    commands.have("scancel", "echo 'scancel: error: Kill job error on job id 2: Invalid job id specified' >&2; exit 1")
    await slurm.cancel(2)
    await slurm.cancel(2, 10)
    assert commands.lines()[1:] == ["scancel 2", "scancel --signal=10 2"]


async def test_what_is_done_to_the_last_task_of_an_array_is_not_done_to_the_others(
    commands: Commands, slurm: CliSlurm
) -> None:
    """It has the job id of the array."""
    of_array = {"array_job_id": number(7), "job_state": ["RUNNING"]}
    tasks = [{**JOB, **of_array, "job_id": id, "array_task_id": number(task)} for id, task in ((8, 0), (7, 1))]
    commands.answer("squeue", {"jobs": tasks})
    commands.have("scancel", "")
    commands.have("scontrol", "")
    await slurm.cancel(7)
    await slurm.cancel(8)
    await slurm.set_requeue_flag(7, False)
    changes = [line for line in commands.lines() if not line.startswith("squeue")]
    assert changes == ["scancel 7_1", "scancel 7_0", "scontrol update JobId=7_1 Requeue=0"]


async def test_the_library_that_ends_jobs_is_the_one_beside_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Slurm in a folder of its own: the commands on PATH are links to it."""
    library, commands = tmp_path / "slurm" / "lib64" / "slurm" / "libslurmfull.so", tmp_path / "slurm" / "bin"
    for folder in (library.parent, commands, tmp_path / "bin"):
        folder.mkdir(parents=True)
    Commands(commands).have("scontrol", "true")
    (tmp_path / "bin" / "scontrol").symlink_to(commands / "scontrol")
    monkeypatch.delenv("MUSTER_LIBSLURM", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    library.symlink_to(_ctypes.__file__)  # any library
    assert await completion.library() == str(library)
    named = tmp_path / "named.so"
    named.symlink_to(_ctypes.__file__)
    monkeypatch.setenv("MUSTER_LIBSLURM", str(named))
    assert await completion.library() == str(named)


async def test_a_job_in_doubt_is_asked_of_commands_which_show_every_flag(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyslurm shows a job that its user has stopped as RUNNING."""
    commands.answer("squeue", {"jobs": [JOB | {"job_state": ["RUNNING", "STOPPED"]}]})
    monkeypatch.setenv("PATH", f"{commands.folder}:{os.environ['PATH']}")
    slurm = PyslurmSlurm(no_lease)

    async def shown_by_pyslurm(*asked: object, ids: list[int]) -> list[dict[str, object]]:
        return [JOB | {"job_id": id, "job_state": ["RUNNING"]} for id in ids]

    monkeypatch.setattr(slurm._questions, "request", shown_by_pyslurm)
    assert not (await slurm.jobs([7, 8]))[7].flags  # type: ignore[index, union-attr]
    assert not commands.said.exists()
    answer = await slurm.jobs([7, 8], in_doubt={7, 9})
    assert [job.flags for job in answer.values()] == [{JobFlag.STOPPED}, frozenset()]  # type: ignore[union-attr]
    assert commands.lines() == ["squeue --json --states=all --jobs=7"]
    commands.have("squeue", "exit 1")
    answer = await slurm.jobs([7, 8], in_doubt={7, 9})
    assert [job.flags for job in answer.values()] == [frozenset(), frozenset()]  # type: ignore[union-attr]
    await slurm.aclose()
