"""The order of a node's GPUs and network adapters for its ranks. Pure."""

from __future__ import annotations

from muster.fabric.model.node import Node


def gpu_order(node: Node) -> tuple[int, ...]:
    """The GPUs of the node, in the order in which local ranks take them, for CUDA_VISIBLE_DEVICES.

    GPUs of one socket are neighbours, and so are GPUs that share their nearest adapter: ranks that communicate most
    have neighbouring numbers. Empty if the number of GPUs is not known.
    """
    adapters = {gpu: at for at, nic in reversed(list(enumerate(node.nics))) for gpu in nic.gpus}
    sockets = node.sockets if len(node.sockets) == node.gpus else (0,) * node.gpus
    return tuple(sorted(range(node.gpus), key=lambda gpu: (sockets[gpu], adapters.get(gpu, len(node.nics)), gpu)))


def nearest_nics(node: Node, gpu: int) -> tuple[str, ...]:
    """The adapters that are nearest to a GPU, for NCCL_IB_HCA. Empty if nobody knows."""
    return tuple(nic.name for nic in node.nics if gpu in nic.gpus)
