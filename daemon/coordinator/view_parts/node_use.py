"""How much of its nodes a job uses now: the least, the median and the greatest of the nodes that carry ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedGang
from muster.v1 import api_pb2


def add_use(view: api_pb2.GangView, gang: Gang, seen: ObservedGang) -> None:
    """Fill it in, as far as nodes say it."""
    found = {seat.node: use for seat in gang.roster.seats if (use := seen.status(seat.node).use) is not None}
    with_memory = {node: use for node, use in found.items() if use.memory_limit}
    with_gpus = {node: use for node, use in found.items() if use.gpu_memory_limit}
    if with_memory:
        values = {node: use.memory for node, use in with_memory.items()}
        view.use.memory.CopyFrom(_spread(values, (use.memory_limit for use in with_memory.values())))
    if with_gpus:
        values = {node: use.gpu_memory for node, use in with_gpus.items()}
        view.use.gpu_memory.CopyFrom(_spread(values, (use.gpu_memory_limit for use in with_gpus.values())))
        view.use.gpu_busy.CopyFrom(_spread({node: use.gpu_busy for node, use in with_gpus.items()}, [1.0]))


def _spread(values: Mapping[str, float], limits: Iterable[float]) -> api_pb2.NodeSpread:
    least, greatest = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    return api_pb2.NodeSpread(
        nodes=len(values),
        least=values[least],
        median=median(values.values()),
        greatest=values[greatest],
        least_node=least,
        greatest_node=greatest,
        limit=min(limits),
    )
