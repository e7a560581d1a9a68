"""Logs of old generations are removed when the logs of a job take too much; what failed or runs is kept."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from muster.daemon.agent.training.log_limit import AGAIN_S, LOOK_S, LogLimit
from muster.daemon.host import rank_log_files


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    """Four generations of two ranks, each with a log of 1,000 bytes. Rank 1 failed in the first one."""
    for generation in range(1, 5):
        for rank in (0, 1):
            log = rank_log_files.log_path(str(tmp_path), "g", generation, rank)
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_bytes(b"x" * 1000)
    rank_log_files.note_failed(str(tmp_path), "g", 1, 1, 3)
    rank_log_files.stacks_path(str(tmp_path), "g", 2, 0).write_text("in train")
    return str(tmp_path)


def left(run_dir: str) -> list[str]:
    folder = rank_log_files.log_folder(run_dir, "g")
    return sorted(f"{path.parent.name}/{path.name}" for path in folder.glob("*/*.log"))


@pytest.mark.parametrize(
    ("most_bytes", "removed"),
    [
        (8009, []),
        (8008, ["g1/rank0.log"]),
        (7009, ["g1/rank0.log"]),
        (7008, ["g1/rank0.log", "g2/rank0.log", "g2/rank1.log"]),
        (0, ["g1/rank0.log", "g2/rank0.log", "g2/rank1.log"]),
    ],
)
def test_the_oldest_generations_go_first_and_no_more_than_must(
    run_dir: str, most_bytes: int, removed: list[str]
) -> None:
    before = left(run_dir)
    size, count = rank_log_files.remove_old(run_dir, "g", 4, most_bytes)
    assert left(run_dir) == [name for name in before if name not in removed]
    assert (size, count) == (8009 - 1000 * len(removed), len(removed))
    assert rank_log_files.stacks_path(run_dir, "g", 2, 0).exists()


def test_a_link_in_place_of_a_log_costs_nobody_a_file(run_dir: str, tmp_path: Path) -> None:
    (precious := tmp_path / "precious").write_text("x" * 5000)
    log = rank_log_files.log_path(run_dir, "g", 1, 0)
    log.unlink()
    log.symlink_to(precious)
    rank_log_files.remove_old(run_dir, "g", 4, 0)
    assert precious.exists()


async def test_it_looks_when_a_generation_starts_and_every_ten_minutes(
    run_dir: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    running = [0]
    limit = LogLimit(run_dir, "g", 7500, lambda: running[0])
    await limit.look()
    assert len(left(run_dir)) == 8, "this node does not run rank 0"
    running[0] = 4
    await limit.look()
    assert len(left(run_dir)) == 7
    assert "logs of old generations removed: 1;" in caplog.text
    rank_log_files.log_path(run_dir, "g", 4, 0).write_bytes(b"x" * 9000)
    for _ in range(int(AGAIN_S / LOOK_S) - 1):
        await limit.look()
    assert len(left(run_dir)) == 7
    assert "nothing is cut" not in caplog.text
    await limit.look()
    assert left(run_dir) == ["g1/rank1.log", "g3/rank0.log", "g3/rank1.log", "g4/rank0.log", "g4/rank1.log"]
    assert caplog.text.count("nothing is cut") == 1, "what runs is said, and not cut"


async def test_a_job_that_has_not_written_yet_is_no_problem(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await LogLimit(str(tmp_path), "g", 1, lambda: 1).look()
    assert caplog.records == []
