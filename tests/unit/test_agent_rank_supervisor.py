"""The rank supervisor before its zygotes are ready."""

import asyncio
import os
from pathlib import Path

import pytest

from muster.daemon.agent.ranks.rank_supervisor import NodeJob, RankSupervisor
from muster.daemon.agent.ranks.reconcile import LocalRank, StartRanks
from muster.daemon.agent.ranks.zygote_handle import ZygoteSpec
from muster.v1 import agent_pb2


async def test_a_rank_that_waits_for_its_imports_is_ended_at_once_and_never_starts(tmp_path: Path) -> None:
    """Imports may last longer than a kill may take. No process of the rank exists, so nothing has to be waited for."""
    changed = asyncio.Event()
    zygote_spec = ZygoteSpec(("true",), (), dict(os.environ), str(tmp_path))
    supervisor = RankSupervisor(
        NodeJob("g", "n0", zygote_spec, str(tmp_path), 1),
        lambda *_: pytest.fail("it was started all the same"),
        changed.set,
    )
    order = agent_pb2.Order(duty=agent_pb2.DUTY_RUN, generation=1, world_size=1)
    order.places.add(rank=0, node="n0")
    supervisor.start_ranks(StartRanks(1, ((0, 0),)), order)
    assert supervisor.ranks() == (LocalRank(0, 1, alive=True),)
    supervisor.kill_ranks(1)
    assert supervisor.ranks() == (LocalRank(0, 1, alive=False),)
    assert changed.is_set()
    (status,) = supervisor.statuses({})
    assert (status.exit_code, status.stderr_tail) == (-9, "ended before it was started")
    changed.clear()
    supervisor.start_zygotes()
    async with asyncio.timeout(120):
        await changed.wait()
    assert supervisor.ready_zygotes() == 1
    await supervisor.stop()
