"""Plant one bug and look for it: `python -m muster.simulator.planted_bugs NAME [SEEDS]`.

The exit code is 1 if no seed finds the bug. A bug is planted when its module is imported, so each bug needs a process.
"""

from __future__ import annotations

import argparse
import sys

from muster.simulator.planted_bugs.catalogue import PLANTED_BUGS
from muster.simulator.planted_bugs.planting import first_seed_that_finds


def main() -> int:
    """Parse the command line, plant the bug and run the seeds."""
    parser = argparse.ArgumentParser(
        prog="planted_bugs", description="Run seeds until one of them finds a planted bug."
    )
    parser.add_argument("name", choices=PLANTED_BUGS, metavar="NAME", help=", ".join(PLANTED_BUGS))
    parser.add_argument("seeds", type=int, nargs="?", default=200, help="how many seeds to run at most")
    options = parser.parse_args()
    found = first_seed_that_finds(PLANTED_BUGS[options.name], options.seeds)
    if found is None:
        print(f"{options.name}: not found by {options.seeds} seeds")
        return 1
    print(f"{options.name}: found by seed {found.seed}: {found.violation}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
