"""What ranks say of their training, as their agent reports and keeps it: sums of a node; then real agents and ranks."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.checkpoint.format.number_page import RankNumbers
from muster.checkpoint.store.rank_samples import RankSample, StepTimes
from muster.daemon.agent.training.node_training import NodeSamples
from muster.daemon.host import metric_series
from muster.daemon.host.metric_series import NodeSeries, NumberPoint, RankPoint
from muster.daemon.testing.scripted_gang import Gang, scripted_gang
from muster.v1.common_pb2 import RankNumber

LOGS = """
    import os, time, muster
    rank = int(os.environ["RANK"])
    print(os.getpid(), flush=True)
    for step in range(1, 100_000):
        muster.log(step, total_steps=100_000, loss=4.0 + rank, tokens=1024)
        if step % 100 == 0 and rank == 1:
            muster.log(step, gradient_norm=float("inf"))
        time.sleep(0.02)
"""


def sample(rank: int, step: int, at_s: float, loss: float, times: StepTimes | None = None) -> RankSample:
    numbers = RankNumbers(step, at_s, 900, 2e9, {"loss": (step, loss)})
    return RankSample(rank, numbers, times or StepTimes())


def test_batches_can_be_skipped_if_all_ranks_can() -> None:
    able, unable = (RankNumbers(1, 5.0, numbers={"loss": (1, 2.0)}, skips_batches=skips) for skips in (True, False))
    for numbers, expected in (((able, able), True), ((able, unable), False)):
        samples = [RankSample(rank, one) for rank, one in enumerate(numbers)]
        status = NodeSamples(3).add(samples, 1000.0, NodeSeries("n1"))
        assert status is not None
        assert status.skips_batches is expected


def test_ranks_are_put_together_on_their_node() -> None:
    samples, series = NodeSamples(3), NodeSeries("n1")
    samples.add([sample(rank, 10, 5.0, 1.0 + rank) for rank in (4, 5, 6)], 1000.0, series)
    times = StepTimes(4, 0.8, 0.2, 0.04)
    status = samples.add([sample(rank, 20, 10.0, 0.5 + rank, times) for rank in (4, 5, 6)], 1004.0, series)
    assert status is not None
    assert (status.generation, status.last_step, status.step_s, status.flops) == (3, 900, 0.5, 6e9)
    assert (status.first_step, status.first_at_s, status.step) == (10, 1000.0, 20)
    assert list(status.numbers) == [
        RankNumber(name="loss", step=20, ranks=3, least=4.5, median=5.5, greatest=6.5, least_rank=4, greatest_rank=6)
    ]
    assert not status.skips_batches
    assert series.ranks[5] == {1000: RankPoint(1, 10), 1004: RankPoint(10, 20, 0.5, 0.2, 0.05, 0.01)}
    assert series.numbers["loss"][1004] == NumberPoint(20, 3, 4.5, 5.5, 6.5, 4, 6)


def test_what_a_rank_has_not_said_again_is_not_counted_again() -> None:
    samples, series = NodeSamples(3), NodeSeries("n1")
    for second in (1000.0, 1004.0):
        samples.add([sample(4, 10, 5.0, 1.0)], second, series)
    assert list(series.ranks[4]) == list(series.numbers["loss"]) == [1000]


def test_a_value_that_is_not_finite_is_left_out() -> None:
    status = NodeSamples(3).add([sample(4, 10, 5.0, float("nan")), sample(5, 10, 5.0, 2.0)], 1000.0, None)
    assert status is not None
    assert [(number.ranks, number.greatest) for number in status.numbers] == [(1, 2.0)]


def test_a_value_whose_sums_would_be_infinite_is_left_out() -> None:
    samples, series = NodeSamples(3), NodeSeries("n1")
    for step in (10, 20):
        status = samples.add(
            [sample(rank, step, step, value) for rank, value in ((4, 1.7e308), (5, 1e290))], step, series
        )
        assert status is not None
        assert [(number.ranks, number.median) for number in status.numbers] == [(1, 1e290)]
    series.add_number(20, "loss", NumberPoint(20, 1, -1e308, 0.0, 1e308, 4, 5))
    assert metric_series.from_text(metric_series.as_text(series)) == series


def test_ranks_that_say_nothing_make_no_status() -> None:
    assert NodeSamples(3).add([RankSample(4, RankNumbers())], 1000.0, NodeSeries("n1")) is None


@pytest.fixture
async def gang(tmp_path: Path) -> AsyncIterator[Gang]:
    async with scripted_gang(tmp_path) as found:
        yield found


def loss_of(gang: Gang, node: str) -> list[float]:
    return [number.median for number in gang.status(node).training.numbers if number.name == "loss"]


async def test_numbers_of_a_script_come_to_the_coordinator_and_into_the_file(gang: Gang) -> None:
    await gang.start(2, sys.executable, gang.script(LOGS))
    await gang.run(1)
    await gang.until(lambda: gang.all(lambda node: loss_of(gang, node) != []))
    assert [loss_of(gang, node) for node in ("n0", "n1")] == [[4.0], [5.0]]
    training = gang.status("n0").training
    assert (training.generation, training.last_step) == (1, 100_000)
    await gang.until(lambda: gang.rank("n1", 1).not_finite.words == "gradient norm = inf")
    await gang.until(lambda: len(metric_series.read_job(str(gang.folder), "g").nodes) == 2)
    whole = metric_series.read_job(str(gang.folder), "g")
    assert {point.median for point in whole.number("loss").values()} <= {4.0, 4.5, 5.0}
    assert whole.ranks == [0, 1]
    await gang.until(lambda: gang.status("n0").training.step_s > 0)
