"""Run seeds: `python -m muster.simulator --help`. The exit code is 1 if an invariant was violated."""

from __future__ import annotations

import argparse
import logging
import random
import sys

from muster.simulator import parallel, seeds


def main() -> int:
    """Parse the command line and run the seeds."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="simulator",
        description="Run the coordinator's core in a simulated cluster, with random faults.",
    )
    parser.add_argument("--seed", type=int, help="run one seed and print its transcript")
    parser.add_argument("--first", type=int, help="the first of many seeds (default: 0 with --count, else random)")
    parser.add_argument("--count", type=int, help="how many seeds to run")
    parser.add_argument("--seconds", type=float, help="run as many seeds as fit into this many seconds")
    parser.add_argument("--processes", type=int, help="how many seeds to run at once (default: one for each processor)")
    options = parser.parse_args()
    if options.seed is not None:
        return _run_one_seed(options.seed)
    first = options.first
    if first is None:
        first = 0 if options.count else random.SystemRandom().randrange(10**6, 10**9)
    outcome = parallel.run(first, options.count, options.seconds, options.processes)
    print("\n".join([*outcome.report(), f"first seed: {first}"]))
    return 1 if outcome.failures else 0


def _run_one_seed(seed: int) -> int:
    logging.disable(logging.CRITICAL)  # the transcript shows what the parts would log
    result = seeds.run(seed, trace=True)
    print("\n".join(result.transcript))
    print(f"seed {seed}: {result.violation or 'every invariant holds'}")
    return 1 if result.violation else 0


if __name__ == "__main__":
    sys.exit(main())
