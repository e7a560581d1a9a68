"""What the tests of this folder share."""

from collections.abc import AsyncIterator, Iterator

import pytest

from muster.checkpoint.testing.agent_in_thread import AgentInThread
from muster.checkpoint.testing.gang_in_one_process import InProcessGang


@pytest.fixture
def agent() -> Iterator[AgentInThread]:
    """An agent of one rank."""
    agent = AgentInThread()
    yield agent
    agent.close()


@pytest.fixture
async def gang(request: pytest.FixtureRequest) -> AsyncIterator[InProcessGang]:
    """A gang on the NODES of the module."""
    gang = InProcessGang("g")
    await gang.add(*request.module.NODES)
    yield gang
    await gang.close()
