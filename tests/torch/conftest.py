"""What the tests of this folder share."""

from collections.abc import Iterator

import pytest

from muster.checkpoint.testing.agent_in_thread import AgentInThread


@pytest.fixture
def agent() -> Iterator[AgentInThread]:
    """An agent of one rank."""
    agent = AgentInThread()
    yield agent
    agent.close()
