"""Run seeds: `python -m muster.simulator --help`. Exit code 1 where a law was broken."""

from __future__ import annotations

import argparse
import logging
import random
import sys

from muster.simulator import parallel, seeds


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="simulator", description="The coordinator's core in a simulated world of faults."
    )
    parser.add_argument("--seed", type=int, help="run this one and print its transcript")
    parser.add_argument("--first", type=int, help="first of many seeds; by rng unless --count is given")
    parser.add_argument("--count", type=int, help="how many")
    parser.add_argument("--seconds", type=float, help="as many as fit into this time")
    parser.add_argument("--processes", type=int, help="how many work at once; one a processor unless given")
    given = parser.parse_args()
    if given.seed is not None:
        return _one(given.seed)
    first = given.first
    if first is None:
        first = 0 if given.count else random.SystemRandom().randrange(10**6, 10**9)
    outcome = parallel.run(first, given.count, given.seconds, given.processes)
    print("\n".join([*outcome.report(), f"first seed: {first}"]))
    return 1 if outcome.failures else 0


def _one(seed: int) -> int:
    logging.disable(logging.CRITICAL)  # what the parts would log stands in the transcript
    result = seeds.run(seed, trace=True)
    print("\n".join(result.transcript))
    print(f"seed {seed}: {result.violation or 'all laws hold'}")
    return 1 if result.violation else 0


if __name__ == "__main__":
    sys.exit(main())
