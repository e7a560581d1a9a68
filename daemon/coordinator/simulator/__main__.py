"""Run seeds: `python -m muster.daemon.coordinator.simulator --help`."""

from __future__ import annotations

import argparse
import sys

from muster.daemon.coordinator.simulator import seeds
from muster.daemon.coordinator.simulator.tally import Tally


def main() -> int:
    """Exit code 1 where a law was broken."""
    parser = argparse.ArgumentParser(prog="simulator", description="Seeds against the coordinator's core.")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--brief", action="store_true")
    given = parser.parse_args()
    total, failed = Tally(), 0
    for seed in range(given.first, given.first + given.count):
        result = seeds.run(seed, given.trace)
        total.add(result.tally)
        if result.broken:
            failed += 1
            print(f"seed {seed}: {result.broken}")
        if given.trace:
            print("\n".join(result.transcript))
    if not given.brief:
        print("\n".join(total.table(given.count)))
    else:
        print(total.table(given.count)[-1])
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
