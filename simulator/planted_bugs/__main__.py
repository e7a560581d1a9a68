"""Plant one bug and look for it: `python -m muster.simulator.planted_bugs NAME [--seeds N]`.

The exit code is 1 if no seed finds the bug. The seed that finds it is written down (known_seeds.toml).
`--renew` does so for all bugs.
`--rules WORD...` prints the rules of the core with these words, and what fails without each.
"""

from __future__ import annotations

import argparse
import sys

from muster.simulator.planted_bugs import known_seeds
from muster.simulator.planted_bugs.catalogue import PLANTED_BUGS
from muster.simulator.planted_bugs.rules import rules


def main() -> int:
    """Parse the command line, plant the bug and run the seeds."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="planted_bugs", description="Run seeds until one of them finds a planted bug."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("name", choices=PLANTED_BUGS, metavar="NAME", nargs="?", help=", ".join(PLANTED_BUGS))
    what.add_argument("--renew", action="store_true", help="look for all bugs, and write down the seeds that find them")
    what.add_argument("--rules", nargs="*", metavar="WORD", help="print the rules of the core with all these words")
    parser.add_argument("--seeds", type=int, default=1500, metavar="N", help="how many seeds to run at most (1500)")
    options = parser.parse_args()
    if options.rules is not None:
        return _print_rules(options.rules)
    if options.renew:
        missed = known_seeds.renew(options.seeds)
        for name in missed:
            print(f"{name}: not found by {options.seeds} seeds")
        return 1 if missed else 0
    found = known_seeds.first_seed_that_finds(options.name, options.seeds)
    if found is None:
        print(f"{options.name}: not found by {options.seeds} seeds")
        return 1
    print(f"{options.name}: found by seed {found.seed}: {found.violation}")
    if known_seeds.known_seeds().get(options.name) != found.seed:
        known_seeds.write({**known_seeds.known_seeds(), options.name: found.seed})
    return 0


def _print_rules(words: list[str]) -> int:
    found = list(rules(words))
    for rule in found:
        print(f"{rule.words}\n    {rule.where}")
    if not found:
        print(f"no rule has the words {' '.join(words)}: try fewer, or the beginning of a word", file=sys.stderr)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
