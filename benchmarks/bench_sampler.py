"""What the order of samples costs: time of a batch, of the first one, and memory, beside torch.randperm where torch is.

    python -m benchmarks.bench_sampler [--samples 1000000000] [--batch 32] [--ranks 1024]

Prints a table, then one JSON object as the last line.
"""

import argparse
import importlib.util
import itertools
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

from muster.checkpoint import ShardedSampler

ROUNDS = 5
BATCHES = 2000
"""So many that the orders of several thousand samples are computed some times."""


def timed_us(work: Callable[[], Any]) -> float:
    """Microseconds of processor time that a call takes."""
    start = time.process_time()
    work()
    return (time.process_time() - start) * 1e6


def peak_mib() -> float:
    """The most memory that this process has used so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def sampler_figures(samples: int, batch: int, ranks: int) -> dict[str, float]:
    """A rank's sampler in the middle of an epoch."""
    sampler = ShardedSampler(samples, batch_size=batch, rank=ranks // 2, num_replicas=ranks)
    middle = {**sampler.state_dict(), "position": samples // 2}
    before = peak_mib()
    first, each = [], []
    for _ in range(ROUNDS):
        sampler.load_state_dict(middle)
        first.append(timed_us(lambda: next(iter(sampler))))
        sampler.load_state_dict(middle)
        count, batches = min(BATCHES, sampler.remaining_batches()), iter(sampler)
        each.append(timed_us(lambda count=count, batches=batches: [*itertools.islice(batches, count)]) / count)
    step = [timed_us(sampler.finish_steps) for _ in range(count)]
    return {
        "first_batch_us": statistics.median(first),
        "batch_us": statistics.median(each),
        "step_us": statistics.median(step),
        "memory_mib": peak_mib() - before,
    }


def randperm_figures(samples: int) -> dict[str, float]:
    """The same order as a tensor, as torch's DistributedSampler makes it (and then turns it into a list)."""
    import torch

    torch.set_num_threads(1)
    before = peak_mib()
    took = timed_us(lambda: torch.randperm(samples, generator=torch.Generator().manual_seed(0)))
    return {"randperm_ms": took / 1000, "randperm_memory_mib": peak_mib() - before}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10**9)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=1024)
    args = parser.parse_args()
    figures = sampler_figures(args.samples, args.batch, args.ranks)
    if importlib.util.find_spec("torch") is not None:
        # A hundredth of the samples: the whole would need gigabytes.
        figures |= randperm_figures(args.samples // 100)
    for name, value in figures.items():
        print(f"{name:>22} {value:12.3f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
