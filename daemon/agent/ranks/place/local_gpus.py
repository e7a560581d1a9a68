"""Which GPU each rank of this node gets, and which network adapters NCCL may use. Pure.

A script selects the GPU at the position LOCAL_RANK of CUDA_VISIBLE_DEVICES. Slurm sets that variable, in the order of
PCI addresses. Muster changes the order only, so that neighbouring ranks have GPUs of one socket and of one adapter.
Whatever else it finds there stays: UUIDs, parts of a GPU (MIG), values of the user, several GPUs for each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster.fabric.model.node import Node, gpu_order, natural_order, nearest_nics

VISIBLE, CUDA_ORDER, NCCL_ADAPTERS = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NCCL_IB_HCA"
NEAREST_VARIABLE = "MUSTER_NEAREST_ADAPTERS"
_STEP_GPUS, _JOB_GPUS, _STEP = "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_STEP_ID"
_BY_ADDRESS = "PCI_BUS_ID"


@dataclass(frozen=True, slots=True)
class LocalGpus:
    """The GPUs of this job on this node.

    visible: the value of CUDA_VISIBLE_DEVICES; None: leave it as it is.
    of_rank: the GPU that LOCAL_RANK selects, by local rank, as nvidia-smi counts. Empty: it is not known, or a rank has
        several.
    used: all GPUs that the ranks of this node may use. Empty: they are not known.
    """

    visible: str | None = None
    of_rank: tuple[int, ...] = ()
    used: tuple[int, ...] = ()


def local_gpus(
    environ: Mapping[str, str], chosen: Mapping[str, str], node: Node, uuids: Mapping[str, int], ranks: int
) -> LocalGpus:
    """The GPUs for the `ranks` ranks of a node.

    Args:
        environ: the environment that Slurm gave to the agent.
        chosen: the variables that the user's job sets.
        node: what is known of this node.
        uuids: the index of each GPU by its UUID.
    """
    given = _given_by_slurm(environ)
    if VISIBLE in chosen:
        return _alone(_indexes(chosen[VISIBLE], given or _all(node), uuids), ranks)
    if VISIBLE not in environ:
        return LocalGpus(used=given or _all(node))
    seen = _indexes(environ[VISIBLE], given, uuids)
    words = [word.strip() for word in environ[VISIBLE].split(",")]
    if not (given and seen and len(seen) == ranks > 1 and all(word.isdigit() for word in words)):
        return _alone(seen, ranks)
    if max(seen) >= node.gpus:
        return _alone(seen, ranks)
    order = gpu_order(node)
    pairs = sorted(zip(seen, words, strict=True), key=lambda pair: order.index(pair[0]))
    indexes, names = tuple(index for index, _ in pairs), tuple(name for _, name in pairs)
    return LocalGpus(",".join(names), indexes, indexes)


def device_variables(
    base: Mapping[str, str], gpus: LocalGpus, node: Node, local_rank: int, nccl_file: str = ""
) -> dict[str, str]:
    """The variables that tell a rank its GPU and adapters. Those that are in `base` already stay, but for the order of
    GPUs.

    All ranks of a node get the same NCCL_IB_HCA, with all adapters that are nearest to a GPU of the job. NCCL itself
    takes the nearest of them for each GPU. It finds no ring if the ranks of a node see different adapters (NVIDIA/nccl
    issue 1478: "You should not set NCCL_IB_HCA differently on each rank"). The "=" asks for exact names: without it,
    mlx5_1 is mlx5_10 as well.

    Args:
        nccl_file: the text of NCCL's configuration files. What they set stays.
    """
    found = {}
    if gpus.visible is not None:
        found[VISIBLE] = gpus.visible
        if CUDA_ORDER not in base and gpus.visible != base.get(VISIBLE):
            found[CUDA_ORDER] = _BY_ADDRESS
    own = gpus.of_rank[local_rank : local_rank + 1] or gpus.used
    if nearest := _adapters(node, own):
        found[NEAREST_VARIABLE] = ",".join(nearest)
    if (allowed := _adapters(node, gpus.used)) and NCCL_ADAPTERS not in base and not _sets_adapters(nccl_file):
        found[NCCL_ADAPTERS] = f"={','.join(allowed)}"
    return found


def _alone(seen: tuple[int, ...], ranks: int) -> LocalGpus:
    """The GPUs in the order that is there."""
    return LocalGpus(of_rank=seen if len(seen) == ranks else (), used=seen)


def _all(node: Node) -> tuple[int, ...]:
    return tuple(range(node.gpus))


def _given_by_slurm(environ: Mapping[str, str]) -> tuple[int, ...]:
    """The GPUs that Slurm gave to the job on this node, as nvidia-smi counts; empty: not known.

    In a step, SLURM_JOB_GPUS has come from the batch host with the environment, and names that node's GPUs.
    """
    text = environ.get(_STEP_GPUS) or ("" if _STEP in environ else environ.get(_JOB_GPUS, ""))
    found = list[int]()
    for part in filter(None, text.split(",")):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            return ()
        found += range(int(first), int(last or first) + 1) if int(last or first) - int(first) < 1024 else ()
    return tuple(sorted(set(found)))


def _indexes(value: str, given: Sequence[int], uuids: Mapping[str, int]) -> tuple[int, ...]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES names; empty: one of them is not known.

    Where Slurm constrains devices, the job sees no other GPUs, and its own are counted from 0. Then Slurm's numbers
    are higher than those of the value.
    """
    words = [word.strip() for word in value.split(",")]
    if not all(word.isdigit() for word in words):
        found = [uuids[word] for word in words if word in uuids]
        return tuple(found) if len(found) == len(words) == len(set(found)) else ()
    numbers = [int(word) for word in words]
    if len(set(numbers)) != len(numbers):
        return ()
    if given and sorted(numbers) == list(range(len(given))):
        return tuple(given[number] for number in numbers)
    return tuple(numbers) if set(numbers) <= set(given) and not _may_be_counted_anew(numbers, given) else ()


def _may_be_counted_anew(numbers: Sequence[int], given: Sequence[int]) -> bool:
    """Whether a part of the GPUs could also be meant by their places among those that Slurm gave."""
    return len(numbers) < len(given) and max(numbers) < len(given) and any(given[at] != at for at in numbers)


def _adapters(node: Node, gpus: Sequence[int]) -> list[str]:
    return sorted({name for gpu in gpus for name in nearest_nics(node, gpu)}, key=natural_order)


def _sets_adapters(nccl_file: str) -> bool:
    return any(line.split("#", 1)[0].strip().startswith(f"{NCCL_ADAPTERS}=") for line in nccl_file.splitlines())
