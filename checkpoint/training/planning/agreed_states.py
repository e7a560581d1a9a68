"""What the ranks tell each other of their states when they plan their shards.

Whenever they plan, before the first snapshot and when names or shapes have changed: which optimizers are kept by the
names of parameters, and the structure of all ranks' states together. At the first snapshot of a run that does not go on
from memory: whether replicas are equal. All of it is a collective call.
"""

import hashlib
from typing import Any

import torch

from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training.agreements.process_group import (
    all_gathered,
    gathered_on_first,
    rank_and_world_size,
    sent_by,
    store_for,
)
from muster.checkpoint.training.states import optimizer_states, replica_samples, state_tree
from muster.checkpoint.training.states.inner_tensors import taken_apart
from muster.checkpoint.training.states.replica_samples import Samples, Unequal
from muster.checkpoint.training.states.replicas import ignored_by_ddp
from muster.checkpoint.training.states.training_state import CapturedState, StateLeaf, TrainingState

_CHUNK_BYTES = 4 << 20
"""The most that is written to the store at once: a store over TCP takes 8 MiB."""


def agree_on_optimizers(states: TrainingState) -> None:
    """Keep an optimizer's state by the names of parameters if ranks optimize different ones. A collective call.

    Raises:
        CheckpointError: ranks optimize different parameters, and no kept model names them.
    """
    labels = states.parameter_names()
    own = {
        key: [labels.get(id(p), tuple(p.shape)) for p in optimizer_states.parameters_of(optimizer)]
        for key, optimizer in states.optimizers().items()
    }
    by_rank = all_gathered(
        {key: (_digest(repr(found)), all(isinstance(f, str) for f in found)) for key, found in own.items()}
    )
    by_name = set()
    for key in sorted({key for found in by_rank for key in found}):
        found = [each[key] for each in by_rank if key in each]
        if len({digest for digest, _ in found}) == 1:
            continue
        if not all(is_named for _, is_named in found):
            raise CheckpointError(
                f"ranks optimize different parameters in {key}, and not all are of models that Checkpoint keeps: "
                f"give each model, as in Checkpoint(model=model, {key}={key}), or keep the state as each rank's own: "
                f'per_rank=["{key}"]'
            )
        by_name.add(key)
    states.by_name = frozenset(by_name)


def published_structure(states: TrainingState, captured: CapturedState) -> dict[str, Any]:
    """The structure that a durable checkpoint holds: that of all ranks together, on rank 0. A collective call.

    Besides it names the parameters of each optimizer, and the tensors of subclasses.
    """
    own: dict[str, Any] = state_tree.structure(captured.shared)
    labels = states.parameter_names()
    parameters = {
        key: optimizer_states.names_by_group(optimizer, labels)
        for key, optimizer in states.optimizers().items()
        if key not in states.by_name and all(id(p) in labels for p in optimizer_states.parameters_of(optimizer))
    }
    own["muster"] = {"parameters": parameters, "subclasses": _subclasses(captured.leaves)}
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return own
    digests = all_gathered(_digest(repr(own)))
    is_first = digests.index(digests[rank]) == rank  # equal structures are sent once
    for other in gathered_on_first(own if is_first else None):
        own = own if other is None else _union(own, other)
    return own


def _subclasses(leaves: list[StateLeaf]) -> dict[str, bool]:
    tensors = (leaf for leaf in leaves if isinstance(leaf.value, torch.Tensor))
    return {leaf.name: True for leaf in tensors if taken_apart(leaf.value, leaf.name)[1] is not None}


def _union(one: Any, other: Any) -> Any:
    """Both structures together. Where they differ in anything but keys, the first one counts."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return one
    both = {key: _union(value, other[key]) if key in other else value for key, value in one.items()}
    return both | {key: value for key, value in other.items() if key not in one}


def refuse_unequal_replicas(states: TrainingState, leaves: list[StateLeaf], step: int) -> None:
    """Compare some bytes of parameters and optimizer states that several ranks hold under one name. A collective call.

    Raises:
        CheckpointError: they are not equal. A durable checkpoint would hold those of one rank only.
    """
    rank, world_size = rank_and_world_size()
    if world_size == 1 or _compared(replica_samples.samples(states, leaves, shards_by_mesh=True)) is None:
        return
    own = replica_samples.samples(states, leaves)
    unequal = _compared(own)
    if unequal is None:  # equal shards over different meshes
        return
    found = None
    if rank == unequal.rank:
        numbers = replica_samples.names_by_number(own)
        number, name = next((number, name) for number, name in numbers.items() if number in unequal.others)
        ignored = "DistributedDataParallel was told to ignore it, and " if name in ignored_by_ddp(states) else ""
        found = (name, unequal.others[number], ignored)
    name, other, ignored = sent_by(unequal.rank, found)
    raise CheckpointError(
        f"after step {step}, {name} is not equal on ranks {unequal.rank} and {other} ({unequal.count} such tensors): "
        f"{ignored}a durable checkpoint would keep one of them. If they are different tensors, as experts are, say in "
        f'which group of ranks they differ: Checkpoint(..., differs_in={{"{name}": expert_group}}), or None in place '
        "of the group for all ranks. If they are replicas, make them equal before the first step"
    )


def _compared(samples: Samples) -> Unequal | None:
    """Which tensors are not equal on all ranks. A collective call; ranks with equal samples send them once.

    They go through the store of the process group: a gather would take room on rank 0 for all that any rank sends, once
    for each rank.
    """
    rank, _ = rank_and_world_size()
    rows = replica_samples.rows(samples)
    digests = all_gathered((hashlib.blake2b(rows, digest_size=8).digest(), len(rows)))
    senders = {digest: sender for sender, digest in reversed([*enumerate(digests)])}
    if len(senders) == 1:
        return None
    store = store_for("replicas")
    if senders[digests[rank]] == rank:
        for start in range(0, len(rows), _CHUNK_BYTES):
            store.set(f"{rank} {start}", rows[start : start + _CHUNK_BYTES])
    outcome: Unequal | None = None
    if rank == 0:
        by_rank: dict[int, bytes] = {}
        for (_, length), sender in senders.items():
            keys = [f"{sender} {start}" for start in range(0, length, _CHUNK_BYTES)]
            by_rank[sender] = b"".join(store.get(key) for key in keys)
            for key in keys:
                store.delete_key(key)
        outcome = replica_samples.first_unequal(by_rank)
    found: Unequal | None = sent_by(0, outcome)
    return found


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
