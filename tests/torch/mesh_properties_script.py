"""Ranks that keep and restore states of DTensors, example by example. test_mesh_properties.py tells them what.

They write shards as training does, and read them as a restore does. Files stand for the agents' memory.
"""

import os
import traceback
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from muster.checkpoint.testing.rank_processes import run_ranks
from muster.checkpoint.training import resume
from muster.checkpoint.training.agent_shards import AgentShards
from muster.checkpoint.training.borrowed_pages import BorrowedPages
from muster.checkpoint.training.planning import agreed_states
from muster.checkpoint.training.planning.publication import plan_publication
from muster.checkpoint.training.planning.shard_plan import ShardPlan, leaf_directory
from muster.checkpoint.training.snapshot import SnapshotWriter
from muster.checkpoint.training.states.replicas import find_replicas
from muster.checkpoint.training.states.training_state import STRUCTURE, StateLeaf, TrainingState
from muster.v1.rank_pb2 import AgentRead, RankRead

STEP = 7


class Held:
    """A nested state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class ShardFiles:
    """Each old rank's shard in a file, in the place of the agents' memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read_shards(self, reads: Iterable[RankRead]) -> Iterator[tuple[AgentRead, int]]:
        for read in reads:
            descriptor = os.open(self._folder / f"{read.rank}.shard", os.O_RDONLY)
            yield AgentRead(rank=read.rank, bytes=os.fstat(descriptor).st_size), descriptor

    def end_reads(self) -> None:
        pass


@cache
def mesh_of(shape: tuple[int, ...], ranks: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks).view(shape))


def spread(value: Any, layout: dict[str, Any]) -> Any:
    """The whole tensor, laid over a mesh."""
    mesh = mesh_of(tuple(layout["shape"]), tuple(layout["ranks"]))
    placements = [Replicate() if each is None else Shard(each) for each in layout["placements"]]
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def whole(tensor: dict[str, Any], seed: int) -> Any:
    """Random bytes as a whole tensor; seed 0: zeros."""
    dtype = getattr(torch, tensor["dtype"])
    count = torch.Size(tensor["shape"]).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256 if seed else 1, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(tensor["shape"])


def made(tensors: list[dict[str, Any]], place: str, *, filled: bool) -> dict[str, Any]:
    """A model, its optimizer and a nested state: each tensor is a parameter with an optimizer state, a buffer, and
    somewhere in the nested state. `place`: which layout of each tensor. `filled`: with random bytes, and not zeros."""
    model, nested = nn.Module(), list[Any]()
    parameters = []
    for number, tensor in enumerate(tensors):

        def value(kind: int, number: int = number, tensor: dict[str, Any] = tensor) -> Any:
            return spread(whole(tensor, 10 * number + kind if filled else 0), tensor[place])

        parameters.append(nn.Parameter(value(1), requires_grad=False))
        model.register_parameter(f"parameter{number}", parameters[-1])
        model.register_buffer(f"buffer{number}", value(2))
        nested.append({"number": number, "values": [value(3), torch.full((), float(filled))]})
    optimizer = torch.optim.Adam(parameters)
    for number, (parameter, tensor) in enumerate(zip(parameters, tensors, strict=True)):
        moment = spread(whole(tensor, 10 * number + 4 if filled else 0), tensor[place])
        optimizer.state[parameter] = {"step": torch.tensor(3.0 * filled), "exp_avg": moment}
    return {"model": model, "optimizer": optimizer, "nested": Held(nested)}


def bits(value: Any) -> Any:
    """What must be equal: this rank's bytes, shapes, and how tensors lie over the ranks."""
    if isinstance(value, dict):
        return {key: bits(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [*map(bits, value)]
    if isinstance(value, torch.Tensor):
        local: Any = value.detach()
        layout = (local.placements, tuple(local.device_mesh.mesh.flatten())) if hasattr(local, "placements") else None
        local = local.to_local() if layout else local
        raw = local.contiguous().reshape(-1).view(torch.uint8).tolist() if local.numel() else []
        return str(layout), local.dtype, tuple(local.shape), raw
    return value


def all_bits(objects: dict[str, Any]) -> Any:
    return {key: bits(value.state_dict()) for key, value in objects.items()}


def keep(states: TrainingState, rank: int, world: int, path: Path) -> None:
    """Write a rank's shard, as the first snapshot of a run does."""
    agreed_states.agree_on_optimizers(states)
    captured = states.capture(rank, STEP)
    agreed_states.refuse_unequal_replicas(states, captured.leaves, STEP)
    publication = plan_publication([*captured.leaves, StateLeaf(tuple(STRUCTURE.split(".")), None)])
    structure = agreed_states.published_structure(states, captured)
    plan = ShardPlan(captured, publication, {}, find_replicas(states, captured.leaves, world), structure)
    slot = bytearray(plan.bytes)
    SnapshotWriter(plan, [memoryview(slot)]).write(0, captured)
    path.write_bytes(slot)


def run_example(tensors: list[dict[str, Any]], rank: int, world: int, folder: Path) -> str:
    """What is wrong with an example; empty: nothing."""
    kept = made(tensors, "first", filled=True)
    path = folder / f"{rank}.shard"
    keep(TrainingState(kept, per_rank=()), rank, world, path)
    dist.barrier()

    again = made(tensors, "first", filled=False)
    borrowed = BorrowedPages()
    shard = memoryview(bytearray(path.read_bytes()))
    assert resume.from_shard(TrainingState(again, per_rank=()), shard, leaf_directory(shard), rank, borrowed)
    wrong = [] if all_bits(again) == all_bits(kept) else ["from its own shard"]

    other = made(tensors, "second", filled=False)
    assert resume.from_shards(TrainingState(other, per_rank=()), AgentShards(ShardFiles(folder)), rank) == STEP
    wrong += [] if all_bits(other) == all_bits(made(tensors, "second", filled=True)) else ["with another layout"]
    dist.barrier()  # the next example writes the files again
    return ", ".join(wrong)


def train(rank: int, job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", job["port"], is_master=False, use_libuv=False)
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.PrefixStore("ranks", store), rank=rank, world_size=world)
    number = 0
    while (asked := store.get(f"example {number}")) != b"end":
        try:
            outcome = run_example(eval(asked), rank, world, Path(job["out"]))  # the test wrote it
        except Exception:  # noqa: BLE001  # the test shows it
            outcome = traceback.format_exc()
        store.set(f"outcome {number} of {rank}", outcome or "right")
        number += 1


if __name__ == "__main__":
    run_ranks(train)
