"""`make bench-placement`: how good and how fast the map from ranks to nodes is.

    python -m benchmarks.bench_placement [--fabrics N] [--repeats N] [--draws N]

- Quality: random fabrics of three tiers and 8 to 10 nodes, on which random order costs at least 20 % more than the
  optimum. The cost of Muster's map, divided by the exact optimum (`exact_placement`). The figure is the worst of 200.
- Speed: a gang of 1,024 nodes on a fabric of 12,500 nodes, and the loss of one of its nodes. Gangs with several kinds
  of parallelism; the fabric is whole, or most of it is taken. The figures are medians of CPU time; the worst is in the
  table.
- Gain: a real Slurm hands out nodes to jobs of 1,040 and of 52 nodes on a fragmented site of 12,500
  (`slurm_allocations`). Gangs of 1,024 and of 48 nodes are placed on them. The predicted communication time of a step
  (`step_time`) with the nodes in Slurm's order, and in random order, is divided by that of Muster's map. The figures
  are medians over all allocations and gangs of a site whose names follow the switches, which is the order that suits
  Slurm best. The table has the worst, and a site whose names cross the switches.

The output is a table of all cases. The last line is a JSON object with the main figures. Names contain the units.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks.slurm_allocations import SiteShape, allocations
from muster.fabric.groups.axes import Axes
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.model.node import natural_order
from muster.fabric.placement.maps.rank_map import place
from muster.fabric.placement.maps.refill import MovePrice, refill
from muster.fabric.placement.node_groups import NodeGroup, node_groups
from muster.fabric.placement.step_time import step_seconds
from muster.fabric.placement.weights import usual_weights
from muster.fabric.sources.tiers import Tiers
from muster.fabric.testing.exact_placement import least_cost, random_problem

FABRICS = 200
WORSE_IN_RANDOM_ORDER = 1.2
LARGE, MEDIUM = 1_024, 48
"""Nodes with ranks."""
SPARES_OF = {LARGE: 16, MEDIUM: 4}
LOCAL_RANKS = 8
AXES = {
    LARGE: {
        "tp8 pp8": Axes(tensor=8, pipeline=8, data=128),
        "tp16 pp8": Axes(tensor=16, pipeline=8, data=64),
        "tp8 cp4 pp8": Axes(tensor=8, context=4, pipeline=8, data=32),
        "tp8 ep8 pp16": Axes(tensor=8, expert=8, pipeline=16, data=64),
        "dp": Axes(data=8_192),
    },
    MEDIUM: {
        "tp8 pp8": Axes(tensor=8, pipeline=8, data=6),
        "tp16 pp4": Axes(tensor=16, pipeline=4, data=6),
        "tp32 pp2": Axes(tensor=32, pipeline=2, data=6),
        "tp8 cp4 pp4": Axes(tensor=8, context=4, pipeline=4, data=3),
        "tp8 ep8 pp2": Axes(tensor=8, expert=8, pipeline=2, data=24),
    },
}
OVERSUBSCRIBED = Tiers(oversubscription={Level.POD: 2.0, Level.ANY: 4.0})
SITE = SiteShape(leaf_nodes=25, pod_leaves=20, pods=25, tiers=OVERSUBSCRIBED)
DRAWS, RANDOM_ORDERS = 3, 5
STATE_SIZE = 140e9
"""Bytes of one node's state: 1e9 parameters a GPU, 16 bytes each, and some more."""
LOSSES = 9
"""Nodes that are lost for the time of a swap, one after the other, in each case."""
Made = TypeVar("Made")

REPORTED_FIGURES = ("gang_1024_s", "swap_ms", "worst_over_exact", "over_slurm_order", "over_random")


def quality(fabrics: int) -> list[float]:
    """The cost of each map, divided by the optimum."""
    ratios: list[float] = []
    for seed in count():
        if len(ratios) == fabrics:
            return ratios
        chance = random.Random(seed)
        problem = random_problem(chance)
        if not problem.groups:
            continue
        cost = problem.cost(place(problem.fabric, problem.groups, problem.fabric.nodes, problem.seats).seats)
        random_order = problem.random_cost(chance)
        if random_order < WORSE_IN_RANDOM_ORDER * cost:
            continue
        exact = least_cost(problem, cost)
        if random_order >= WORSE_IN_RANDOM_ORDER * exact:
            ratios.append(cost / exact)
    raise AssertionError("an endless count has ended")


@dataclass(frozen=True)
class Case:
    """A gang that is placed on some nodes."""

    name: str
    seats: int
    groups: tuple[NodeGroup, ...]
    nodes: tuple[str, ...]


def cases(fabric: Fabric) -> Iterator[Case]:
    """Each kind of gang on the whole fabric, and on what other jobs have left of it."""
    chance = random.Random(0)
    for seats, gangs in AXES.items():
        for name, axes in gangs.items():
            groups = node_groups(axes, LOCAL_RANKS, usual_weights(axes))
            left_over = _left_over(fabric, seats + SPARES_OF[seats], chance)
            yield Case(f"{seats} nodes, {name}, whole", seats, groups, tuple(fabric.nodes))
            yield Case(f"{seats} nodes, {name}, fragmented", seats, groups, tuple(left_over))


def _left_over(fabric: Fabric, nodes: int, chance: random.Random) -> list[str]:
    """Free nodes in some leaves, between 1 and all of each, until there are enough."""
    free: list[str] = []
    leaves = list(fabric.domains(Level.LEAF))
    chance.shuffle(leaves)
    for leaf in leaves:
        free += chance.sample(sorted(leaf.nodes), chance.randint(1, len(leaf.nodes)))
        if len(free) >= nodes:
            return free[:nodes]
    raise AssertionError("the fabric has too few nodes")


