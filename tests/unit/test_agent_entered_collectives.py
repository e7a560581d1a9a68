"""The collectives that a rank has entered, as its agent reports them of a generation that hangs: real agents, real
ranks. No torch."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.daemon.testing.scripted_gang import Gang, scripted_gang

SAYS_IT = """
    import os, socket, time
    from muster.v1.rank_pb2 import RankAlive, RankMessage
    agent = socket.socket(fileno=int(os.environ["MUSTER_AGENT_FD"]))
    agent.send(RankMessage(alive=RankAlive(entered_collectives=7)).SerializeToString())
    print(os.getpid(), flush=True)
    time.sleep(100)
"""


@pytest.fixture
async def gang(tmp_path: Path) -> AsyncIterator[Gang]:
    async with scripted_gang(tmp_path) as found:
        yield found


@pytest.mark.parametrize(
    ("degree", "reported"),
    [("data_parallel", True), ("pipeline_parallel", False), ("context_parallel", False), ("expert_parallel", False)],
)
async def test_collectives_are_reported_with_the_stacks_of_a_data_parallel_job(
    gang: Gang, degree: str, reported: bool
) -> None:
    """Smaller groups have collectives of their own. In a pipeline, messages between ranks may be counted as well."""
    await gang.start(1, sys.executable, gang.script(SAYS_IT), tensor_parallel=1, **{degree: 2})
    await gang.run(1)
    assert not gang.rank("n0", 1).HasField("entered_collectives")
    order = gang.run_order(1)
    order.keep_stacks = True
    gang.coordinator.order(order)
    await gang.until(lambda: gang.status("n0").stacks_generation == 1)
    assert gang.rank("n0", 1).HasField("entered_collectives") is reported
    assert gang.rank("n0", 1).entered_collectives == (7 if reported else 0)
