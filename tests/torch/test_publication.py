"""What ranks publish: merged as torch's own planner would merge it, and agreed once."""

import itertools
import pickle
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (  # noqa: E402
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from muster.checkpoint.training.planning.merged_plans import Held, HeldItems, Merged, TensorPart, merge  # noqa: E402
from muster.checkpoint.training.planning.publication import plan_publication  # noqa: E402
from muster.checkpoint.training.states.training_state import StateLeaf  # noqa: E402

pytestmark = pytest.mark.torch

PROPERTIES = TensorProperties(dtype=torch.float32)


def grid(whole: tuple[int, ...], pieces: tuple[int, ...]) -> list[TensorPart]:
    """A tensor cut into so many pieces along each dimension, as torch.chunk would: the last ones may be empty."""
    cuts = []
    for length, count in zip(whole, pieces, strict=True):
        width = -(-length // count)
        cuts.append([(min(n * width, length), min(width, length - min(n * width, length))) for n in range(count)])
    found = []
    for place in itertools.product(*cuts):
        offsets, sizes = (tuple(numbers) for numbers in zip(*place, strict=True)) if place else ((), ())
        found.append(TensorPart(offsets, sizes, whole, PROPERTIES))
    return found


@st.composite
def gangs(draw: st.DrawFn) -> list[Held]:
    """Ranks of which each holds a part of some tensors, or replicas of parts, and objects of its own and of all."""
    world_size = draw(st.integers(1, 6))
    held = [Held(HeldItems([], {}), HeldItems([], {}), True) for _ in range(world_size)]
    for number in range(draw(st.integers(0, 4))):
        name = f"model.{number}"
        dims = draw(st.integers(0, 3))
        whole = tuple(draw(st.integers(1, 7)) for _ in range(dims))
        parts = grid(whole, tuple(draw(st.integers(1, 3)) for _ in range(dims)))
        if len(parts) > world_size:
            parts = grid(whole, (1,) * dims)
        first = draw(st.integers(0, world_size - len(parts)))
        for rank in range(first, world_size):
            held[rank].shared.parts.append((name, parts[(rank - first) % len(parts)]))
            held[rank].shared.paths[name] = ("model", number)
    for rank in range(world_size):
        held[rank].shared.parts.append(("step", None))
        held[rank].own.parts.append((f"ranks.{rank}.generator", None))
        held[rank].own.paths[f"ranks.{rank}.generator"] = ("ranks", rank)
    return held


def by_torch(held: list[Held]):
    """The metadata that torch's own planner makes of the same."""
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    planner.set_up_planner({}, is_coordinator=True)
    return planner.create_global_plan([SavePlan([write_item(*part) for part in rank.parts]) for rank in held])


def write_item(name: str, part: TensorPart | None) -> WriteItem:
    if part is None:
        return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
    chunk = ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
    data = TensorWriteData(chunk, part.properties, torch.Size(part.whole))
    return WriteItem(MetadataIndex(name, part.offsets), WriteItemType.SHARD, tensor_data=data)


@settings(max_examples=60, deadline=None, database=None)
@given(gangs())
def test_ranks_are_merged_as_by_torchs_own_planner(held: list[Held]) -> None:
    merged = merge(held)
    assert isinstance(merged, Merged), merged
    plans, expected = by_torch(held)
    metadata = pickle.loads(merged.metadata)
    assert metadata.state_dict_metadata == expected.state_dict_metadata
    files, numbers = {}, []
    for rank, (plan, rank_held, rank_numbers) in enumerate(zip(plans, held, merged.numbers, strict=True)):
        by_name = rank_numbers.by_name(rank_held)
        assert list(by_name) == [item.index.fqn for item in plan.items]
        numbers += by_name.values()
        files |= {item.index: (item.index.index, f"__{rank}_0.distcp") for item in plan.items}
    assert numbers == list(range(len(files))), "each number is used once"
    assert {i: (i.index, place.relative_path) for i, place in metadata.storage_data.items()} == files


HALVES = grid((8, 4), (2, 1))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (HALVES[:1], "hold 16 elements of w, which has 32"),
        (
            [HALVES[0], HALVES[1]._replace(offsets=(3, 0))],
            "hold the same elements of w: [4, 4] elements from [0, 0]",
        ),
        ([HALVES[0], HALVES[1]._replace(offsets=(5, 0))], "lies outside of it"),
        ([HALVES[0], HALVES[1]._replace(whole=(8, 5))], "has the shape [8, 4] on one rank, and [8, 5] on another"),
    ],
)
def test_parts_that_are_no_whole_tensor_are_refused(parts: list[TensorPart], reason: str) -> None:
    held = [Held(HeldItems([("w", part)], {"w": ("w",)}), HeldItems([], {}), True) for part in parts]
    merged = merge(held)
    assert isinstance(merged, str)
    assert reason in merged


def leaves(**values: object) -> list[StateLeaf]:
    return [StateLeaf((name,), value) for name, value in values.items()]


def test_what_was_agreed_is_used_again_while_it_fits() -> None:
    first = plan_publication(leaves(weight=torch.zeros(3, 2), step=4))
    assert plan_publication(leaves(weight=torch.ones(3, 2), step=5), first) is first
    assert plan_publication(leaves(weight=torch.ones(3, 3), step=5), first).held != first.held
    assert plan_publication(leaves(weight=torch.ones(3, 2), more=1), first).numbers.keys() == {"weight", "more"}
    assert plan_publication(leaves(weight=torch.ones(3, 2), step=5), replace(first, world_size=2)) is not first