@dataclass(frozen=True)
class Result:
    """What one case has cost."""

    case: Case
    place_s: float
    swap_ms: tuple[float, ...]
    step_seconds: float


def measure(fabric: Fabric, case: Case, repeats: int) -> Result:
    """Places the gang, and takes nodes from it."""
    chance = random.Random(1)
    took: list[float] = []
    for _ in range(repeats):
        found = _timed(partial(place, fabric, case.groups, case.nodes, case.seats), took)
    swaps: list[float] = []
    members = [*found.seats, *sorted(found.spares, key=natural_order)[: SPARES_OF[case.seats]]]
    for lost in chance.sample(found.seats, LOSSES):
        usable = [node for node in members if node != lost]
        _timed(partial(refill, fabric, case.groups, found.seats, usable, MovePrice(STATE_SIZE)), swaps)
    return Result(
        case,
        statistics.median(took),
        tuple(seconds * 1000 for seconds in swaps),
        step_seconds(fabric, case.groups, found.seats),
    )


@dataclass(frozen=True)
class Gain:
    """The predicted communication of a step in other orders, divided by that of Muster's map."""

    site: str
    """How it is named, and what other jobs have left of it."""
    seats: int
    gang: str
    over_slurm: float
    over_random: float


def gains(draws: int) -> Iterator[Gain]:
    """Each kind of gang on the nodes that Slurm hands out."""
    chance = random.Random(2)
    sizes = {seats + spares: seats for seats, spares in SPARES_OF.items()}
    for allocation in allocations(SITE, list(sizes), draws):
        seats = sizes[len(allocation.nodes)]
        for name, axes in AXES[seats].items():
            groups = node_groups(axes, LOCAL_RANKS, usual_weights(axes))
            own = step_seconds(
                allocation.fabric, groups, place(allocation.fabric, groups, allocation.nodes, seats).seats
            )
            in_order = step_seconds(allocation.fabric, groups, allocation.nodes[:seats])
            mixed = [
                step_seconds(allocation.fabric, groups, chance.sample(allocation.nodes, seats))
                for _ in range(RANDOM_ORDERS)
            ]
            site = f"{allocation.naming}, {allocation.free}"
            yield Gain(site, seats, name, in_order / own, statistics.median(mixed) / own)


def _timed(call: Callable[[], Made], took: list[float]) -> Made:
    start = time.process_time()
    result = call()
    took.append(time.process_time() - start)
    return result


def main() -> None:
    """Measure, print the table and the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fabrics", type=int, default=FABRICS, help=f"random fabrics; default {FABRICS}")
    parser.add_argument("--repeats", type=int, default=3, help="starts of each gang; default 3")
    parser.add_argument("--draws", type=int, default=DRAWS, help=f"fragmented sites of each naming; default {DRAWS}")
    options = parser.parse_args()
    fabric = SITE.fabric(SITE.leaves("along"))
    results = [measure(fabric, case, options.repeats) for case in cases(fabric)]
    ratios = quality(options.fabrics)
    gained = list(gains(options.draws))
    _print_table(results, ratios)
    _print_gains(gained)
    along = [gain for gain in gained if gain.site.startswith("along")]
    large = [result for result in results if result.case.seats == LARGE]
    figures = {
        "gang_1024_s": round(statistics.median(result.place_s for result in large), 3),
        "swap_ms": round(statistics.median(ms for result in large for ms in result.swap_ms), 1),
        "worst_over_exact": round(max(ratios), 4),
        "over_slurm_order": round(statistics.median(gain.over_slurm for gain in along), 3),
        "over_random": round(statistics.median(gain.over_random for gain in along), 3),
    }
    print(json.dumps({name: figures[name] for name in REPORTED_FIGURES}))


def _print_table(results: Sequence[Result], ratios: Sequence[float]) -> None:
    table = Table("gang, fabric", "start s", "swap ms", "worst swap ms", "step s")
    for result in results:
        table.add_row(
            result.case.name,
            f"{result.place_s:.3f}",
            f"{statistics.median(result.swap_ms):.1f}",
            f"{max(result.swap_ms):.1f}",
            f"{result.step_seconds:.3f}",
        )
    console = Console(width=130)
    console.print(table)
    console.print(
        f"{len(ratios)} random fabrics: median {statistics.median(ratios):.4f}, worst {max(ratios):.4f} of the optimum"
    )


def _print_gains(gained: Sequence[Gain]) -> None:
    table = Table("site: names, free; gang", "Slurm's order, median", "best", "worst", "random order, median")
    rows: dict[str, list[Gain]] = {}
    for gain in gained:
        rows.setdefault(f"{gain.site}; {gain.seats} nodes, {gain.gang}", []).append(gain)
    for gain in gained:
        rows.setdefault(f"{gain.site}; all", []).append(gain)
    for words, found in rows.items():
        _add_gains(table, words, found)
    Console(width=130).print(table)


def _add_gains(table: Table, words: str, gained: Sequence[Gain]) -> None:
    over_slurm = [gain.over_slurm for gain in gained]
    table.add_row(
        words,
        *(f"{value:.2f} x" for value in (statistics.median(over_slurm), min(over_slurm), max(over_slurm))),
        f"{statistics.median(gain.over_random for gain in gained):.2f} x",
    )


if __name__ == "__main__":
    main()
