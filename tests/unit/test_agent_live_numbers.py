"""Live logging: what the agent gives to the process that writes, and how that process takes it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from muster.daemon.agent.training.live_numbers import LiveNumbers, LiveRun, live_run
from muster.daemon.agent.training.live_writer import MOST_LINES, LiveWriter, serve
from muster.daemon.agent.training.trackers import Point, TrackerFailed
from muster.launcher.errors import WrongInput
from muster.launcher.spec.spec import parse
from muster.v1.agent_pb2 import NodeTraining
from muster.v1.common_pb2 import JobSpec, RankNumber
from muster.v1.common_pb2 import LiveNumbers as LiveSpec

LEAST = 'name = "tiny"\nnodes = 1\ncommand = "true"\nrun_dir = "/shared/tiny"\n'
HEAD = {
    "tool": "tensorboard", "to": "/nowhere", "experiment": "muster", "gang": "g", "job": 7, "name": "t", "params": {},
}  # fmt: skip


def said(generation: int, step: int, loss: float) -> NodeTraining:
    number = RankNumber(name="loss", step=step, ranks=2, least=1.0, median=loss, greatest=3.0)
    return NodeTraining(generation=generation, numbers=[number])


class Node:
    """An agent whose writer is a program that keeps what it gets."""

    def __init__(self, folder: Path, lines: str = "") -> None:
        self.got, self.training, self.carries = folder / "got", said(1, 5, 2.0), True
        writer = folder / "writer"
        writer.write_text(lines or f"#!/bin/sh\ncat >> {self.got}\n")
        writer.chmod(0o755)
        run = LiveRun(HEAD, [str(writer)], os.environ)
        self.live = LiveNumbers(run, lambda: self.training, lambda: self.carries)

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.got.read_text().splitlines()]


async def test_each_new_value_is_written_once_and_the_end_too(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for training in (said(1, 5, 2.0), said(1, 5, 2.0), said(1, 6, 1.5), said(2, 6, 1.5)):
        node.training = training
        await node.live.sample(9.0)
    await node.live.close("FINISHED")
    head, *values, last = node.lines()
    assert (head, last) == (HEAD, {"status": "FINISHED"})
    assert [line["numbers"] for line in values] == [
        [["loss", 5, 2, 1.0, 2.0, 3.0]], [["loss", 6, 2, 1.0, 1.5, 3.0]], [["loss", 6, 2, 1.0, 1.5, 3.0]],
    ]  # fmt: skip


async def test_only_the_node_with_rank_0_writes(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.carries = False
    await node.live.sample(9.0)
    await node.live.close()
    assert not node.got.exists()


async def test_a_writer_that_has_ended_or_is_missing_costs_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path, "#!/bin/sh\nexit 1\n")
    for step in range(50):
        node.training = said(1, step + 1, 1.0)
        await node.live.sample(9.0)
        await asyncio.sleep(0)
    await node.live.close("FAILED")
    missing = LiveNumbers(LiveRun(HEAD, ["/no/such/python"], {}), lambda: said(1, 1, 1.0), lambda: True)
    await missing.sample(9.0)
    await missing.close()
    await LiveNumbers(None, lambda: None, lambda: True).run()  # nobody asks for it


async def test_a_writer_that_reads_nothing_is_not_waited_for(tmp_path: Path) -> None:
    node = Node(tmp_path, "#!/bin/sh\nexec sleep 600\n")
    async with asyncio.timeout(60):
        for step in range(20_000):
            node.training = said(1, step + 1, 1.0)
            await node.live.sample(9.0)
        await node.live.close()


class Kept:
    """A tracker that keeps what is written, and fails as often as it is told to."""

    def __init__(self, failures: int = 0) -> None:
        self.points, self.status, self.failures = list[Point](), "open", failures

    def write(self, points: Sequence[Point]) -> None:
        if self.failures:
            self.failures -= 1
            raise TrackerFailed("the server is away")
        self.points += points

    def close(self, status: str = "") -> None:
        self.status = status


def values(step: int) -> str:
    return json.dumps({"at": 9.0, "numbers": [["loss", step, 2, 1.0, 2.0, 3.0], ["lr", step, 1, 0.1, 0.1, 0.1]]})


@pytest.fixture
def say() -> tuple[list[str], Callable[[str], None]]:
    words = list[str]()
    return words, words.append


def test_what_a_tracker_has_refused_is_written_later(say: tuple[list[str], Callable[[str], None]]) -> None:
    words, note = say
    tracker = Kept(failures=2)
    writer = LiveWriter(HEAD, note, lambda run: tracker)
    writer.take(values(1))
    assert [writer.write(), writer.write()] == [False, False]
    writer.take(values(2))
    assert writer.write()
    assert words == ["the numbers of this run are not written: the server is away"]
    assert [(point.name, point.step) for point in tracker.points] == [
        ("loss", 1), ("loss.least", 1), ("loss.greatest", 1), ("lr", 1),
        ("loss", 2), ("loss.least", 2), ("loss.greatest", 2), ("lr", 2),
    ]  # fmt: skip


def test_while_a_tracker_fails_only_the_newest_points_are_kept(say: tuple[list[str], Callable[[str], None]]) -> None:
    tracker = Kept(failures=1)
    writer = LiveWriter(HEAD, say[1], lambda run: tracker, most_points=4)
    for step in (1, 2):
        writer.take(values(step))
    writer.write()
    writer.close()
    assert {point.step for point in tracker.points} == {2}


def test_while_a_write_hangs_few_lines_are_read(say: tuple[list[str], Callable[[str], None]]) -> None:
    all_read, hung = threading.Event(), list[bool]()

    class Hanging(Kept):
        def write(self, points: Sequence[Point]) -> None:
            hung.append(not all_read.wait(0.0 if hung else 0.5))
            super().write(points)

    def lines() -> Iterator[str]:
        yield json.dumps(HEAD)
        for step in range(5 * MOST_LINES):
            yield values(step)
        all_read.set()

    tracker = Hanging()
    serve(lines(), say[1], lambda run: tracker)
    assert hung[0]
    assert tracker.points[-1].step == 5 * MOST_LINES - 1


@pytest.mark.parametrize(("last", "status"), [(['{"status": "FINISHED"}'], "FINISHED"), ([], "")])
def test_the_end_is_noted_if_the_job_is_over(
    last: list[str], status: str, say: tuple[list[str], Callable[[str], None]]
) -> None:
    tracker = Kept()
    serve([json.dumps(HEAD), values(1), *last], say[1], lambda run: tracker)
    assert (len(tracker.points), tracker.status) == (4, status)


def test_mlflow_needs_an_address(say: tuple[list[str], Callable[[str], None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    writer = LiveWriter({**HEAD, "tool": "mlflow", "to": ""}, say[1])
    assert not writer.write()
    assert "live_to of job.toml, or MLFLOW_TRACKING_URI" in say[0][0]


async def test_a_missing_library_is_named_in_the_output_of_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    """In an interpreter without packages, started as the agent does."""
    live = LiveNumbers(LiveRun(HEAD, [sys.executable, "-I", "-S"], os.environ), lambda: said(1, 1, 1.0), lambda: True)
    await live.sample(9.0)
    assert live._writer
    await live.close()
    assert 'TensorBoard is not installed here: pip install "muster[tensorboard]" there' in capfd.readouterr().err


def test_where_a_job_logs_comes_from_its_file() -> None:
    spec = parse(f'{LEAST}[record]\nlive = "mlflow"\nlive_to = "http://h:5000"\nseed = 3\n', "job.toml").to_proto("/")
    assert spec.live == LiveSpec(tool="mlflow", to="http://h:5000", params={"seed": "3"})
    assert not parse(LEAST, "job.toml").to_proto("/").HasField("live")
    head = live_run(JobSpec(run_dir="/r", live=LiveSpec(tool="tensorboard")), "g", 1, [], {}).head
    assert (head["to"], head["experiment"]) == ("/r/tensorboard/g", "muster")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('live = "wandb"', "must be '', 'tensorboard' or 'mlflow'"),
        ('live_to = "/x"', "live_to needs live"),
        ('live = "tensorboard"\nlive_to = "x"', "must be an absolute path"),
    ],
)
def test_a_wrong_place_is_refused(lines: str, words: str) -> None:
    with pytest.raises(WrongInput) as refused:
        parse(f"{LEAST}[record]\n{lines}\n", "job.toml")
    assert words in refused.value.message
