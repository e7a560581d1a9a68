"""What links between nodes have reached, as agents report it, and the orders to measure one.

Nothing here is decided on or journaled: it is shown to those who ask for a diagnosis. Only nodes of the gang count, and
the newest transfer of each sort between two nodes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from muster.daemon.coordinator.shell.agent_streams import AgentOutbox
from muster.daemon.host import clock
from muster.v1 import agent_pb2

MOST_RECEIVERS = 64
"""Transfers that are kept of each sender, the newest ones. Agents report 8, and a measurement has a few."""
VALID_S = 6 * 3600.0
"""Seconds after which a transfer says nothing of a link any more."""
ANSWER_S = 20.0
"""Seconds in which an agent must answer an order to measure. It connects and sends within 13 s (link_meter.py)."""


class NotMeasured(Exception):
    """A link could not be measured. The message says why."""


@dataclass(frozen=True, slots=True)
class KnownRate:
    """One transfer. `at`: when this coordinator heard of it, on the monotonic clock. `number`: the agent's own, so that
    a transfer that is reported again is no new one; 0 if it was requested."""

    sender: str
    receiver: str
    size: int
    seconds: float
    at: float
    number: int = 0
    cores_shared: bool = False
    rated: float = 0.0

    @property
    def requested(self) -> bool:
        """Somebody has asked to measure it."""
        return not self.number


class LinkRates:
    """The transfers of all gangs."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, dict[tuple[str, bool], KnownRate]]] = {}
        """Gang → sender → receiver, and whether it was requested: both sorts are kept."""
        self._under_way: set[str] = set()
        self._numbers = 0
        self._answers: dict[int, tuple[str, str, asyncio.Future[agent_pb2.LinkMeasurement]]] = {}

    def of_gang(self, gang: str) -> Iterator[KnownRate]:
        """The newest transfers of each two nodes and direction, as far as they say something of today's links."""
        now = clock.monotonic()
        for of_sender in self._known.get(gang, {}).values():
            yield from (one for one in of_sender.values() if now - one.at < VALID_S)

    def forget(self, gang: str) -> None:
        """The gang has ended."""
        self._known.pop(gang, None)

    def note_transfers(
        self, gang: str, sender: str, transfers: Iterable[agent_pb2.ReplicaTransfer], members: Collection[str]
    ) -> None:
        """The agent on `sender` has reported these. What can't be is left out, and what is known already."""
        for one in transfers:
            known = self._known.get(gang, {}).get(sender, {}).get((one.node, False))
            if one.node not in members or not _is_possible(one.bytes, one.seconds) or not one.number:
                continue
            if known is None or (one.number, one.bytes) != (known.number, known.size):
                self._note(gang, KnownRate(sender, one.node, one.bytes, one.seconds, clock.monotonic(), one.number))

    def _note(self, gang: str, rate: KnownRate) -> None:
        of_sender = self._known.setdefault(gang, {}).setdefault(rate.sender, {})
        of_sender.pop((rate.receiver, rate.requested), None)
        of_sender[rate.receiver, rate.requested] = rate
        while len(of_sender) > MOST_RECEIVERS:
            del of_sender[next(iter(of_sender))]

    def note_measurement(self, gang: str, node: str, message: agent_pb2.LinkMeasurement) -> None:
        """The agent on `node` answers an order to measure. An answer that nobody waits for is ignored."""
        asked, sender, answer = self._answers.get(message.number, ("", "", None))
        if answer is not None and (asked, sender) == (gang, node) and not answer.done():
            answer.set_result(message)

    async def measure(self, term: int, stream: AgentOutbox, receiver: str, address: str) -> KnownRate:
        """Has the agent of `stream` send to the agent on `receiver`, at `address`.

        Raises:
            NotMeasured: another measurement of this gang is under way, or an agent can't do it.
        """
        gang, sender = stream.gang, stream.node
        with self._only_one(gang):
            self._numbers += 1
            answer: asyncio.Future[agent_pb2.LinkMeasurement] = asyncio.get_running_loop().create_future()
            self._answers[self._numbers] = (gang, sender, answer)
            order = agent_pb2.MeasureOrder(number=self._numbers, node=receiver, peer_address=address)
            stream.put(agent_pb2.CoordinatorMessage(term=term, measure=order))
            try:
                async with asyncio.timeout(ANSWER_S):
                    found = await answer
            except TimeoutError:
                raise NotMeasured(f"the agent on {sender} does not answer within {ANSWER_S:g} s") from None
            finally:
                del self._answers[order.number]
        if found.error or not _is_possible(found.bytes, found.seconds):
            raise NotMeasured(found.error[:200] or f"no bytes have come from {sender} to {receiver}")
        rate = KnownRate(
            sender, receiver, found.bytes, found.seconds, clock.monotonic(), 0, found.cores_shared, _rating(found)
        )
        self._note(gang, rate)
        return rate

    @contextmanager
    def _only_one(self, gang: str) -> Iterator[None]:
        if gang in self._under_way:
            raise NotMeasured("another link of this job is being measured: try again")
        self._under_way.add(gang)
        try:
            yield
        finally:
            self._under_way.discard(gang)


def _rating(found: agent_pb2.LinkMeasurement) -> float:
    return found.rated if math.isfinite(found.rated) and found.rated > 0 else 0.0


def _is_possible(size: int, seconds: float) -> bool:
    return size > 0 and math.isfinite(seconds) and 1e-9 <= seconds <= 1e6
