"""The seed that has found each planted bug (known_seeds.toml). It is tried first, so most bugs need one world.

A change of the simulator or of the core changes the worlds. A known seed that no longer finds its bug costs time and
nothing else: all seeds are tried then. `python -m muster.simulator.planted_bugs NAME` writes down the seed of one bug,
`--renew` those of all.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from muster.simulator import seeds
from muster.simulator.planted_bugs.catalogue import PLANTED_BUGS
from muster.simulator.planted_bugs.planting import PlantedBugDoesNotFit, planted

_NO_SUCH_NAME = ("AttributeError", "NameError", "UnboundLocalError")
_FILE = Path(__file__).with_name("known_seeds.toml")
_HEADER = """\
# The seed that has found each planted bug. `python -m muster.simulator.planted_bugs --renew` writes this file, or NAME
# in place of --renew the line of one bug.
"""


def known_seeds() -> Mapping[str, int]:
    """Name of a planted bug -> the seed that has found it. A bug that is new has none."""
    found: dict[str, int] = tomllib.loads(_FILE.read_text())
    return found


def in_order(name: str, count: int) -> Iterator[int]:
    """Each seed below `count` once: the known seed of this bug, then all others."""
    known = known_seeds().get(name, count)
    if known < count:
        yield known
    yield from (seed for seed in range(count) if seed != known)


def first_seed_that_finds(name: str, count: int) -> seeds.Result | None:
    """The result of the first of up to `count` seeds that violates an invariant with this bug. None: no seed does.

    Raises:
        PlantedBugDoesNotFit: the bug has no place; or it names what does not exist, so that any seed would find it.
    """
    bug = PLANTED_BUGS[name]
    logging.disable(logging.CRITICAL)  # transcripts show what the parts would log
    try:
        with planted(bug):
            found = next((result for seed in in_order(name, count) if (result := seeds.run(seed)).violation), None)
    finally:
        logging.disable(logging.NOTSET)
    if found is not None and found.violation.startswith(_NO_SUCH_NAME):
        raise PlantedBugDoesNotFit(f"{name}: {bug.function} can't be told to do `{bug.bug}`: {found.violation}")
    return found


def renew(count: int) -> list[str]:
    """Look for each bug in up to `count` seeds, and write the file. Returns the bugs that no seed finds."""
    workers, context = os.cpu_count() or 1, multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        found = dict(zip(PLANTED_BUGS, pool.map(partial(_find, count=count), PLANTED_BUGS), strict=True))
    write({name: seed for name, seed in found.items() if seed is not None})
    return [name for name, seed in found.items() if seed is None]


def _find(name: str, count: int) -> int | None:
    found = first_seed_that_finds(name, count)
    return None if found is None else found.seed


def write(found: Mapping[str, int]) -> None:
    """Write the file: the seed of each bug."""
    _FILE.write_text(_HEADER + "".join(f"{name} = {seed}\n" for name, seed in sorted(found.items())))
