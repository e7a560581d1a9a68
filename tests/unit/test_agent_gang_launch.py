"""The launch of a script as the gang: what of srun's options goes where, and with what it ends."""

from pathlib import Path

import pytest

from muster.daemon.agent.user_script.gang_launch import exit_code_of_ranks
from muster.daemon.agent.user_script.launch_rule import Kind
from muster.daemon.host import rank_log_files


@pytest.mark.parametrize(
    ("codes", "kind", "code"),
    [
        ([3], Kind.RANKS, 3),
        ([1, 85], Kind.RANKS, 85),
        ([1, -11], Kind.RANKS, 139),
        ([], Kind.RANKS, 93),
        ([3], Kind.LAUNCHER, 1),
    ],
    ids=["its own", "the highest, as srun", "a signal", "no rank has failed by itself", "as torchrun"],
)
def test_a_launch_whose_ranks_fail_again_and_again_ends_as_under_srun(codes: list[int], kind: Kind, code: int) -> None:
    assert exit_code_of_ranks(codes, kind) == code


def test_only_ranks_of_the_newest_generation_count(tmp_path: Path) -> None:
    run_dir = str(tmp_path)
    assert rank_log_files.failed_codes(run_dir, "g") == []
    for generation, rank, code in ((1, 0, 7), (2, 0, 3), (2, 1, -11)):
        for number in (0, 1, 2):
            rank_log_files.log_path(run_dir, "g", generation, number).parent.mkdir(parents=True, exist_ok=True)
            rank_log_files.log_path(run_dir, "g", generation, number).touch()
        rank_log_files.note_failed(run_dir, "g", generation, rank, code)
    assert sorted(rank_log_files.failed_codes(run_dir, "g")) == [-11, 3]
