"""The batch script's process: it outlives srun, and takes nobody's silence for an end."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muster.daemon.agent.batch.asked_segments import say_if_split
from muster.daemon.agent.batch.batch_process import (
    EXIT_NOT_OWN_GANG,
    EXIT_REQUEUED,
    MAX_LAUNCHES,
    PollTiming,
    RemoteCoordinator,
    ViewFailure,
    pass_signals_on,
    run_batch,
    wait_for_gang,
)
from muster.daemon.agent.batch.srun import (
    ALL_LAUNCHED,
    MAX_REQUEUES,
    Allocation,
    Srun,
    Step,
    requeue,
    segment_of,
)
from muster.daemon.host.process.step_signals import FOR_RANKS
from muster.daemon.testing.scripted_world import ScriptedWorld
from muster.v1.api_pb2 import BatchRef, GangView, NodeView

RUNNING = GangView(phase="RUNNING", generation=1)
DONE = GangView(phase="DONE", final=True, exit_code=0)
FAILED = GangView(phase="FAILED", final=True, exit_code=93, reason="no progress in 3 generations")
KILLED = GangView(phase="FAILED", final=True, exit_code=-9)
REQUEUED = GangView(phase="REQUEUED", reason="no spare is left")
QUEUED = GangView(phase="REQUEUED", final=True, reason="no spare is left")
AGAIN = GangView(phase="GATHERING", final=True)
GATHERING = GangView(phase="GATHERING")
ATTACHED = GangView(phase="GATHERING", nodes=[NodeView(node="n0", agent_attached=True)])
GONE = GangView(phase="GATHERING", nodes=[NodeView(node="n0", role="spare")])
ABSENT = GangView(phase="GATHERING", generation=4, nodes=[NodeView(node="n0", role="absent")])
SILENT, UNKNOWN = ViewFailure.NO_ANSWER, ViewFailure.UNKNOWN_GANG


FAST = PollTiming(
    sigterm_s=0.01,
    poll_s=0.01,
    poll_beside_srun_s=0.05,
    srun_exit_s=0.1,
    srun_kill_s=60.0,
    unknown_gang_answers=3,
    no_agent_answers=5,
)


class Answers:
    """A coordinator that gives one answer after the other, the last one for ever."""

    def __init__(self, *views: GangView | ViewFailure) -> None:
        self._views = list(views)
        self.asked = 0
        self.unlaunched: list[list[str]] = []

    async def view(self, launch: BatchRef = ALL_LAUNCHED) -> GangView | ViewFailure:
        self.asked += 1
        self.unlaunched.append(list(launch.unlaunched_nodes))
        return self._views.pop(0) if len(self._views) > 1 else self._views[0]


class Told(Answers):
    """Gives its first answer until it is told of a node on which nothing was started, and once more then."""

    async def view(self, launch: BatchRef = ALL_LAUNCHED) -> GangView | ViewFailure:
        if not launch.unlaunched_nodes:
            self._views.insert(0, self._views[0])
        return await super().view(launch)


class Ends:
    """A coordinator whose gang runs until `holds`, and then has ended with `view`."""

    def __init__(self, holds: Callable[[], bool], view: GangView) -> None:
        self._holds, self._view = holds, view
        self.interrupted = ""

    async def view(self, launch: BatchRef = ALL_LAUNCHED) -> GangView | ViewFailure:
        self.interrupted = self.interrupted or launch.interrupted
        return self._view if self._holds() else RUNNING


async def until_started(mark: Path) -> None:
    """Wait until srun has written `mark` and signals to this process are passed on to it."""
    while signal.getsignal(FOR_RANKS[-1]) is not signal.SIG_IGN or not (mark.exists() and mark.read_text()):  # noqa: ASYNC110 - untold
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """The process that runs the tests keeps its own ways with signals."""
    kept = {number: signal.getsignal(number) for number in FOR_RANKS}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("srun", "views", "code"),
    [
        ("exit 0", [DONE], 0),
        ("exit 0", [FAILED], 93),
        ("exit 0", [KILLED], 128 + 9),
        # srun's end is not the gang's
        ("exit 1", [RUNNING, RUNNING, DONE], 0),
        ("kill -9 $$", [RUNNING, FAILED], 93),
        # it is to start again, and Slurm knows; before that its end would be the job's
        ("exit 0", [RUNNING, QUEUED], EXIT_REQUEUED),
        ("kill -9 $$", [REQUEUED, SILENT, QUEUED], EXIT_REQUEUED),
        ("exit 0", [REQUEUED, AGAIN], EXIT_REQUEUED),
        # nor is the coordinator's silence
        ("exit 1", [SILENT, SILENT, SILENT, SILENT, FAILED], 93),
        # agents are on their way, or were there
        ("exit 1", [ATTACHED, DONE], 0),
        # or are about to be back: the coordinator was started anew
        ("exit 1", [GONE, GONE, GONE, ATTACHED, DONE], 0),
        # they are gone for good
        ("exit 3", [GONE], 3),
        # the runs before had agents
        ("exit 3", [ABSENT], 3),
        # nothing was ever started
        ("exit 3", [GATHERING], 3),
        ("exit 3", [SILENT, SILENT, GATHERING], 3),
        ("kill -9 $$", [GATHERING], 128 + 9),
        # nobody ever registered it, or it is forgotten
        ("exit 3", [UNKNOWN], 3),
        ("exit 0", [UNKNOWN], 0),
        ("kill -9 $$", [UNKNOWN], 128 + 9),
        ("exit 3", [RUNNING, SILENT, UNKNOWN], 3),
        # somebody does, though late, or after the coordinator was away
        ("exit 1", [UNKNOWN, UNKNOWN, RUNNING, FAILED], 93),
        ("exit 1", [UNKNOWN, UNKNOWN, SILENT, UNKNOWN, UNKNOWN, FAILED], 93),
    ],
)
async def test_the_exit_code_is_the_gangs(srun: str, views: list[GangView | ViewFailure], code: int) -> None:
    assert await run_batch(["sh", "-c", srun], Answers(*views), timing=FAST) == code


@pytest.mark.parametrize(
    ("views", "code"),
    [([RUNNING, RUNNING, DONE], 0), ([RUNNING, FAILED], 93), ([RUNNING, GONE], 137), ([SILENT, UNKNOWN], 137)],
)
async def test_whoever_waits_for_a_gang_in_the_place_of_its_launch_gets_its_exit_code(
    views: list[GangView | ViewFailure], code: int
) -> None:
    assert await wait_for_gang(137, Answers(*views), FAST, Step(Allocation(7))) == code


def slurm_at(folder: Path, steps: str, after: str = "true") -> Allocation:
    """Job 7, of which scontrol shows `steps`. scancel notes in `told` what it is called with, then does `after`. It is
    slow: a gang may end before scancel does."""
    told = f">> {folder}/told"
    for name, words in (
        ("scontrol", f"echo '{steps}'"),
        ("scancel", f": {told}; sleep 0.1; echo $* {told}; {after}; true"),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{words}\n")
        (folder / name).chmod(0o700)
    return Allocation(7, 2, 1, scontrol=str(folder / "scontrol"), scancel=str(folder / "scancel"))


async def test_whoever_waits_in_the_place_of_a_killed_launch_passes_its_signals_on(tmp_path: Path) -> None:
    told, host = tmp_path / "told", socket.gethostname().partition(".")[0]
    steps = [f"StepId=7.2 Name=bash Network=x SrunHost:Pid={host}:5", "StepId=42_1.3 Name=agent SrunHost:Pid=other:6"]
    given = slurm_at(tmp_path, "\n".join([*steps, f"StepId=7.3 Name=agent Network=x SrunHost:Pid={host}:6"]))
    coordinator = Ends(lambda: told.exists() and "KILL" in told.read_text(), GangView(final=True, exit_code=98))
    step = Step(given, name="agent")
    pass_signals_on(step, coordinator, FAST, [signal.SIGTERM, signal.SIGUSR1])
    waiting = asyncio.ensure_future(wait_for_gang(137, coordinator, FAST, step))
    async with asyncio.timeout(120):
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            before = len(step.beside)
            os.kill(os.getpid(), number)
            while len(step.beside) == before:  # noqa: ASYNC110 - untold
                await asyncio.sleep(0.01)
            await step.beside[-1]
        assert await waiting == 143
    assert told.read_text().splitlines() == [f"--signal={name} 7.3" for name in ("USR1", "TERM", "KILL")]
    assert coordinator.interrupted == "SIGTERM"


async def test_ctrl_c_ends_the_ranks_of_a_launch_whose_srun_was_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark, told = tmp_path / "ready", tmp_path / "told"
    given = slurm_at(tmp_path, f"StepId=7.3 Name=x SrunHost:Pid=n0:'$(cat {mark})'")
    coordinator = Ends(told.exists, GangView(phase="FAILED", final=True, exit_code=98))
    srun = ["sh", "-c", f"echo $$ > {mark}; kill -9 $$"]
    running = asyncio.ensure_future(run_batch(srun, coordinator, given, FAST, ends_step=True))
    async with asyncio.timeout(120):
        while "srun was ended by signal 9, and the ranks go on" not in caplog.text:  # noqa: ASYNC110 - untold
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        assert await running == 130
    assert (told.read_text(), coordinator.interrupted) == ("--signal=INT 7.3\n", "SIGINT")


@pytest.mark.parametrize(("srun", "said"), [("kill -9 $$", 1), ("exit 1", 0)])
async def test_an_srun_that_is_killed_is_said_once(srun: str, said: int, caplog: pytest.LogCaptureFixture) -> None:
    assert await run_batch(["sh", "-c", srun], Answers(RUNNING, RUNNING, RUNNING, DONE), timing=FAST) == 0
    assert caplog.text.count("srun was ended by signal 9, and the ranks go on") == said


async def test_an_end_of_srun_before_the_gang_is_known_to_be_over_is_waited_out() -> None:
    answers = Answers(GATHERING, GATHERING, DONE)
    assert await run_batch(["sh", "-c", "exit 0"], answers, timing=FAST) == 0
    assert answers.asked == 3


@pytest.mark.parametrize(("view", "code"), [(FAILED, 93), (QUEUED, EXIT_REQUEUED)])
async def test_a_gang_that_is_over_does_not_wait_for_an_srun_that_hangs(
    tmp_path: Path, view: GangView, code: int
) -> None:
    mark = tmp_path / "pid"
    srun = f"echo $$ > {mark}.part; mv {mark}.part {mark}; exec sleep 100"
    assert await run_batch(["sh", "-c", srun], Ends(mark.exists, view), timing=FAST) == code
    assert not Path("/proc", mark.read_text().strip()).exists()


class Carrying(Srun):
    """It writes so many bytes between two looks, and never ends."""

    def carry(self, *pieces: int) -> None:
        self._totals = [sum(pieces[:count]) for count in range(len(pieces) + 1)]

    @property
    def written(self) -> int:
        return self._totals.pop(0)

    async def ends_within(self, within: float) -> bool:
        return not self._totals


async def test_an_srun_that_carries_output_is_waited_for() -> None:
    process = await asyncio.create_subprocess_exec("true")
    srun = Carrying(process)
    srun.carry(5000, 1 << 20, 5000)
    assert await srun.ends_or_is_silent(20.0)
    srun.carry(5000, 100, 5000)
    assert not await srun.ends_or_is_silent(20.0)
    assert Srun(process).written == 0
    await process.wait()


async def test_the_end_of_srun_is_waited_for_no_longer_than_said(tmp_path: Path) -> None:
    goes_on = tmp_path / "goes_on"
    os.mkfifo(goes_on)
    srun = await Srun.start(["sh", "-c", f"cat {goes_on}"])
    assert not await srun.ends_within(0.01)
    await asyncio.to_thread(goes_on.write_text, "")
    assert await srun.ends_within(60)
    assert await srun.ends_within(60)
    assert await srun.wait() == 0


async def test_a_task_that_fails_by_itself_is_told_while_srun_goes_on(tmp_path: Path) -> None:
    said = """srun: error: n1: task 1: Exited with exit code 7
