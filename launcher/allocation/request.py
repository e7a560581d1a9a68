"""The options that make Slurm give a job the nodes that its groups ask for, and the options for less. Pure.

What Slurm 24.11 and 26.05 do with them (tests/cluster/test_topologies.py):

- A tree takes `--switches=COUNT@WAIT`: the most leaf switches of the whole job. When the wait is over, Slurm starts the
  job anywhere. A count that no part of the cluster has is accepted all the same, and blocks the queue for the wait.
  Slurm does not keep a job in one pod, even if one has room. Only `--exclude` of all other nodes does.
- Blocks take `--segment=NODES`: each segment is within one block, or within aggregated blocks if it is larger than a
  block; Slurm 24.11 has no place for a larger one. Slurm refuses a segment that does not divide the number of nodes.
  Without the option, Slurm waits for the fewest blocks that hold the job: a job that takes what
  there is asks for segments of 1.
- A torus has places for the configured shapes only: Slurm refuses a job of another number of nodes.
- A ring gives consecutive nodes in any case, and refuses a job that is larger than the largest ring. On a flat network
  Slurm knows of no distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from muster.fabric.sources.slurm_topology import Kind, SlurmTopology
from muster.launcher.allocation import on_blocks, on_grids, on_trees
from muster.launcher.allocation.clusters import PackedPieces
from muster.launcher.allocation.plan import NodeRequest, RequestOptions, check_nvlink, check_size
from muster.launcher.allocation.site_domains import NOTHING_SAID, SiteDomains


def plan_request(
    clusters: Sequence[PackedPieces],
    nodes: int,
    spares: int,
    topology: SlurmTopology,
    max_switch_wait_s: int | None,
    site: SiteDomains = NOTHING_SAID,
) -> RequestOptions:
    """The plan for a job of `nodes` nodes and `spares` more, whose groups ask for `clusters`.

    Args:
        max_switch_wait_s: the longest time for which a job may wait for its switches. None: not known.
        site: what the site's own file says.

    Raises:
        WrongInput: a requirement, or the number of nodes, fits nowhere in this network.
    """
    wanted = NodeRequest(nodes, spares, topology, max_switch_wait_s, site)
    if topology.kind is not Kind.TORUS:  # which says its sizes
        check_size(wanted)
    notes = check_nvlink(wanted, clusters)
    plan = _plan(wanted, clusters)
    return replace(plan, notes=(*plan.notes, *notes)) if notes else plan


def _plan(wanted: NodeRequest, clusters: Sequence[PackedPieces]) -> RequestOptions:
    topology = wanted.topology
    if topology.kind is Kind.TREE:
        return on_trees.plan(wanted, clusters)
    if topology.kind is Kind.BLOCK:
        return on_blocks.plan(wanted, clusters)
    if topology.kind is Kind.TORUS:
        return on_grids.plan_on_torus(wanted, clusters)
    if topology.kind is Kind.RING:
        return on_grids.plan_on_rings(wanted)
    if not clusters:
        return RequestOptions(wanted.any)
    why = topology.problem or "Slurm knows of no switches or blocks"
    return RequestOptions(wanted.any, notes=(f"the groups are not packed by Slurm: {why}",))
