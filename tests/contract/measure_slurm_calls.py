"""Measures each call of the Slurm client, on a host of the cluster, as root or the Slurm user.

    measure_slurm_calls.py BACKEND USER [ROUNDS]

Prints a JSON object: the median milliseconds of each call. Each round submits a job and ends it.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable

from run_slurm_contract import RealWorld

from muster.slurm.client.backends.open import open_slurm
from muster.slurm.client.types import Job


class Meter:
    """Milliseconds by the name of a call."""

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = defaultdict(list)

    async def time(self, name: str, call: Awaitable[object]) -> object:
        began = time.perf_counter()
        answer = await call
        self._taken[name].append((time.perf_counter() - began) * 1000)
        return answer

    def medians(self) -> dict[str, float]:
        return {name: round(statistics.median(taken), 2) for name, taken in self._taken.items()}


async def started(world: RealWorld, *options: str) -> Job:
    """A running job on three nodes."""
    id = await world.start(["-N3", "--no-kill", "--requeue", *options])
    while True:
        answer = await world.slurm.jobs([id])
        assert isinstance(answer, dict)
        job = answer[id]
        assert isinstance(job, Job)
        if job.running:
            return job
        await asyncio.sleep(0.05)


async def one_round(meter: Meter, world: RealWorld) -> None:
    slurm = world.slurm
    await world.clean()
    job = await started(world)
    node = job.nodes[2]
    await meter.time("jobs, one", slurm.jobs([job.id]))
    await meter.time("jobs, all", slurm.jobs())
    await meter.time("nodes, one", slurm.nodes([node]))
    await meter.time("nodes, all", slurm.nodes())
    await meter.time("topologies", slurm.topologies())
    await meter.time("drain", slurm.drain(node, "measured"))
    await meter.time("resume", slurm.resume(node))
    await meter.time("set_requeue_flag", slurm.set_requeue_flag(job.id, True))
    await meter.time("set_comments", slurm.set_comments(job.id, "measured"))
    await meter.time("remove_node", slurm.remove_node(job.id, job.nodes[1]))
    await meter.time("down", slurm.down(node, "measured"))
    await meter.time("complete_job", slurm.complete_job(job.id, 0))
    await world.clean()
    job = await started(world)
    await meter.time("requeue", slurm.requeue(job.id))
    await meter.time("cancel", slurm.cancel(job.id))


async def measure(backend: str, user: str, rounds: int) -> dict[str, float]:
    slurm = await open_slurm(prefer=backend, strict=True)
    world, meter = RealWorld(slurm, user), Meter()
    for _ in range(rounds):
        await one_round(meter, world)
    await world.clean()
    await slurm.aclose()
    return meter.medians()


if __name__ == "__main__":
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    print(json.dumps(asyncio.run(measure(sys.argv[1], sys.argv[2], rounds))))