srun: error: n[2-3]: tasks 2-3: Exited with exit code 9
srun: error: n4: task 4: Exited with exit code 143
srun: error: n[: task 5: Exited with exit code 1
srun: error: n6: task 6: Killed"""
    told: list[dict[str, int]] = []

    class Coordinator:
        async def view(self, launch: BatchRef = ALL_LAUNCHED) -> GangView:
            told.append(dict(launch.failed_nodes))
            return FAILED if told[-1] else GATHERING

    await run_batch(["sh", "-c", f"echo '{said}' >&2; exec sleep 100"], Coordinator(), timing=FAST)
    assert told[-1] == {"n1": 7, "n2": 9, "n3": 9}


FAKE_SRUN = """#!/bin/sh
echo "$*" >> {folder}/calls
case "$*" in
*--exclude=n2*) exit {then} ;;
*) echo "srun: error: Task launch for StepId=7.0 failed on node n2: Communication connection failure" >&2; exit 233 ;;
esac
"""


def fake_srun(folder: Path, then: int = 0) -> str:
    """An srun that finds n2 dead."""
    path = folder / "srun"
    path.write_text(FAKE_SRUN.format(folder=folder, then=then))
    path.chmod(0o755)
    return str(path)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


async def test_a_node_that_is_dead_at_the_launch_is_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = Allocation(7, node_count=4, min_nodes=3)
    assert await run_batch([fake_srun(tmp_path), "--no-kill", "agent"], Told(GATHERING, DONE), given, FAST) == 0
    assert calls(tmp_path) == ["--no-kill agent", "--nodes=3 --ntasks=3 --exclude=n2 --no-kill agent"]
    assert "Task launch for StepId=7.0 failed on node n2" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            "echo BlockName=b0 Nodes=n[0-2] BlockSize=3; echo BlockName=b1 Nodes=n[3-5] BlockSize=3",
            "muster: warning: --segment=2 was asked for, and Slurm gave 3 + 1 nodes of the blocks b0, b1, which splits"
            " 1 of 2 segments",
        ),
        ("echo BlockName=b0 Nodes=n[0-3] BlockSize=4", ""),
        ("exit 1", ""),
        ("echo BlockName=b0 Nodes=n[0-", ""),
    ],
)
async def test_a_job_whose_segments_are_split_is_told_so_while_its_agents_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], answer: str, said: str
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\n{answer}\n")
    scontrol.chmod(0o755)
    split = Allocation(7, scontrol=str(scontrol), nodes="n[0-3]", segment=segment_of({"SLURM_JOB_SEGMENT_SIZE": "2"}))
    await say_if_split(Step(replace(split, segment=segment_of({}))))
    assert await run_batch(["true"], Answers(DONE), split, FAST) == 0
    assert capfd.readouterr().err == (f"{said}\n" if said else "")
    await say_if_split(step := Step(replace(split, may_requeue=True)))
    assert step.split_segments == said.removeprefix("muster: warning: ")
    assert capfd.readouterr().err == (f"{said}. `scontrol requeue 7` asks for others\n" if said else "")


async def test_what_is_known_of_split_segments_is_said_until_the_end(tmp_path: Path) -> None:
    scontrol, dead, told = tmp_path / "scontrol", tmp_path / "dead", list[str]()
    dead.mkdir()
    scontrol.write_text(
        "#!/bin/sh\necho BlockName=b0 Nodes=n[0-2] BlockSize=3; echo BlockName=b1 Nodes=n3 BlockSize=3\n"
    )
    scontrol.chmod(0o755)

    class Coordinator:
        async def view(self, launch: BatchRef = ALL_LAUNCHED) -> ViewFailure:
            told.append(launch.split_segments)
            if launch.split_segments:
                (tmp_path / "told").touch()
            return UNKNOWN

    (tmp_path / "srun").write_text(f"while ! [ -e {tmp_path}/told ]; do sleep 0.01; done; {fake_srun(dead)}")
    given = Allocation(7, node_count=4, min_nodes=4, scontrol=str(scontrol), nodes="n[0-3]", segment=2)
    assert await run_batch(["sh", str(tmp_path / "srun")], Coordinator(), given, FAST) == 233
    first = told.index(next(filter(None, told)))
    assert len(told) > first + FAST.requeue_answers
    assert set(told[first:]) == {told[first]}


async def test_nothing_else_is_started_for_an_srun_that_can_not_be_started(tmp_path: Path) -> None:
    """What is cancelled while it starts may never end, and the job with it."""
    split = Allocation(7, nodes="n[0-3]", segment=2)
    assert await run_batch([str(tmp_path / "srun")], Answers(GATHERING), split, FAST) == 127
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        await asyncio.wait(left)
    assert not left


async def test_where_too_few_are_left_the_job_is_requeued(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/scontrolled\n')
    scontrol.chmod(0o755)
    given = Allocation(7, node_count=4, min_nodes=4, may_requeue=True, scontrol=f"{tmp_path}/scontrol")
    assert await run_batch([fake_srun(tmp_path)], Answers(GATHERING), given, FAST) == 233
    assert (tmp_path / "scontrolled").read_text() == "requeue 7\n"
    assert "srun could start nothing on n2: only 3 of 4 nodes are left" in caplog.text
    given = Allocation(7, node_count=4, min_nodes=4, may_requeue=False, scontrol=f"{tmp_path}/scontrol")
    assert await run_batch([fake_srun(tmp_path)], Answers(GATHERING), given, FAST) == 233
    assert (tmp_path / "scontrolled").read_text() == "requeue 7\n"


async def test_a_coordinator_that_requeues_the_job_is_told_the_nodes_and_is_left_to_it(tmp_path: Path) -> None:
    given = Allocation(7, node_count=4, min_nodes=4, may_requeue=True, scontrol=f"{tmp_path}/none")
    coordinator = Told(GATHERING, QUEUED)
    assert await run_batch([fake_srun(tmp_path)], coordinator, given, FAST) == EXIT_REQUEUED
    assert ["n2"] in coordinator.unlaunched


async def test_nodes_that_were_left_out_are_told_beside_the_next_srun(tmp_path: Path) -> None:
    given, coordinator = Allocation(7, node_count=4, min_nodes=3), Told(GATHERING, DONE)
    await run_batch([fake_srun(tmp_path)], coordinator, given, FAST)
    assert coordinator.unlaunched[0] == []
    assert ["n2"] in coordinator.unlaunched


@pytest.mark.parametrize("more", [{"batch_host": "n2"}, {"restart_count": MAX_REQUEUES}])
async def test_a_job_is_not_requeued_for_ever(tmp_path: Path, more: dict[str, Any]) -> None:
    """Where srun can start nothing on the node it runs on, it speaks of something else than a dead node."""
    given = Allocation(7, node_count=4, min_nodes=4, may_requeue=True, scontrol=f"{tmp_path}/scontrol", **more)
    assert await run_batch([fake_srun(tmp_path)], Answers(GATHERING), given, FAST) == 233
    assert len(calls(tmp_path)) == 1


async def test_the_end_of_srun_does_not_wait_for_a_child_that_holds_its_pipe(tmp_path: Path) -> None:
    lasts = tmp_path / "lasts"
    os.mkfifo(lasts)
    srun = await Srun.start(["sh", "-c", f"cat {lasts} & exit 3"])
    assert await srun.process.wait() == 3
    await asyncio.to_thread(lasts.write_text, "")  # lets the child end
    assert await srun.wait() == 3


async def test_an_srun_whose_batch_process_is_killed_goes_on_and_may_say_so(tmp_path: Path) -> None:
    mark, lives = tmp_path / "mark", tmp_path / "lives"
    os.mkfifo(mark)
    srun = f"read -r _ < {mark}; echo words >&2 && echo on > {lives}.part && mv {lives}.part {lives}"
    words = (
        f"import asyncio, os; from muster.daemon.agent.batch.srun import Srun\n"
        f"async def main():\n await Srun.start(['sh', '-c', {srun!r}])\n os.kill(os.getpid(), 9)\nasyncio.run(main())"
    )
    batch = await asyncio.create_subprocess_exec(sys.executable, "-c", words)
    assert await batch.wait() == -signal.SIGKILL
    await asyncio.to_thread(mark.write_text, "\n")
    async with asyncio.timeout(60):
        while not lives.exists():  # noqa: ASYNC110 - a stranger writes it
            await asyncio.sleep(0.01)


async def test_a_refused_requeue_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "Requested operation is presently disabled" >&2; exit 1\n')
    (tmp_path / "scontrol").chmod(0o755)
    given = Allocation(7, node_count=4, min_nodes=4, may_requeue=True, scontrol=f"{tmp_path}/scontrol")
    assert await run_batch([fake_srun(tmp_path)], Answers(GATHERING), given, FAST) == 233
    assert "job 7 can't be requeued: Requested operation is presently disabled" in caplog.text


async def test_a_requeue_that_is_not_answered_is_told_and_ended(tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexec sleep 100\n")
    (tmp_path / "scontrol").chmod(0o755)
    asking = requeue(Allocation(7, scontrol=f"{tmp_path}/scontrol"), within=0.5)
    assert await asking == "scontrol: no answer within 0.5 s"


async def test_a_launch_that_a_dying_node_took_down_is_tried_again(tmp_path: Path) -> None:
    srun = f"echo once >> {tmp_path}/calls; exec kill -9 $$"
    given = Allocation(7, node_count=4, min_nodes=3)
    assert await run_batch(["sh", "-c", srun], Answers(GATHERING), given, FAST) == 128 + 9
    assert len(calls(tmp_path)) == MAX_LAUNCHES
    assert await run_batch(["sh", "-c", srun], Answers(ATTACHED, DONE), given, FAST) == 0
    assert len(calls(tmp_path)) == MAX_LAUNCHES + 1


@pytest.mark.parametrize("view", [GONE, ABSENT])
async def test_a_launch_that_took_its_agents_down_is_tried_again(tmp_path: Path, view: GangView) -> None:
    """In a run of the job after the first one as well."""
    srun = f"echo once >> {tmp_path}/calls; exec kill -9 $$"
    given = Allocation(7, node_count=4, min_nodes=3)
    assert await run_batch(["sh", "-c", srun], Answers(view), given, FAST) == 128 + 9
    assert len(calls(tmp_path)) == MAX_LAUNCHES


async def test_an_agent_that_leaves_by_itself_is_not_tried_again(tmp_path: Path) -> None:
    given = Allocation(7, node_count=4, min_nodes=3)
    assert (
        await run_batch(["sh", "-c", f"echo once >> {tmp_path}/calls; exit 78"], Answers(GATHERING), given, FAST) == 78
    )
    assert len(calls(tmp_path)) == 1


async def test_another_failure_of_srun_is_not_tried_again(tmp_path: Path) -> None:
    given = Allocation(7, node_count=4, min_nodes=3)
    assert await run_batch([fake_srun(tmp_path, then=5)], Answers(GATHERING), given, FAST) == 5
    assert len(calls(tmp_path)) == 2


@pytest.mark.parametrize(
    "words",
    [
        "srun: error: Unable to confirm allocation for job 15: Unable to contact slurm controller (connect failure)",
        "srun: error: Unable to create step for job 15: Socket timed out on send/recv operation",
    ],
)
async def test_a_launch_without_the_controller_is_tried_again(tmp_path: Path, words: str) -> None:
    """The batch host was cut off while srun asked slurmctld for the step. The coordinator's answer ends that."""
    srun = f"echo once >> {tmp_path}/calls; echo '{words}' >&2; exit 1"
    given = Allocation(7, node_count=4, min_nodes=3)
    assert await run_batch(["sh", "-c", srun], Answers(SILENT, SILENT, GATHERING), given, FAST) == 1
    assert len(calls(tmp_path)) == MAX_LAUNCHES
    assert await run_batch(["sh", "-c", srun], Answers(ATTACHED, DONE), given, FAST) == 0
    assert len(calls(tmp_path)) == MAX_LAUNCHES + 1


