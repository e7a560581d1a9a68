"""Tells agents their orders: each kind is made once for a gang, and sent where it is news.

A gang of a thousand nodes gets the same few orders a thousand times; while its agents arrive, one by one, those that
are there hear of the others a few times a second, not once for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from muster.daemon.coordinator.core import facts as f
from muster.daemon.coordinator.core.ledger import Gang, Ledger
from muster.daemon.coordinator.orders import Orders
from muster.daemon.coordinator.streams import AgentStream, AgentStreams
from muster.v1 import agent_pb2 as pb

JOINED_S = 0.25
"""Seconds after which a gang's agents, the one that joined too, hear who has joined, where that is all that changed."""


class OrderBook:
    """The orders of all gangs in `ledger`, for the agents behind `streams`, under `term`."""

    def __init__(self, ledger: Ledger, streams: AgentStreams, term: int) -> None:
        self._ledger = ledger
        self._streams = streams
        self._term = term
        self._pages: dict[str, _Page] = {}
        self._soon: dict[str, asyncio.TimerHandle] = {}

    def tell(self, stream: AgentStream) -> None:
        """Send the agent behind `stream` its order, whatever it was told before."""
        stream.put(self._page(self._ledger.gangs[stream.gang]).message(stream.node))

    def follow(self, facts: Iterable[f.Fact]) -> None:
        """Send agents what `facts`, which hold by now, change in their orders."""
        changed: dict[str, bool] = {}
        for fact in facts:
            if isinstance(fact, f.NodeRegistered | f.NodeJudged | f.SlurmOwed | f.SlurmSettled):
                continue  # no order depends on these
            changed[fact.gang] = changed.get(fact.gang, False) or not isinstance(fact, f.MemberJoined | f.JobChanged)
        for gang, now in changed.items():
            if now:
                self._tell_all(gang)
            elif gang not in self._soon:
                self._soon[gang] = asyncio.get_running_loop().call_later(JOINED_S, self._tell_all, gang)

    def close(self) -> None:
        """Tell nobody any more."""
        for timer in self._soon.values():
            timer.cancel()
        self._soon.clear()

    def _tell_all(self, id: str) -> None:
        if timer := self._soon.pop(id, None):
            timer.cancel()
        self._pages.pop(id, None)
        if gang := self._ledger.gangs.get(id):
            self._page(gang).tell(self._streams.of(id))

    def _page(self, gang: Gang) -> _Page:
        if gang.id not in self._pages:
            self._pages[gang.id] = _Page(gang, self._term)
        return self._pages[gang.id]


class _Page:
    """The orders of one gang, as its ledger stands."""

    def __init__(self, gang: Gang, term: int) -> None:
        self._orders = Orders(gang)
        self._term = term
        self._messages: dict[int, pb.CoordinatorMessage] = {}

    def message(self, node: str) -> pb.CoordinatorMessage:
        """The very same object for all nodes of one duty."""
        order = self._orders.of(node)
        if id(order) not in self._messages:
            self._messages[id(order)] = pb.CoordinatorMessage(term=self._term, order=order)
        return self._messages[id(order)]

    def tell(self, streams: Iterable[AgentStream]) -> None:
        """Send those whose order is another than the one that they were sent last."""
        news: dict[tuple[int, int], bool] = {}
        for stream in streams:
            message = self.message(stream.node)
            pair = (id(stream.ordered), id(message))
            if pair not in news:
                news[pair] = stream.ordered != message
            if news[pair]:
                stream.put(message)
