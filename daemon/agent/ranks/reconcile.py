"""What an agent does next: a pure function of the node's state and the newest order.

An order describes the wanted state, not a change. `next_steps` compares the wanted state with the state of the node and
returns the steps that bring the two closer. The agent calls `next_steps` again after every change, until no step is
left. So an order may arrive twice, late, or from a restarted coordinator. A step that failed is returned again.

    duty    the wanted state
    HOLD    no rank is alive, no store is open
    FENCE g no rank of a generation <= g is alive; the store node has a store open for g + 1
    RUN g   as FENCE g - 1, and every local rank of g has been started once
    EXIT    no rank is alive; then the agent exits

A generation that was fenced here never runs here again, whatever is ordered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muster.v1.agent_pb2 import Duty, Order, RankPlace

EVERY_GENERATION = 2**63


@dataclass(frozen=True, slots=True)
class LocalRank:
    """A rank that was started here. `alive`: the rank, or a process that it started, may still exist."""

    rank: int
    generation: int
    alive: bool


@dataclass(frozen=True, slots=True)
class LocalState:
    """The state of this node. Generation 0 means none."""

    node: str
    # No process of a generation up to this one is left.
    fenced_generation: int = 0
    # Ranks of generations up to this one have been sent SIGKILL.
    killed_generation: int = 0
    ranks: tuple[LocalRank, ...] = ()
    # The generation whose rendezvous store is open or opening.
    store_generation: int = 0


@dataclass(frozen=True, slots=True)
class KillRanks:
    """SIGKILL every rank of generations up to `generation`."""

    generation: int


@dataclass(frozen=True, slots=True)
class ReportFenced:
    """Record and report that no process of generations up to `generation` is left."""

    generation: int


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Open a rendezvous store for `generation`, in place of any other."""

    generation: int


@dataclass(frozen=True, slots=True)
class CloseStore:
    """End the rendezvous store."""


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Start these ranks of this node in `generation`."""

    generation: int
    places: tuple[tuple[int, int], ...]
    """(rank, local rank)"""


@dataclass(frozen=True, slots=True)
class ExitAgent:
    """Free all memory and end the agent with `exit_code`."""

    exit_code: int
    reason: str


Step = KillRanks | ReportFenced | OpenStore | CloseStore | StartRanks | ExitAgent


def next_steps(local: LocalState, order: Order) -> list[Step]:
    """The steps that bring `local` closer to `order`; empty: they agree, or a running step must finish first."""
    if local.killed_generation > local.fenced_generation and not _alive(local, local.killed_generation):
        return [ReportFenced(local.killed_generation)]  # whether an order or self-fencing killed them
    match order.duty:
        case Duty.DUTY_HOLD:
            return [*_kill(local, EVERY_GENERATION), *_match_store(local, 0)]
        case Duty.DUTY_FENCE:
            store = order.generation + 1 if order.store_node == local.node else 0
            return [*_steps_to_fence(local, order.generation), *_match_store(local, store)]
        case Duty.DUTY_RUN:
            return _steps_to_run(local, order)
        case Duty.DUTY_EXIT:
            if _alive(local, EVERY_GENERATION):
                return _kill(local, EVERY_GENERATION)
            return [*_match_store(local, 0), ExitAgent(order.exit_code, order.reason)]
    return []  # a duty of a newer version: change nothing


def is_carried_out(local: LocalState, order: Order) -> bool:
    """Whether the order is carried out: no step is left and nothing is still running."""
    if next_steps(local, order):
        return False
    bounds = {Duty.DUTY_FENCE: order.generation, Duty.DUTY_RUN: order.generation - 1}
    return not _alive(local, bounds.get(order.duty, EVERY_GENERATION))


def _steps_to_run(local: LocalState, order: Order) -> list[Step]:
    if order.generation <= local.fenced_generation or order.generation <= local.killed_generation:
        return []
    previous = order.generation - 1
    steps: list[Step] = [*_match_store(local, order.generation, or_none=True), *_steps_to_fence(local, previous)]
    if not _alive(local, previous):
        steps += _steps_to_start(local, order.generation, order.places)
    return steps


def _steps_to_start(local: LocalState, generation: int, places: Sequence[RankPlace]) -> list[Step]:
    started = {rank.rank for rank in local.ranks if rank.generation == generation}
    missing = tuple(
        (place.rank, place.local_rank) for place in places if place.node == local.node and place.rank not in started
    )
    return [StartRanks(generation, missing)] if missing else []


def _steps_to_fence(local: LocalState, generation: int) -> list[Step]:
    if _alive(local, generation):
        return _kill(local, generation)
    return [ReportFenced(generation)] if local.fenced_generation < generation else []


def _kill(local: LocalState, generation: int) -> list[Step]:
    alive = _alive(local, generation)
    newest = max((rank.generation for rank in alive), default=0)
    return [KillRanks(newest)] if newest > local.killed_generation else []


def _match_store(local: LocalState, generation: int, *, or_none: bool = False) -> list[Step]:
    if local.store_generation == generation or (or_none and local.store_generation == 0):
        return []
    return [OpenStore(generation)] if generation and not or_none else [CloseStore()]


def _alive(local: LocalState, generation: int) -> list[LocalRank]:
    return [rank for rank in local.ranks if rank.alive and rank.generation <= generation]
