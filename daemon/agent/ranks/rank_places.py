"""The place of each rank of this node: in its generation, in the network, on the node's GPUs and network adapters."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping

from muster.daemon.agent.ranks.place.group_levels import axes_of, group_levels
from muster.daemon.agent.ranks.place.local_gpus import LocalGpus, device_variables, local_gpus
from muster.daemon.agent.ranks.place.node_inventory import NodeInventory
from muster.daemon.agent.ranks.rank_environment import RankPosition
from muster.daemon.agent.ranks.rank_process import RankId
from muster.daemon.transport.node_hardware import InvalidHardware, node_of
from muster.fabric.model.node import Node
from muster.v1.agent_pb2 import Order
from muster.v1.common_pb2 import JobSpec, Member

log = logging.getLogger(__name__)


class RankPlaces:
    """What the ranks of one node are told of their place.

    Args:
        node: this node.
        spec: the job. What its [env] sets stays as it is.
        environ: the environment that Slurm gave to the agent.
        facts: returns what is known of this node.
    """

    def __init__(
        self,
        node: str,
        spec: JobSpec | None = None,
        environ: Mapping[str, str] = os.environ,
        facts: Callable[[], NodeInventory] = NodeInventory,
    ) -> None:
        self._node = node
        self._spec = spec or JobSpec()
        self._environ = environ
        self._facts = facts
        self._host_file = HostFile()
        self._written: tuple[int, str] = (0, "")
        self._gpus: dict[int, tuple[int, ...]] = {}

    def positions(self, ranks: list[RankId], order: Order) -> dict[int, RankPosition]:
        """The position of each of `ranks`, which the order starts on this node, by rank."""
        here = sum(place.node == self._node for place in order.places)
        node_of_rank = {place.rank: place.node for place in sorted(order.places, key=lambda place: place.rank)}
        nodes = tuple(dict.fromkeys(node_of_rank.values()))
        members = {member.node: member for member in order.members}
        own = members.get(self._node, Member())
        axes = axes_of(self._spec, order.world_size) if here * len(nodes) == order.world_size else None
        facts = self._facts()
        node = _node(self._node, facts)
        gpus = self._local_gpus(node, facts, here)
        base = {**self._environ, **self._spec.env}
        host_file = self._write(order.generation, node_of_rank)
        found = {}
        for rank in ranks:
            self._gpus[rank.rank] = gpus.of_rank[rank.local_rank : rank.local_rank + 1]
            found[rank.rank] = RankPosition(
                rank=rank.rank,
                local_rank=rank.local_rank,
                world_size=order.world_size,
                local_world_size=here,
                group_rank=max(own.group_rank, 0),
                nodes=nodes,
                master_addr=order.master_addr,
                master_port=order.master_port,
                generation=rank.generation,
                leaf=own.leaf,
                nvlink_domain=own.nvlink_domain,
                group_levels=group_levels(axes, rank.rank, here, nodes, members) if axes else {},
                host_file=host_file,
                devices=device_variables(base, gpus, node, rank.local_rank, facts.nccl_files),
            )
        return found

    def used_gpus(self) -> set[int]:
        """The GPUs of all ranks of the node, as far as they are known."""
        return {gpu for gpus in self._gpus.values() for gpu in gpus}

    def gpu_of(self, rank: int) -> int | None:
        """The GPU that the rank's LOCAL_RANK selects; None: it is not known, or the rank has several."""
        return next(iter(self._gpus.get(rank, ())), None)

    def close(self) -> None:
        """Remove the file with the rank map."""
        self._host_file.close()

    def _local_gpus(self, node: Node, facts: NodeInventory, ranks: int) -> LocalGpus:
        uuids = {gpu.uuid: gpu.index for gpu in facts.hardware.gpus if gpu.uuid}
        return local_gpus(self._environ, self._spec.env, node, uuids, ranks)

    def _write(self, generation: int, node_of_rank: Mapping[int, str]) -> str:
        """Write the rank map, once for each generation."""
        if self._written[0] != generation:
            self._written = (generation, self._host_file.write(node_of_rank.values()))
        return self._written[1]


def _node(name: str, facts: NodeInventory) -> Node:
    try:
        return node_of(name, facts.hardware)
    except InvalidHardware:
        return Node(name)


class HostFile:
    """The file with the rank map: the node of each rank, a line each, in the order of ranks, as SLURM_HOSTFILE has it.

    It is in this agent's memory, and has a path below /proc: shared storage may hang, and a file on the node's disk
    would outlive an agent that is killed. Each generation writes it anew, before its ranks start here. It exists from
    the first `write` on until `close`, or the agent's end.
    """

    def __init__(self) -> None:
        self._fd = -1

    def write(self, nodes: Iterable[str]) -> str:
        """Replace the content. `nodes`: the node of each rank. Returns the path; empty if there is no memory for it."""
        try:
            if self._fd < 0:
                self._fd = os.memfd_create("muster-hostfile", os.MFD_CLOEXEC)
            os.truncate(self._fd, 0)
            with open(f"/proc/self/fd/{self._fd}", "w", encoding="utf-8") as file:
                file.writelines(f"{node}\n" for node in nodes)
        except OSError as error:
            log.warning("the ranks get no MUSTER_HOSTFILE: %s", error)
            return ""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Remove the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
