"""Whether the nodes of a job are the segments that it asked for with `--segment`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from muster.fabric.sources.slurm_topology import Kind
from muster.slurm.client.parsing import topology_text
from muster.wording import counted, listed


def split_segments(topology: str, nodes: Sequence[str], segment: int) -> str:
    """What is wrong with the nodes of a job, in words; empty: they hold its segments whole, or nothing is known.

    Slurm keeps the nodes that it has planned with, whatever becomes of the blocks before the job starts.

    Args:
        topology: what `scontrol show topology` prints.
        nodes: all nodes of the job.
        segment: nodes of each segment.
    """
    read = topology_text.read(topology)
    wanted = len(nodes) // segment if segment > 1 else 0
    base = read.base_block or max((len(unit.nodes) for unit in read.units if not unit.aggregated), default=0)
    sizes = [(unit.size or len(unit.nodes)) if unit.aggregated else base for unit in read.units]
    level = min((size for size in sizes if size >= segment), default=0)
    units = [unit for unit, size in zip(read.units, sizes, strict=True) if size == level]
    if read.kind is not Kind.BLOCK or not wanted or set(nodes) - {name for unit in units for name in unit.nodes}:
        return ""
    here = set(nodes)
    parts = [(len(here.intersection(unit.nodes)), unit.name) for unit in units]
    parts = sorted((part for part in parts if part[0]), key=lambda part: -part[0])
    split = wanted - sum(count // segment for count, _ in parts)
    if split <= 0:
        return ""
    shares, names = listed((str(count) for count, _ in parts), " + "), listed((name for _, name in parts), ", ")
    given = f"Slurm gave {shares} nodes of the blocks {names}"  # so that it is true after a swap, too
    return f"--segment={segment} was asked for, and {given}, which splits {split} of {counted(wanted, 'segment')}"
