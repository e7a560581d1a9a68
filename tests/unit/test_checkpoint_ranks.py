"""The sockets between an agent and its ranks: nothing that a rank has said may be lost, however it leaves."""

from collections.abc import Iterator

import pytest

from muster.checkpoint.store.rank_sockets import RankSockets
from muster.v1.rank_pb2 import AgentRankMessage, RankFilled, RankMessage


class Agent:
    """One end for rank 0 of generation 1, and what was heard at it."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.sockets = RankSockets(lambda _rank, _generation, message: self.heard.append(message.filled.step))
        self.rank = self.sockets.open(0, 1)

    def fill(self, step: int) -> None:
        """The rank has filled a slot."""
        self.rank.send(RankMessage(filled=RankFilled(slot=0, step=step)).SerializeToString())


@pytest.fixture
async def agent() -> Agent:
    return Agent()


@pytest.fixture(autouse=True)
def _closed(agent: Agent) -> Iterator[None]:
    yield
    agent.rank.close()


async def test_last_words_are_heard_of_a_rank_that_left_words_of_the_agent_unread(agent: Agent) -> None:
    agent.sockets.grant_slot(0, slot=1, from_step=3, fill_count=1)
    agent.fill(7)
    agent.fill(8)
    agent.rank.close()
    agent.sockets.read_pending(0, 1)
    assert agent.heard == [7, 8]
    assert agent.sockets.generation(0) is None


async def test_last_words_are_heard_of_a_rank_that_can_be_told_nothing_any_more(agent: Agent) -> None:
    agent.fill(7)
    agent.rank.close()
    agent.sockets.grant_slot(0, slot=1, from_step=3, fill_count=1)
    agent.sockets.read_pending(0, 1)
    assert agent.heard == [7]
    assert agent.sockets.generation(0) is None


async def test_a_rank_that_starts_after_the_stop_was_asked_for_hears_of_it_too(agent: Agent) -> None:
    agent.sockets.stop("maintenance")
    with agent.sockets.open(1, 1) as late:
        assert AgentRankMessage.FromString(late.recv(1024)).stop.reason == "maintenance"
