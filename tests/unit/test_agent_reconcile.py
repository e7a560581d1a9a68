"""What an agent does next, for every duty and every state of its node."""

from dataclasses import replace

import pytest

from muster.daemon.agent.ranks.reconcile import (
    CloseStore,
    ExitAgent,
    KillRanks,
    LocalRank,
    LocalState,
    OpenStore,
    ReportFenced,
    StartRanks,
    Step,
    is_carried_out,
    next_steps,
)
from muster.v1.agent_pb2 import DUTY_EXIT, DUTY_FENCE, DUTY_HOLD, DUTY_RUN, DUTY_UNSPECIFIED, Order, RankPlace

HOLD = Order(duty=DUTY_HOLD)
EXIT = Order(duty=DUTY_EXIT, exit_code=7, reason="done")


def fence(generation: int, store_node: str = "") -> Order:
    return Order(duty=DUTY_FENCE, generation=generation, store_node=store_node)


def run(generation: int) -> Order:
    places = [RankPlace(rank=rank, node="here" if rank < 2 else "there", local_rank=rank % 2) for rank in range(4)]
    return Order(duty=DUTY_RUN, generation=generation, world_size=4, places=places)


def alive(*generations: int) -> tuple[LocalRank, ...]:
    return tuple(LocalRank(rank, generation, alive=True) for rank, generation in enumerate(generations))


def ended(*generations: int) -> tuple[LocalRank, ...]:
    return tuple(LocalRank(rank, generation, alive=False) for rank, generation in enumerate(generations))


FRESH = LocalState("here")
START_BOTH = ((0, 0), (1, 1))


@pytest.mark.parametrize(
    ("local", "order", "steps"),
    [
        # nothing stands
        (FRESH, HOLD, []),
        (FRESH, EXIT, [ExitAgent(7, "done")]),
        (FRESH, fence(0), []),
        (FRESH, fence(0, "here"), [OpenStore(1)]),
        (FRESH, fence(0, "there"), []),
        (FRESH, fence(3), [ReportFenced(3)]),
        (FRESH, run(1), [StartRanks(1, START_BOTH)]),
        (FRESH, run(4), [ReportFenced(3), StartRanks(4, START_BOTH)]),
        (FRESH, Order(duty=DUTY_UNSPECIFIED), []),
        # ranks live
        (replace(FRESH, ranks=alive(1, 1)), run(1), []),
        (replace(FRESH, ranks=alive(1)), run(1), [StartRanks(1, ((1, 1),))]),
        (replace(FRESH, ranks=alive(1, 1)), fence(1, "here"), [KillRanks(1), OpenStore(2)]),
        (replace(FRESH, ranks=alive(2, 2)), fence(1), [ReportFenced(1)]),
        (replace(FRESH, ranks=alive(1, 1)), HOLD, [KillRanks(1)]),
        (replace(FRESH, ranks=alive(1, 1)), EXIT, [KillRanks(1)]),
        # killed, but not gone yet: wait
        (replace(FRESH, ranks=alive(1, 1), killed_generation=1), fence(1), []),
        (replace(FRESH, ranks=alive(1, 1), killed_generation=1), EXIT, []),
        (replace(FRESH, ranks=alive(1, 1), killed_generation=1), run(2), []),
        # an order to run goes ahead of what lives: end it first
        (replace(FRESH, ranks=alive(1, 1)), run(2), [KillRanks(1)]),
        # gone
        (replace(FRESH, ranks=ended(1, 1), killed_generation=1), fence(1), [ReportFenced(1)]),
        (replace(FRESH, ranks=ended(1, 1), killed_generation=1, fenced_generation=1), fence(1), []),
        (replace(FRESH, ranks=ended(1, 1), fenced_generation=1), run(2), [StartRanks(2, START_BOTH)]),
        # a rank that has ended by itself is not started again in its generation
        (replace(FRESH, ranks=ended(1, 1)), run(1), []),
        # a generation that was fenced never runs here again
        (replace(FRESH, fenced_generation=2), run(2), []),
        (replace(FRESH, fenced_generation=3), run(2), []),
        # we fenced ourselves: report it, whatever the order says, and don't go on
        (replace(FRESH, ranks=ended(1, 1), killed_generation=1), run(1), [ReportFenced(1)]),
        (replace(FRESH, ranks=ended(1, 1), killed_generation=1, fenced_generation=1), run(1), []),
        # stores
        (replace(FRESH, store_generation=1), fence(0, "here"), []),
        (replace(FRESH, store_generation=1), fence(0, "there"), [CloseStore()]),
        (replace(FRESH, store_generation=1, fenced_generation=1), fence(1, "here"), [OpenStore(2)]),
        (replace(FRESH, store_generation=1), HOLD, [CloseStore()]),
        (replace(FRESH, store_generation=2, fenced_generation=1, ranks=alive(2, 2)), run(2), []),
        (replace(FRESH, store_generation=1, fenced_generation=1, ranks=alive(2, 2)), run(2), [CloseStore()]),
        (replace(FRESH, store_generation=1), EXIT, [CloseStore(), ExitAgent(7, "done")]),
    ],
)
def test_steps(local: LocalState, order: Order, steps: list[Step]) -> None:
    assert next_steps(local, order) == steps


def test_a_spare_starts_nothing() -> None:
    assert next_steps(LocalState("spare"), run(1)) == []


@pytest.mark.parametrize(
    ("local", "order", "expected"),
    [
        (replace(FRESH, fenced_generation=1), fence(1), True),
        (replace(FRESH, ranks=alive(1), killed_generation=1), fence(1), False),
        (replace(FRESH, ranks=alive(2), fenced_generation=1), fence(1), True),
        (FRESH, fence(1), False),
        (replace(FRESH, ranks=alive(1, 1)), run(1), True),
        (replace(FRESH, ranks=alive(1, 1), killed_generation=1), run(2), False),
        (replace(FRESH, ranks=alive(1), killed_generation=1), HOLD, False),
        (FRESH, HOLD, True),
    ],
)
def test_settled(local: LocalState, order: Order, expected: bool) -> None:
    assert is_carried_out(local, order) is expected


def test_a_whole_recovery_converges_whatever_order_comes_twice() -> None:
    local = replace(FRESH, ranks=alive(1, 1))
    for order in (run(1), run(1), fence(1, "here"), fence(1, "here"), run(2), run(2)):
        local = settle(local, order)
    assert local == LocalState("here", fenced_generation=1, killed_generation=1, ranks=alive(2, 2), store_generation=2)


def settle(local: LocalState, order: Order) -> LocalState:
    """Carry out steps until none is left; processes end as soon as they are killed."""
    while steps := next_steps(local, order):
        for step in steps:
            match step:
                case KillRanks(generation):
                    local = replace(
                        local,
                        killed_generation=generation,
                        ranks=tuple(
                            replace(rank, alive=rank.alive and rank.generation > generation) for rank in local.ranks
                        ),
                    )
                case ReportFenced(generation):
                    local = replace(local, fenced_generation=generation)
                case OpenStore(generation):
                    local = replace(local, store_generation=generation)
                case CloseStore():
                    local = replace(local, store_generation=0)
                case StartRanks(generation, places):
                    local = replace(local, ranks=tuple(LocalRank(rank, generation, True) for rank, _ in places))
    return local
