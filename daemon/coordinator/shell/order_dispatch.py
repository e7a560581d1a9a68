"""Sends agents their orders. An order is built once for a gang, and sent to the agents whose order it changes.

A gang of a thousand nodes has few different orders. While a gang gathers, its agents attach one by one: the attached
agents get the list of members a few times a second, not once for each arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.shell.orders import Orders
from muster.v1 import agent_pb2 as pb

JOIN_BATCH_S = 0.25
"""Seconds for which joins of a gathering gang are collected before its agents get the new list of members."""

_CHANGES_NO_ORDER = (
    facts.NodeRegistered | facts.NodeJudged | facts.CorrelatedFaultSuspected | facts.CorrelatedFaultResolved
    | facts.SlurmCallOwed | facts.SlurmCallSettled | facts.JobChanged | facts.PoolJobQueued
    | facts.NodeDrainRequested | facts.NodeDrainEnded | facts.PrecursorEnded | facts.NewcomerKnown
)  # fmt: skip
"""Facts that no order depends on."""


class OrderRecipient(Protocol):
    """The stream of one agent. `last_order` is the newest message that was put."""

    @property
    def gang(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def last_order(self) -> pb.CoordinatorMessage | None: ...
    def put(self, message: pb.CoordinatorMessage) -> None: ...


class OrderDispatcher:
    """Sends the orders of all gangs in `state`, under `term`.

    Args:
        recipients: returns the open streams of a gang's agents.
        call_later: calls its second argument with its third after so many seconds.
    """

    def __init__(
        self,
        state: DurableState,
        term: int,
        recipients: Callable[[str], Iterable[OrderRecipient]],
        call_later: Callable[[float, Callable[[str], None], str], object],
    ) -> None:
        self._state = state
        self._term = term
        self._recipients = recipients
        self._call_later = call_later
        self._gang_orders: dict[str, _GangOrders] = {}
        self._scheduled: set[str] = set()

    def send_to(self, recipient: OrderRecipient) -> None:
        """Send `recipient` its current order, even if the recipient has it already."""
        recipient.put(self._orders_of(self._state.gangs[recipient.gang]).message(recipient.node))

    def send_changes(self, decided: Iterable[facts.Fact]) -> None:
        """Send agents the orders that `decided` changes. The facts are applied to the durable state already."""
        changed: dict[str, bool] = {}
        for fact in decided:
            if not isinstance(fact, _CHANGES_NO_ORDER):
                changed[fact.gang] = changed.get(fact.gang, False) or not self._can_wait(fact)
        for gang, at_once in changed.items():
            if at_once:
                self._send_to_all(gang)
            elif gang not in self._scheduled:
                self._scheduled.add(gang)
                self._call_later(JOIN_BATCH_S, self._send_scheduled, gang)

    def close(self) -> None:
        """Cancel all scheduled sending."""
        self._scheduled.clear()

    def _can_wait(self, fact: facts.Fact) -> bool:
        return isinstance(fact, facts.MemberJoined) and self._state.gangs[fact.gang].phase is Phase.GATHERING

    def _send_scheduled(self, gang: str) -> None:
        if gang in self._scheduled:
            self._send_to_all(gang)

    def _send_to_all(self, id: str) -> None:
        self._scheduled.discard(id)
        self._gang_orders.pop(id, None)
        if gang := self._state.gangs.get(id):
            self._orders_of(gang).send(self._recipients(id))

    def _orders_of(self, gang: Gang) -> _GangOrders:
        if gang.id not in self._gang_orders:
            self._gang_orders[gang.id] = _GangOrders(gang, self._term)
        return self._gang_orders[gang.id]


class _GangOrders:
    """The messages with the orders of one gang, as the durable state was when they were built."""

    def __init__(self, gang: Gang, term: int) -> None:
        self._orders = Orders(gang)
        self._term = term
        self._messages: dict[int, pb.CoordinatorMessage] = {}

    def message(self, node: str) -> pb.CoordinatorMessage:
        """The message for `node`: the same object for all nodes with the same duty."""
        order = self._orders.for_node(node)
        if id(order) not in self._messages:
            self._messages[id(order)] = pb.CoordinatorMessage(term=self._term, order=order)
        return self._messages[id(order)]

    def send(self, recipients: Iterable[OrderRecipient]) -> None:
        """Send each recipient its order, unless the recipient got an equal order last."""
        differs: dict[tuple[int, int], bool] = {}
        for recipient in recipients:
            message = self.message(recipient.node)
            pair = (id(recipient.last_order), id(message))
            if pair not in differs:
                differs[pair] = recipient.last_order != message
            if differs[pair]:
                recipient.put(message)
