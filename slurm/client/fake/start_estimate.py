"""When a job would start, as `sbatch --test-only` says it. Pure.

As measured on Slurm 26.05: with `--switches=COUNT`, the estimate is for a start on at most so many leaf switches,
however short the job would wait for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from muster.slurm.client.parsing.sbatch_request import JobRequest
from muster.slurm.client.types import NeverStarts, StartEstimate


def estimate(
    request: JobRequest, free_at: Mapping[str, float], leaves: Mapping[str, str]
) -> StartEstimate | NeverStarts:
    """The first time at which enough nodes are free.

    Args:
        free_at: the time at which each node is free, of the nodes that are in service.
        leaves: the leaf switch of each node that has one.
    """
    usable = {name: at for name, at in free_at.items() if name not in request.exclude}
    for time in sorted(set(usable.values())):
        free = [name for name, at in usable.items() if at <= time]
        below = Counter(leaves.get(name) for name in free)
        fewest = [leaf for leaf, _ in below.most_common(request.switches)]
        nodes = [name for name in free if leaves.get(name) in fewest]
        if len(nodes) >= request.nodes:
            return StartEstimate(time, tuple(nodes[: request.nodes]))
    return NeverStarts("Requested node configuration is not available")
