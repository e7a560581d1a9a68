"""Says, while srun starts the agents, that Slurm has given the job other nodes than its `--segment` asked for."""

from __future__ import annotations

import sys

from muster.daemon.agent.batch.srun import Step, call_slurm
from muster.slurm.client.parsing import hostlist, segments

SHOW_S = 10.0
"""Seconds for Slurm's answer. Ranks take about as long for their first step."""


async def say_if_split(step: Step) -> None:
    """Write to the job's output what is wrong with its nodes, and note it. Nothing is said if Slurm does not tell."""
    allocation = step.allocation
    if allocation.segment <= 1:
        return
    status, topology, _ = await call_slurm(SHOW_S, allocation.scontrol, "show", "topology")
    try:
        words = segments.split_segments(topology, hostlist.expand(allocation.nodes), allocation.segment)
    except ValueError:
        return
    if words and not status:
        step.split_segments = words
        again = f". `scontrol requeue {allocation.job_id}` asks for others" if allocation.may_requeue else ""
        print(f"muster: warning: {words}{again}", file=sys.stderr, flush=True)
