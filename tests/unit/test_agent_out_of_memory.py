"""A rank that the kernel kills because the job's memory is used up is named as such."""

import signal

import pytest

from muster.daemon.agent.ranks.rank_process import RankId, RankProcess
from muster.v1.agent_pb2 import RankStatus


def ended(code: int, *counts: int, kill: bool = False) -> RankStatus:
    """A rank that has ended. `counts`: what the kernel has counted, at its start and at its end."""
    counted = iter(counts)
    rank = RankProcess(RankId(0, 0, 1), lambda: None, lambda: next(counted))
    rank.forked = True
    if kill:
        rank.kill()
    rank.handle_message({"say": "exit", "code": code, "tail": "the last line"})
    return rank.status(None)


def test_a_rank_that_the_kernel_killed_for_want_of_memory_says_so_and_names_the_limit() -> None:
    words = ended(-signal.SIGKILL, 1, 2).stderr_tail
    assert words.startswith("out of memory, killed by the kernel; the narrowest limit is the ")
    assert words.endswith(" GB")


@pytest.mark.parametrize(
    ("code", "count", "kill"), [(-signal.SIGKILL, 1, False), (-signal.SIGSEGV, 2, False), (-signal.SIGKILL, 2, True)]
)
def test_no_other_end_is_taken_for_one(code: int, count: int, kill: bool) -> None:
    assert ended(code, 1, count, kill=kill).stderr_tail == "the last line"
