"""The crew, before its warm processes stand ready."""

import asyncio
import os
from pathlib import Path

import pytest

from muster.daemon.agent.ranks.rank_supervisor import NodeJob, RankSupervisor
from muster.daemon.agent.ranks.reconcile import LocalRank, StartRanks
from muster.daemon.agent.ranks.zygote_handle import ZygoteSpec
from muster.v1 import agent_pb2


async def test_a_rank_that_waits_for_its_imports_is_ended_at_once_and_never_starts(tmp_path: Path) -> None:
    """Imports may take longer than a rank may take to be killed; nothing of it runs, so nothing is waited for."""
    changed = asyncio.Event()
    recipe = ZygoteSpec(("true",), (), dict(os.environ), str(tmp_path))
    crew = RankSupervisor(
        NodeJob("g", "n0", recipe, str(tmp_path), 1),
        lambda *_: pytest.fail("it was started all the same"),
        changed.set,
    )
    order = agent_pb2.Order(duty=agent_pb2.DUTY_RUN, generation=1, world_size=1)
    order.places.add(rank=0, node="n0")
    crew.start_ranks(StartRanks(1, ((0, 0),)), order)
    assert crew.ranks() == (LocalRank(0, 1, alive=True),)
    crew.kill_ranks(1)
    assert crew.ranks() == (LocalRank(0, 1, alive=False),)
    assert changed.is_set()
    (status,) = crew.statuses({})
    assert (status.exit_code, status.stderr_tail) == (-9, "ended before it was started")
    changed.clear()
    crew.start_zygotes()
    async with asyncio.timeout(120):
        await changed.wait()
    assert crew.ready_zygotes() == 1
    await crew.stop()