async def test_srun_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    assert await run_batch(["/nowhere/srun"], Answers(GATHERING), timing=FAST) == 127
    assert "can't start /nowhere/srun" in caplog.text


async def test_what_failed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    await run_batch(["false"], Answers(GATHERING), timing=FAST)
    assert "srun failed with status 1 before any agent attached" in caplog.text


async def test_a_gang_that_nobody_registered_is_said(caplog: pytest.LogCaptureFixture) -> None:
    answers = Answers(UNKNOWN)
    await run_batch(["false"], answers, timing=replace(FAST, poll_beside_srun_s=60.0))
    assert answers.asked == 1 + FAST.unknown_gang_answers  # beside srun, and after its end
    assert "srun has ended with status 1, and the coordinator knows of no agent" in caplog.text
    assert "a command of the job that fails before it launches anything, or a node without muster-agent" in caplog.text


async def test_the_reason_of_a_failed_gang_is_said_among_errors(caplog: pytest.LogCaptureFixture) -> None:
    await run_batch(["false"], Answers(FAILED), timing=FAST)
    assert "the gang is FAILED with exit code 93: no progress in 3 generations" in caplog.text


async def test_a_coordinator_that_does_not_know_the_gang_is_not_silent(tmp_path: Path) -> None:
    world = ScriptedWorld.create(tmp_path)
    await world.start_coordinator()
    remote = RemoteCoordinator(world.address, world.credentials, BatchRef(gang_id="g1", slurm_job_id=1))
    assert await remote.view() is UNKNOWN
    await world.start_agents(["n1"])
    await world.wait_for_duty("HOLD 0", ["n1"])
    known = await remote.view()
    assert isinstance(known, GangView)
    assert known.gang_id == "g1"
    await world.close()
    assert await remote.view() is SILENT


