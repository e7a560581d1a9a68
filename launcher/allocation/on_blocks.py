"""Requests on blocks: segments of one size. Pure.

A rack-scale domain (GB200 NVL72 and its kind) has 72 GPUs in 18 nodes, and is a block of 18. Its jobs have segments of
16, 4 or 1 nodes, by the size of the job, unless groups within leaves ask for another: 16 of 18 leaves two nodes of each
rack for repairs and spares, and the sizes of jobs remain powers of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muster.fabric.model.level import Level
from muster.launcher.allocation import spares
from muster.launcher.allocation.clusters import PackedPieces
from muster.launcher.allocation.plan import (
    NODES_OF_A_SPARE,
    NodeRequest,
    Request,
    RequestOptions,
    added_spares,
    too_large,
)
from muster.launcher.allocation.segments import segment_of, smaller_segments
from muster.wording import counted

RACK_NODES = 18
"""Nodes of a rack-scale domain with 72 GPUs, 4 in each node."""
RACK_SEGMENTS = (16, 4, 1)


@dataclass(frozen=True, slots=True)
class _Sizes:
    block: int
    pod: int
    """Of aggregated blocks. 0: there are none, and the whole network is one pod."""
    most: int
    """Nodes of the whole network."""

    def limit(self, level: Level) -> int:
        return self.block if level is Level.LEAF else self.pod


@dataclass(frozen=True, slots=True)
class _Found:
    total: int
    segment: int
    cluster: PackedPieces


def plan(wanted: NodeRequest, clusters: Sequence[PackedPieces]) -> RequestOptions:
    """What to ask for on blocks. Raises WrongInput if a requirement fits nowhere."""
    sizes = _sizes(wanted)
    best, notes = _segment_of_groups(wanted, clusters, sizes)
    rack = _rack_segment(wanted, sizes)
    if rack and (not best or (best.cluster.level is not Level.LEAF and _holds(rack[1], best))):
        return _in_racks(wanted, *rack, notes)
    scattered = Request(wanted.spares, "any nodes", ("--segment=1",))
    if not best:
        fewest = Request(wanted.spares, "the fewest blocks that hold the job")
        return RequestOptions(fewest, (scattered,) if clusters else (), notes=tuple(notes))
    cluster, segment = best.cluster, best.segment
    added = best.total - wanted.total
    words = f"segments of {counted(segment, 'node')}, each within one {cluster.level.word}"
    notes.insert(0, f"{cluster.words}: {words}")
    if added:
        why = f"no multiple of {segment}, and Slurm refuses that"
        notes.append(added_spares(added, f"{wanted.nodes} + {wanted.spares}", why))
    strict = Request(wanted.spares + added, words, (f"--segment={segment}",))
    relaxed = tuple(
        Request(wanted.spares, f"segments of {size} nodes" if size > 1 else "any nodes", (f"--segment={size}",))
        for size in smaller_segments(wanted.total, cluster.nodes)
    )
    required = any(one.required for one in clusters if one.level is cluster.level)
    limit = sizes.limit(cluster.level)
    blocks = spares.Blocks(sizes.most // limit, limit)
    losses = spares.in_segments(wanted.nodes, strict.spares, cluster, segment, blocks)
    return RequestOptions(strict, relaxed or (scattered,), required, tuple(notes), losses)


def _sizes(wanted: NodeRequest) -> _Sizes:
    units = wanted.topology.units
    smallest = min((len(unit.nodes) for unit in units if not unit.aggregated), default=0)
    pod = min((len(unit.nodes) for unit in units if unit.aggregated), default=0)
    return _Sizes(wanted.topology.base_block or smallest, pod, len({node for unit in units for node in unit.nodes}))


def _segment_of_groups(
    wanted: NodeRequest, clusters: Sequence[PackedPieces], sizes: _Sizes
) -> tuple[_Found | None, list[str]]:
    """The segment for the groups that Slurm can pack, and why others are not."""
    notes, best = [], None
    for cluster in clusters:
        limit = sizes.limit(cluster.level)
        if not limit:
            continue
        if best and cluster.level is not best.cluster.level:
            notes.append(f"{cluster.words}; Slurm takes one size of segments, and tighter groups have it")
            continue
        worth = sizes.most if cluster.required else wanted.total + wanted.nodes // NODES_OF_A_SPARE
        found = segment_of(wanted.nodes, wanted.spares, cluster.nodes, limit, min(sizes.most, worth))
        if found:
            best = _Found(*found, cluster)
        elif cluster.required:
            raise too_large(cluster, "blocks", [limit] * (sizes.most // limit), wanted)
        else:
            notes.append(f"{cluster.words}; {wanted.total} nodes are no such segments in blocks of {limit}")
    return best, notes


def _rack_segment(wanted: NodeRequest, sizes: _Sizes) -> tuple[int, int] | None:
    """The total number of nodes and the segment of a job in rack-scale domains. None: the blocks are none."""
    if sizes.block != RACK_NODES and not wanted.site.nvlink_blocks:
        return None
    most = min(sizes.most, wanted.total + wanted.nodes // NODES_OF_A_SPARE)
    for segment in RACK_SEGMENTS:
        total = -(-wanted.total // segment) * segment
        if segment <= min(sizes.block, wanted.total) and total <= most:
            return total, segment
    return None


def _holds(segment: int, best: _Found) -> bool:
    """Whether segments of this size hold the groups too."""
    return segment % best.cluster.nodes == 0


def _in_racks(wanted: NodeRequest, total: int, segment: int, notes: Sequence[str]) -> RequestOptions:
    added = total - wanted.total
    words = f"segments of {counted(segment, 'node')}, each within one rack-scale domain"
    notes = [f"jobs in rack-scale domains have segments of {', '.join(map(str, RACK_SEGMENTS))} nodes by size", *notes]
    if added:
        why = f"no multiple of {segment}, and Slurm refuses that"
        notes.append(added_spares(added, f"{wanted.nodes} + {wanted.spares}", why))
    smaller = [size for size in RACK_SEGMENTS if size < segment and wanted.total % size == 0]
    relaxed = tuple(
        Request(wanted.spares, f"segments of {size} nodes" if size > 1 else "any nodes", (f"--segment={size}",))
        for size in smaller
    )
    return RequestOptions(Request(wanted.spares + added, words, (f"--segment={segment}",)), relaxed, notes=tuple(notes))
