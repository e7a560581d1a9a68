"""The series of a node: bins that never grow too many, a file that others can't spoil, one picture of all nodes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from muster.daemon.host import metric_series as ms
from muster.daemon.host.metric_series import NodeSeries, NumberPoint, RankPoint, from_text
from muster.daemon.host.rank_log_files import log_folder

GANG = "train-u0-0123456789ab"


def loss(step: int, value: float, rank: int = 0) -> NumberPoint:
    """One rank's value."""
    return NumberPoint(step, 1, value, value, value, rank, rank)


def folder(run_dir: Path) -> Path:
    return log_folder(str(run_dir), GANG) / "series"


def test_a_full_series_merges_neighbours_and_loses_no_step() -> None:
    series = NodeSeries("n1")
    for second in range(0, 4 * 5000, 4):
        series.add_rank(second, 7, RankPoint(2, second, 0.25 if second % 8 else 0.75, 0.1))
        series.add_number(second, "loss", loss(second, second / 4))
    bins, losses = series.ranks[7], series.numbers["loss"]
    assert series.width_s == 64
    assert ms.MOST_BINS // 2 <= len(bins) <= ms.MOST_BINS
    assert sum(point.steps for point in bins.values()) == 10_000
    assert [point.step_s for point in list(bins.values())[:-1]] == pytest.approx([0.5] * (len(bins) - 1))
    assert losses[64] == NumberPoint(124, 16, 16.0, 23.5, 31.0, 0, 0)


@pytest.mark.parametrize(("ranks", "bins"), [(8, 512), (1024, 512), (4096, 128), (100_000, 64)])
def test_a_large_job_has_fewer_bins(ranks: int, bins: int) -> None:
    series = NodeSeries("n1", most_bins=ms.bins_of(ranks))
    for second in range(5000):
        series.add_rank(second, 0, RankPoint(1, second))
    assert bins / 2 <= len(series.ranks[0]) <= bins


def test_a_time_that_is_not_measured_counts_for_nothing() -> None:
    assert ms.merged_ranks(RankPoint(3, 3), RankPoint(1, 4, 0.5, 0.4, 0.1)) == RankPoint(4, 4, 0.5, 0.4, 0.1)


def test_a_node_has_so_many_ranks_and_names_and_no_more() -> None:
    series = NodeSeries("n1")
    for number in range(100):
        series.add_rank(0, number, RankPoint(1, 1))
        series.add_number(0, f"number {number}" + "x" * 100, loss(1, 1.0))
    series.add_number(0, "infinite", loss(1, float("inf")))
    assert (len(series.ranks), len(series.numbers)) == (ms.MOST_RANKS, ms.MOST_NAMES)
    assert {len(name) for name in series.numbers} == {ms.NAME_LETTERS}


@pytest.mark.parametrize(
    ("medians", "median"),
    [
        ([(1.0, 1), (2.0, 1), (9.0, 1)], 2.0),
        ([(1.0, 1), (2.0, 1)], 1.5),
        ([(1.0, 8), (5.0, 1), (6.0, 2)], 1.0),
        ([(4.0, 3)], 4.0),
    ],
)
def test_the_median_of_nodes_weighs_them_by_their_values(medians: list[tuple[float, int]], median: float) -> None:
    points = [NumberPoint(5, count, value - 1, value, value + 1, 2, 3) for value, count in medians]
    merged = ms.merged_nodes(points)
    assert merged.median == median
    assert merged.values == sum(count for _, count in medians)


def test_files_of_all_nodes_become_one_picture(tmp_path: Path) -> None:
    one, other = NodeSeries("n1"), NodeSeries("n2", 8)
    one.add_rank(1000, 0, RankPoint(4, 4, 0.5))
    one.add_number(1000, "loss", loss(4, 2.0, 0))
    one.add_number(1004, "loss", loss(8, 1.0, 0))
    other.add_rank(1010, 0, RankPoint(4, 8, 0.5))  # rank 0 has moved
    other.add_number(1001, "loss", loss(4, 4.0, 1))
    for series in (one, other):
        ms.write_node(str(tmp_path), GANG, series)
    whole = ms.read_job(str(tmp_path), GANG)
    assert whole == ms.JobSeries((one, other), {})
    assert (whole.names, whole.ranks) == (["loss"], [0])
    assert [point.step for point in whole.rank(0).values()] == [4, 8]
    assert whole.number("loss") == {1000: NumberPoint(8, 3, 1.0, 1.5, 4.0, 0, 1)}


