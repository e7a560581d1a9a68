"""The sockets between an agent and its ranks: no message of a rank is lost, however the rank ends."""

from collections.abc import Iterator

import pytest

from muster.checkpoint.store.rank_sockets import RankSockets
from muster.v1.rank_pb2 import AgentRankMessage, RankFilled, RankMessage


class Agent:
    """The agent's end for rank 0 of generation 1, and the steps that it received."""

    def __init__(self) -> None:
        self.received_steps: list[int] = []
        self.sockets = RankSockets(lambda _rank, _generation, message: self.received_steps.append(message.filled.step))
        self.rank = self.sockets.open(0, 1)

    def fill(self, step: int) -> None:
        """The rank reports a filled slot."""
        self.rank.send(RankMessage(filled=RankFilled(slot=0, step=step)).SerializeToString())


@pytest.fixture
async def agent() -> Agent:
    return Agent()


@pytest.fixture(autouse=True)
def _closed(agent: Agent) -> Iterator[None]:
    yield
    agent.rank.close()


async def test_the_last_messages_of_a_rank_that_ended_with_unread_messages_are_read(agent: Agent) -> None:
    agent.sockets.grant_slot(0, slot=1, from_step=3, fill_count=1)
    agent.fill(7)
    agent.fill(8)
    agent.rank.close()
    agent.sockets.read_pending(0, 1)
    assert agent.received_steps == [7, 8]
    assert agent.sockets.generation(0) is None


async def test_the_last_messages_of_a_rank_are_read_after_a_send_to_it_has_failed(agent: Agent) -> None:
    agent.fill(7)
    agent.rank.close()
    agent.sockets.grant_slot(0, slot=1, from_step=3, fill_count=1)
    agent.sockets.read_pending(0, 1)
    assert agent.received_steps == [7]
    assert agent.sockets.generation(0) is None


async def test_a_rank_that_connects_after_a_stop_was_requested_is_asked_too(agent: Agent) -> None:
    agent.sockets.stop("maintenance")
    with agent.sockets.open(1, 1) as late:
        assert AgentRankMessage.FromString(late.recv(1024)).stop.reason == "maintenance"


async def test_ranks_up_to_a_generation_are_asked_to_stop_and_later_ones_are_not(agent: Agent) -> None:
    agent.sockets.stop("planned swap", last_generation=1)
    assert AgentRankMessage.FromString(agent.rank.recv(1024)).stop.reason == "planned swap"
    with agent.sockets.open(0, 2) as next_generation:
        next_generation.setblocking(False)
        with pytest.raises(BlockingIOError):
            next_generation.recv(1024)
