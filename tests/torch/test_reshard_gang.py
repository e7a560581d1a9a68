"""A checkpoint of one layout and number of ranks is the start of another: equal weights and optimizer states."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.checkpoint.format.versions import Version  # noqa: E402
from muster.checkpoint.testing.gang_in_one_process import InProcessGang  # noqa: E402
from muster.checkpoint.testing.rank_processes import run_to_end  # noqa: E402
from muster.v1 import agent_pb2  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8), reason="no fully_shard on CPU in this torch"
    ),
]

SCRIPT = Path(__file__).parent / "reshard_script.py"
NODES = ("n0", "n1", "n2", "n3")
LONG = pytest.mark.long


async def run(
    out: Path, mode: str, world: int, sockets: dict[int, int], steps: int, durable: str = "", generation: int = 1
) -> Any:
    """What rank 0 has written at the end of a run."""
    job = {"steps": steps, "mode": mode, "durable": durable}
    failed, text = await run_to_end(SCRIPT, out, world, job, sockets, generation)
    assert not failed, text[-3000:]
    return torch.load(out / "full.pt")


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two nested states differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{path}.{key}")]
    same = (
        torch.equal(one, other) if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) else one == other
    )
    return [] if same else [path]


def places_of(world: int) -> dict[int, str]:
    return {rank: NODES[rank % len(NODES)] for rank in range(world)}


async def train_first(gang: InProcessGang, out: Path, mode: str, world: int) -> tuple[Any, Version]:
    """Train five steps as generation 1, which all nodes commit: what rank 0 has written, and the version."""
    places = places_of(world)
    gang.begin(places)
    ended = await run(out, mode, world, {r: gang.socket(r, n) for r, n in places.items()}, steps=5)
    version = Version(1, 5)
    async with asyncio.timeout(60):
        while any(gang.nodes[node].committed() < version for node in places.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return ended, version


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(("fsdp", 4), ("ddp", 2), id="fewer_ranks_and_whole_replicas"),
        pytest.param(("tp", 2), ("tp", 4), id="wider_tensor_parallelism", marks=LONG),
        pytest.param(("ddp", 2), ("fsdp", 4), id="replicas_to_shards", marks=LONG),
        pytest.param(("fsdp", 8), ("fsdp", 4), id="half_of_the_shards", marks=LONG),
        pytest.param(("fsdp", 4), ("fsdp", 8), id="twice_the_shards", marks=LONG),
        pytest.param(("hsdp", 4), ("tp", 2), id="replicated_shards_to_tensor_parallelism", marks=LONG),
        pytest.param(("tp", 4), ("tp", 2), id="narrower_tensor_parallelism", marks=LONG),
        pytest.param(("ddp", 8), ("ddp", 4), id="half_of_the_replicas", marks=LONG),
        pytest.param(("ddp", 4), ("ddp", 8), id="twice_the_replicas", marks=LONG),
        pytest.param(("fsdp_tp", 8), ("fsdp_tp", 4), id="fewer_shards_of_tensor_parallel_parts", marks=LONG),
    ],
)
async def test_another_layout_goes_on_from_a_durable_checkpoint(
    gang: InProcessGang, tmp_path: Path, first: tuple[str, int], second: tuple[str, int]
) -> None:
    ended, version = await train_first(gang, tmp_path / "first", *first)
    order = agent_pb2.FlushOrder(serial=1, version=version.to_wire(), reason="test")
    order.sources.extend(gang.plan(version, agent_pb2.TIER_OWN).sources)
    durable = tmp_path / "durable"
    await asyncio.gather(*(n.checkpoint_service.flush(order, str(durable)) for n in gang.nodes.values()))

    mode, world = second
    started = await run(tmp_path / "second", mode, world, {}, steps=6, durable=str(durable))
    assert differences(ended["after"], started["before"]) == []
    assert differences(started["before"], started["after"]) != []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(("fsdp", 8), ("fsdp", 4), id="half_of_the_ranks"),
        pytest.param(("fsdp", 4), ("fsdp", 8), id="twice_the_ranks", marks=LONG),
        pytest.param(("tp", 2), ("tp", 4), id="wider_tensor_parallelism", marks=LONG),
        pytest.param(("fsdp", 4), ("ddp", 2), id="shards_to_replicas", marks=LONG),
        pytest.param(("ddp", 2), ("ddp", 3), id="another_replica", marks=LONG),
        pytest.param(("fsdp_tp", 8), ("fsdp_tp", 4), id="fewer_shards_of_tensor_parallel_parts", marks=LONG),
        pytest.param(("ddp", 2), ("fsdp", 4), id="replicas_to_shards", marks=LONG),
        pytest.param(("hsdp", 4), ("tp", 2), id="replicated_shards_to_tensor_parallelism", marks=LONG),
        pytest.param(("tp", 4), ("tp", 2), id="narrower_tensor_parallelism", marks=LONG),
        pytest.param(("ddp", 8), ("ddp", 4), id="half_of_the_replicas", marks=LONG),
        pytest.param(("ddp", 4), ("ddp", 8), id="twice_the_replicas", marks=LONG),
    ],
)
async def test_another_number_of_ranks_goes_on_from_memory(
    gang: InProcessGang, tmp_path: Path, first: tuple[str, int], second: tuple[str, int]
) -> None:
    ended, version = await train_first(gang, tmp_path / "first", *first)
    if second[1] < first[1]:
        await gang.lose(NODES[3])  # its buddy holds its shards
    plan = gang.plan(version)
    plan.written_ranks, plan.resharded = first[1], True
    mode, world = second
    nodes = sorted(gang.nodes)
    places = {rank: nodes[rank % len(nodes)] for rank in range(world)}
    generation = gang.begin(places, plan)
    before = {name: node.received_bytes for name, node in gang.nodes.items()}
    sockets = {rank: gang.socket(rank, node) for rank, node in places.items()}
    started = await run(tmp_path / "second", mode, world, sockets, steps=6, generation=generation)
    assert differences(ended["after"], started["before"]) == []
    assert differences(started["before"], started["after"]) != []
    if first[0] != "ddp":  # every node holds the whole of replicas
        assert any(node.received_bytes > before[name] for name, node in gang.nodes.items())
    async with asyncio.timeout(60):
        while any(gang.nodes[node].committed() < Version(generation, 6) for node in places.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
