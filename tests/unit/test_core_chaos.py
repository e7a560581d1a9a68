"""Random faults at random times against the real core: no fit node is blamed, every gang settles, the journal folds.

Each seed is one run; a failing seed prints its transcript.
"""

import random

import pytest

from muster.daemon.coordinator.core import events as e
from muster.daemon.coordinator.core.events import Silence
from muster.daemon.coordinator.core.states import OUT_OF_SERVICE, Phase
from muster.daemon.coordinator.rehearsal import Rehearsal

HARMFUL = ("crash", "power_off", "pause", "signal")
HARMLESS = ("kill_rank", "accuse", "restart_coordinator", "kill_agent")


def strike(world: Rehearsal, chance: random.Random, touched: dict[str, str]) -> None:
    """One random fault on a node that has not been hit yet."""
    node = chance.choice([n for n in world.actors if n not in touched] or list(world.actors))
    kind = chance.choice(HARMFUL + HARMLESS)
    if kind == "restart_coordinator":
        world.restart_coordinator()
    elif kind == "accuse":
        witness = chance.choice(sorted(set(world.actors) - {node}))
        world.post(e.NeighbourAccused("g", witness, node, chance.choice(list(Silence))))
    elif world.actors[node].answers and world.actors[node].agent and not world.actors[node].left:
        touched[node] = kind
        getattr(world, kind)(node)


def idle(world: Rehearsal) -> bool:
    """Nothing will happen in this run of the job again."""
    return world.gang.final or world.gang.phase is Phase.REQUEUED


def settled(world: Rehearsal) -> bool:
    """Training goes on in a generation without dead ranks, or the gang is where it can stay."""
    gang = world.gang
    if idle(world):
        return True
    carriers = [world.actors[seat.node] for seat in gang.seats]
    alive = all(a.agent and a.answers and not a.exits for a in carriers)
    return gang.phase is Phase.RUNNING and alive and gang.stepped == gang.generation


@pytest.mark.parametrize("seed", range(200))
def test_random_faults(seed: int) -> None:
    chance = random.Random(seed)
    world = Rehearsal(
        chance.randint(3, 6), chance.randint(0, 3), durable_dir=chance.choice(["", "/d"]), max_failures=99
    )
    touched: dict[str, str] = {}
    try:
        for _ in range(chance.randint(1, 4)):
            pause = world.now + chance.expovariate(0.7)
            world.run_until(lambda p=pause: world.now >= p or idle(world), 1000)  # type: ignore[misc]
            if idle(world):
                break
            strike(world, chance, touched)
        world.run_until(lambda: settled(world), 400)
        blamed = {n.name for n in world.core.ledger.nodes.values() if n.verdict in OUT_OF_SERVICE}
        assert blamed <= {n for n, kind in touched.items() if kind in HARMFUL}
        assert {c.node for c in world.slurm if c.verb in ("down", "drain")} <= blamed
        assert world.folded() == world.core.ledger
    except (AssertionError, TimeoutError) as error:
        raise AssertionError(f"seed {seed}, faults {touched}:\n" + "\n".join(world.transcript()[-40:])) from error