async def test_sigterm_goes_to_srun_and_other_signals_harm_nobody(tmp_path: Path) -> None:
    mark = tmp_path / "ready"
    script = f"trap 'echo told > {mark}.term; exit 0' TERM; echo > {mark}; while :; do sleep 0.01; done"
    told = Path(f"{mark}.term")
    running = asyncio.ensure_future(run_batch(["sh", "-c", script], Ends(told.exists, DONE), timing=FAST))
    async with asyncio.timeout(120):
        await until_started(mark)
    for number in (*FOR_RANKS, signal.SIGTERM):
        os.kill(os.getpid(), number)
    assert await running == 0
    assert told.exists()


@pytest.mark.parametrize(("number", "code", "view"), [(signal.SIGINT, 130, UNKNOWN), (signal.SIGTERM, 143, GONE)])
async def test_a_launch_that_a_signal_has_ended_says_so_and_is_not_repeated(
    tmp_path: Path, number: signal.Signals, code: int, view: GangView | ViewFailure
) -> None:
    """srun ends its tasks with SIGTERM after either, and tells of that."""
    mark = tmp_path / "ready"
    script = f"trap 'exit 143' INT TERM; echo >> {mark}; while :; do sleep 0.01; done"
    forwarded = (signal.SIGINT, signal.SIGTERM)
    launch = run_batch(["sh", "-c", script], Answers(view), Allocation(7, 2, 1), timing=FAST, forwarded=forwarded)
    running = asyncio.ensure_future(launch)
    async with asyncio.timeout(120):
        await until_started(mark)
        os.kill(os.getpid(), number)
        assert await running == code
    assert mark.read_text() == "\n"