def test_an_agent_that_comes_back_goes_on(tmp_path: Path) -> None:
    series = NodeSeries("n1")
    series.add_rank(1000, 3, RankPoint(1, 1, 0.123456789))
    ms.write_node(str(tmp_path), GANG, series)
    again = ms.read_node(str(tmp_path), GANG, "n1")
    again.add_rank(2000, 3, RankPoint(1, 2))
    ms.write_node(str(tmp_path), GANG, again)
    assert ms.read_job(str(tmp_path), GANG).rank(3) == {1000: RankPoint(1, 1, 0.123457), 2000: RankPoint(1, 2)}
    assert os.listdir(folder(tmp_path)) == ["n1.json"]


def test_a_job_without_a_step_has_no_series(tmp_path: Path) -> None:
    assert ms.read_job(str(tmp_path), GANG) == ms.JobSeries()
    assert ms.read_node(str(tmp_path), GANG, "n1") == NodeSeries("n1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2, "node": "n2", "width_s": 4}',
        '{"format": 1, "node": "n2", "width_s": 0}',
        '{"format": 1, "node": "n2", "width_s": 4, "rank 0": {"at_s": [4]}}',
        '{"format": 1, "node": "n2", "width_s": 4, "rank x": {}}',
        json.dumps(
            {"format": 1, "node": "n2", "width_s": 4, "rank 0": {name: ["4"] for name in ("at_s", *RankPoint._fields)}}
        ),
        json.dumps(
            {"format": 1, "node": "n2", "width_s": 4, "rank 0": {name: [4] for name in ("at_s", *RankPoint._fields)}}
        ).replace("[4]", "[4,5]", 1),
        json.dumps(
            {"format": 1, "node": "n2", "width_s": 4, "rank 0": {name: [4] for name in ("at_s", *RankPoint._fields)}}
        )
        .replace('"step_s":[4]', '"step_s":[1e999]')
        .replace('"step_s": [4]', '"step_s": [1e999]'),
        '{"format": 1, "node": "n2", "width_s": NaN}',
        *(
            json.dumps(
                {
                    "format": 1,
                    "node": "n2",
                    "width_s": 4,
                    "rank 0": {name: [4] for name in RankPoint._fields} | {"at_s": [4], name: [value]},
                }
            )
            for name, value in (("step_s", 10**400), ("step_s", -1e300), ("at_s", 10**400), ("at_s", -4))
        ),
        "[" * 100_000,
    ],
)
def test_a_damaged_file_is_left_out_and_named(tmp_path: Path, text: str) -> None:
    ms.write_node(str(tmp_path), GANG, NodeSeries("n1"))
    (folder(tmp_path) / "n2.json").write_text(text)
    whole = ms.read_job(str(tmp_path), GANG)
    assert [series.node for series in whole.nodes] == ["n1"]
    assert [words.partition(":")[0] for words in whole.left_out.values()] == ["damaged"]
    assert ms.read_node(str(tmp_path), GANG, "n2") == NodeSeries("n2")


def test_a_link_and_another_users_file_are_left_out(tmp_path: Path) -> None:
    ms.write_node(str(tmp_path), GANG, NodeSeries("n1"))
    os.symlink(folder(tmp_path) / "n1.json", folder(tmp_path) / "n2.json")
    if os.geteuid() == 0:
        (folder(tmp_path) / "n3.json").write_text(ms.as_text(NodeSeries("n3")))
        os.chown(folder(tmp_path) / "n3.json", 65534, 65534)
    whole = ms.read_job(str(tmp_path), GANG)
    assert [series.node for series in whole.nodes] == ["n1"]
    assert {words.partition(":")[0] for words in whole.left_out.values()} == {"foreign"}


def test_a_full_file_is_small_and_has_lines_for_a_person() -> None:
    series = NodeSeries("n1")
    for second in range(0, 4 * ms.MOST_BINS, 4):
        for rank in range(8):
            series.add_rank(second, rank, RankPoint(40, second * 10, 0.1 + rank / 16, 0.0625 + second / 4096, 0.015625))
        for name in ("loss", "gradient_norm", "lr", "tokens"):
            series.add_number(second, name, NumberPoint(second * 10, 320, 0.1, 1 / (second + 3), 0.9, 3, 4))
    text = ms.as_text(series)
    assert len(text) < 400_000
    assert len(text.splitlines()) == 13
    assert from_text(text).ranks[5].keys() == series.ranks[5].keys()
    assert from_text(text).numbers["loss"][300].greatest == 0.9
