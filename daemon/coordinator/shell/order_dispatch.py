"""Tells agents their orders: each kind is made once for a gang, and sent where it is news.

A gang of a thousand nodes gets the same few orders a thousand times; while it gathers, and its agents arrive one by
one, those that are there hear of the others a few times a second, not once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState, Gang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.shell.orders import Orders
from muster.v1 import agent_pb2 as pb

JOINED_S = 0.25
"""Seconds after which the agents of a gang that gathers, the one that joined too, hear who has joined."""

_NO_ORDER = (
    facts.NodeRegistered | facts.NodeJudged | facts.EchoHeard | facts.EchoOver | facts.SlurmOwed | facts.SlurmSettled
    | facts.JobChanged | facts.PoolQueued
)  # fmt: skip
"""No order depends on these."""


class Listener(Protocol):
    """The stream of one agent. `ordered` is the message that was put last."""

    @property
    def gang(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def ordered(self) -> pb.CoordinatorMessage | None: ...
    def put(self, message: pb.CoordinatorMessage) -> None: ...


class OrderBook:
    """The orders of all gangs in `state`, under `term`.

    Args:
        listeners: the open streams of a gang's agents.
        later: calls its second argument with its third in so many seconds.
    """

    def __init__(
        self,
        state: DurableState,
        term: int,
        listeners: Callable[[str], Iterable[Listener]],
        later: Callable[[float, Callable[[str], None], str], object],
    ) -> None:
        self._state = state
        self._term = term
        self._listeners = listeners
        self._later = later
        self._pages: dict[str, _Page] = {}
        self._soon: set[str] = set()

    def tell(self, listener: Listener) -> None:
        """Send the agent behind `listener` its order, whatever it was told before."""
        listener.put(self._page(self._state.gangs[listener.gang]).message(listener.node))

    def follow(self, facts: Iterable[facts.Fact]) -> None:
        """Send agents what `facts`, which hold by now, change in their orders."""
        changed: dict[str, bool] = {}
        for fact in facts:
            if not isinstance(fact, _NO_ORDER):
                changed[fact.gang] = changed.get(fact.gang, False) or not self._can_wait(fact)
        for gang, now in changed.items():
            if now:
                self._tell_all(gang)
            elif gang not in self._soon:
                self._soon.add(gang)
                self._later(JOINED_S, self._tell_late, gang)

    def close(self) -> None:
        """Tell nobody any more who has joined."""
        self._soon.clear()

    def _can_wait(self, fact: facts.Fact) -> bool:
        return isinstance(fact, facts.MemberJoined) and self._state.gangs[fact.gang].phase is Phase.GATHERING

    def _tell_late(self, gang: str) -> None:
        if gang in self._soon:
            self._tell_all(gang)

    def _tell_all(self, id: str) -> None:
        self._soon.discard(id)
        self._pages.pop(id, None)
        if gang := self._state.gangs.get(id):
            self._page(gang).tell(self._listeners(id))

    def _page(self, gang: Gang) -> _Page:
        if gang.id not in self._pages:
            self._pages[gang.id] = _Page(gang, self._term)
        return self._pages[gang.id]


class _Page:
    """The orders of one gang, as its durable state stood when they were made."""

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

    def tell(self, listeners: Iterable[Listener]) -> None:
        """Send those whose order is another than the one that they were sent last."""
        news: dict[tuple[int, int], bool] = {}
        for listener in listeners:
            message = self.message(listener.node)
            pair = (id(listener.ordered), id(message))
            if pair not in news:
                news[pair] = listener.ordered != message
            if news[pair]:
                listener.put(message)