async def test_a_launch_that_was_interrupted_is_not_repeated_for_a_node_that_failed(tmp_path: Path) -> None:
    mark = tmp_path / "ready"
    failed = "srun: error: Task launch for StepId=7.0 failed on node n1: Communication connection failure"
    script = f"trap 'exit 130' INT; echo '{failed}' >&2; echo >> {mark}; while :; do sleep 0.01; done"
    launch = run_batch(["sh", "-c", script], Answers(UNKNOWN), Allocation(7, 2, 1), timing=FAST)
    running = asyncio.ensure_future(launch)
    async with asyncio.timeout(120):
        await until_started(mark)
        os.kill(os.getpid(), signal.SIGINT)
        assert await running == 130
    assert mark.read_text() == "\n"


@pytest.mark.parametrize(
    ("shown", "view", "code"),
    [
        ("7.3", UNKNOWN, 130),
        ("7.3", GangView(phase="FAILED", final=True, exit_code=98), 130),
        ("7.3", FAILED, 93),
        ("7.3", GATHERING, 130),
        ("", UNKNOWN, 130),
    ],
)
async def test_ctrl_c_goes_to_the_step_of_a_launch_and_not_through_srun(
    tmp_path: Path, shown: str, view: GangView | ViewFailure, code: int
) -> None:
    """It ends the step, and with it srun. Without a step, srun is to end."""
    mark, told = tmp_path / "ready", tmp_path / "told"
    srun = f"trap 'exit 9' INT HUP; trap 'exit 130' USR1 TERM; echo $$ > {mark}; while :; do sleep 0.01; done"
    step = f"echo StepId=7.2 SrunHost:Pid=n0:1$(cat {mark}); echo StepId={shown} Name=x SrunHost:Pid=n0:$(cat {mark})"
    for name, words in (
        ("scontrol", step if shown else "true"),
        ("scancel", f"echo $* > {told}; kill -USR1 $(cat {mark})"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{words}\n")
        (tmp_path / name).chmod(0o700)
    given = Allocation(7, 2, 1, scontrol=str(tmp_path / "scontrol"), scancel=str(tmp_path / "scancel"))
    coordinator = Ends(told.exists, view) if shown else Answers(RUNNING, RUNNING, view)
    launch = run_batch(["sh", "-c", srun], coordinator, given, FAST, ends_step=True)
    running = asyncio.ensure_future(launch)
    async with asyncio.timeout(120):
        await until_started(mark)
        os.kill(os.getpid(), signal.SIGINT)
        assert await running == code
    assert (told.read_text() if told.exists() else "") == (f"--signal=INT {shown}\n" if shown else "")


async def test_sigterm_ends_a_launch_and_the_coordinator_is_told_that_it_is_not_slurms(tmp_path: Path) -> None:
    mark, told = tmp_path / "ready", tmp_path / "told"
    srun = f"trap 'exit 9' TERM; trap 'exit 143' USR1; echo $$ > {mark}; while :; do sleep 0.01; done"
    given = slurm_at(tmp_path, f"StepId=7.3 Name=x SrunHost:Pid=n0:'$(cat {mark})'", f"kill -USR1 $(cat {mark})")
    coordinator = Ends(told.exists, GangView(phase="FAILED", final=True, exit_code=98))
    running = asyncio.ensure_future(run_batch(["sh", "-c", srun], coordinator, given, FAST, ends_step=True))
    async with asyncio.timeout(120):
        await until_started(mark)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 143
    assert (told.read_text(), coordinator.interrupted) == ("--signal=TERM 7.3\n", "SIGTERM")


@pytest.mark.parametrize("view", [UNKNOWN, GATHERING])
async def test_before_any_agent_has_attached_ctrl_c_has_srun_kill_the_step(
    tmp_path: Path, view: GangView | ViewFailure
) -> None:
    mark = tmp_path / "ready"
    srun = f"trap 'exit 9' INT; trap 'exit 130' TERM; echo > {mark}; while :; do sleep 0.01; done"
    given = Allocation(7, 2, 1, scontrol=str(tmp_path / "none"))
    running = asyncio.ensure_future(run_batch(["sh", "-c", srun], Answers(view), given, FAST, ends_step=True))
    async with asyncio.timeout(120):
        await until_started(mark)
        os.kill(os.getpid(), signal.SIGINT)
        assert await running == 130


async def test_a_script_that_was_queued_once_more_holds_no_nodes(caplog: pytest.LogCaptureFixture) -> None:
    """Its agents have been dismissed. The gang runs on in the job that muster has submitted."""
    other = GangView(phase="RUNNING", slurm_job_ids=[7, 9])
    assert await run_batch(["true"], Answers(other), Allocation(8), timing=FAST) == EXIT_NOT_OWN_GANG
    assert "the gang belongs to job 7, not to this job: submit it with muster" in caplog.text
    own = GangView(phase="DONE", final=True, slurm_job_ids=[7])
    for job in (7, 9):  # the second one is a pool job
        assert await run_batch(["true"], Answers(other, other, own), Allocation(job), timing=FAST) == 0


def test_the_command_says_what_is_missing() -> None:
    from subprocess import run

    clean = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    argv = [sys.executable, "-m", "muster.daemon.agent", "batch", "--", "true"]
    found = run(argv, capture_output=True, text=True, env=clean, timeout=60, check=False)
    assert found.returncode == 64
    assert "--gang (or MUSTER_GANG) must name the gang" in found.stderr
    outside = {name: value for name, value in clean.items() if name != "SLURM_JOB_ID"} | {"MUSTER_GANG": "g"}
    found = run(argv, capture_output=True, text=True, env=outside, timeout=60, check=False)
    assert found.returncode == 64
    assert "this script is for a job of Slurm: queue it with `muster submit job.toml`" in found.stderr
