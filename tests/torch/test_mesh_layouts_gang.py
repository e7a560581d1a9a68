"""DTensors that only some ranks hold: of pipeline stages, and of experts. Kept, restored, and laid out anew."""

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

SCRIPT = Path(__file__).parent / "mesh_layouts_script.py"
NODES = ("n0", "n1", "n2", "n3")
LONG = pytest.mark.long
STEPS = 3


async def run(
    out: Path, layout: str, world: int, gang: InProcessGang | None = None, steps: int = STEPS, **folders: str
) -> tuple[list[Any], str]:
    """What each rank has written at the end of a run, or nothing if the run failed; and what they have printed."""
    sockets = {rank: gang.socket(rank, NODES[rank]) for rank in range(world)} if gang else {}
    job = {"layout": layout, **folders, "steps": steps}
    failed, text = await run_to_end(SCRIPT, out, world, job, sockets, gang.generation if gang else 0)
    return [] if failed else [torch.load(out / f"{rank}.pt") for rank in range(world)], text


async def kept(gang: InProcessGang, out: Path, layout: str) -> list[Any]:
    """What each of four ranks has written at the end of a run whose last step is committed."""
    gang.begin({rank: NODES[rank] for rank in range(4)})
    found, text = await run(out, layout, 4, gang)
    assert found, text[-3000:]
    async with asyncio.timeout(60):
        while any(gang.nodes[node].committed() < Version(1, STEPS) for node in NODES):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


async def flush(gang: InProcessGang, durable: Path) -> Path:
    version = Version(1, STEPS)
    order = agent_pb2.FlushOrder(serial=1, version=version.to_wire(), reason="test")
    order.sources.extend(gang.plan(version, agent_pb2.TIER_OWN).sources)
    await asyncio.gather(*(node.checkpoint_service.flush(order, str(durable)) for node in gang.nodes.values()))
    return durable / f"step_{STEPS:08}_g1_g"


def together(ranks: list[Any], moment: str) -> dict[str, Any]:
    """The whole tensors of all ranks, which agree where several hold one."""
    found: dict[str, Any] = {}
    for rank in ranks:
        for name, value in rank[moment].items():
            assert torch.equal(found.setdefault(name, value), value), name
    return found


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "layout", ["declared", *(pytest.param(layout, marks=LONG) for layout in ("pp_fsdp", "pp_tp", "ep_fsdp"))]
)
async def test_dtensors_that_only_some_ranks_hold_go_on_from_memory_and_from_a_folder(
    gang: InProcessGang, tmp_path: Path, layout: str
) -> None:
    ended = await kept(gang, tmp_path / "first", layout)
    folder = await flush(gang, tmp_path / "durable")
    await gang.lose("n3")
    await gang.add("n3")
    gang.begin({rank: NODES[rank] for rank in range(4)}, gang.plan(Version(1, STEPS)))
    restored, text = await run(tmp_path / "second", layout, 4, gang, STEPS + 1, again=str(folder))
    assert restored, text[-3000:]
    for rank in range(4):
        assert equal(restored[rank]["before"], ended[rank]["after"]), rank
        assert equal(restored[rank]["again"], ended[rank]["after"]), rank
        assert not equal(restored[rank]["after"], ended[rank]["after"]), rank


@LONG
@pytest.mark.parametrize(
    ("first", "second", "world"),
    [
        pytest.param("pp_fsdp", "fsdp", 2, id="stages_to_fewer_shards"),
        pytest.param("pp_fsdp", "pp_tp", 4, id="shards_of_stages_to_tensor_parallelism"),
        pytest.param("pp_tp", "pp_fsdp", 2, id="stages_with_fewer_ranks"),
        pytest.param("ep_fsdp", "fsdp", 3, id="experts_to_shards"),
        pytest.param("declared", "declared", 2, id="experts_with_fewer_shards"),
    ],
)
@pytest.mark.parametrize("source", ["folder", "memory"])
async def test_they_are_laid_out_anew(
    gang: InProcessGang, tmp_path: Path, first: str, second: str, world: int, source: str
) -> None:
    ended = await kept(gang, tmp_path / "first", first)
    if source == "folder":
        folder = await flush(gang, tmp_path / "durable")
        started, text = await run(tmp_path / "second", second, world, None, STEPS + 1, durable=str(folder))
    else:
        plan = gang.plan(Version(1, STEPS))
        plan.written_ranks, plan.resharded = 4, True
        gang.begin({rank: NODES[rank] for rank in range(world)}, plan)
        started, text = await run(tmp_path / "second", second, world, gang, STEPS + 1)
    assert started, text[-3000:]
    assert equal(together(started, "before"), together(ended, "after"))
