"""Pipeline stages, experts and sharded optimizers: every rank's own state is kept, in memory and in durable folders."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402

from muster.checkpoint.durable.newest import newest_checkpoint  # noqa: E402
from muster.checkpoint.format.versions import Version  # noqa: E402
from muster.checkpoint.store.flush.flush_part import FlushError  # noqa: E402
from muster.checkpoint.testing.gang_in_one_process import InProcessGang  # noqa: E402
from muster.checkpoint.testing.rank_processes import run_to_end  # noqa: E402
from muster.v1 import agent_pb2  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:torch.distributed is")]

SCRIPT = Path(__file__).parent / "parallel_script.py"
NODES = ("n0", "n1", "n2", "n3")
STEPS = 3
EVERYTHING = {"pipeline": 2, "experts": 2, "zero": True}
Layout = dict[str, Any]


async def run(
    out: Path, layout: Layout, world: int, gang: InProcessGang | None = None, steps: int = STEPS, **folders: str
) -> tuple[list[Any], str]:
    """What each rank has written at the end of a run, or nothing if the run failed; and what they have printed."""
    sockets = {rank: gang.socket(rank, NODES[rank % len(NODES)]) for rank in range(world)} if gang else {}
    job = {**layout, **folders, "steps": steps}
    failed, text = await run_to_end(SCRIPT, out, world, job, sockets, gang.generation if gang else 0)
    return [] if failed else [torch.load(out / f"{rank}.pt") for rank in range(world)], text


async def kept(gang: InProcessGang, out: Path, layout: Layout, world: int) -> list[Any]:
    """What each rank has written at the end of a run whose last step is committed."""
    gang.begin({rank: NODES[rank % len(NODES)] for rank in range(world)})
    found, text = await run(out, layout, world, gang)
    assert found, text[-3000:]
    await until(lambda: all(gang.nodes[node].committed() == Version(1, STEPS) for node in NODES[:world]))
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def flush(gang: InProcessGang, durable: Path, serial: int, nodes: Sequence[str]) -> Awaitable[list[Any]]:
    """Write what these nodes hold of the newest version."""
    version = Version(1, STEPS)
    order = agent_pb2.FlushOrder(serial=serial, version=version.to_wire(), reason="test")
    order.sources.extend(s for s in gang.plan(version, agent_pb2.TIER_OWN).sources if s.node in nodes)
    services = [gang.nodes[node].checkpoint_service for node in nodes]
    return asyncio.gather(*(each.flush(order, str(durable)) for each in services), return_exceptions=True)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


async def test_stages_experts_and_shards_of_the_optimizer_are_each_ranks_own(
    gang: InProcessGang, tmp_path: Path
) -> None:
    ended = await kept(gang, tmp_path / "first", EVERYTHING, 4)
    assert not equal(ended[0]["after"], ended[1]["after"])

    # Nobody holds the state of the last rank, which is in the second stage.
    durable = tmp_path / "durable"
    incomplete = asyncio.ensure_future(flush(gang, durable, 1, NODES[:3]))
    await until(lambda: len(list(durable.glob(".*/*.distcp"))) == 3)
    assert newest_checkpoint(str(durable)) is None
    results = await flush(gang, durable, 2, NODES)
    assert [result for result in results if isinstance(result, BaseException)] == []
    assert isinstance((await incomplete)[0], FlushError)
    folder = durable / f"step_{STEPS:08}_g1_g"
    assert newest_checkpoint(str(durable)) == str(folder)

    await gang.lose("n3")
    assert gang.newest(4) == Version(1, STEPS)
    await gang.add("n3")
    gang.begin({rank: NODES[rank] for rank in range(4)}, gang.plan(Version(1, STEPS)))
    restored, log = await run(tmp_path / "second", EVERYTHING, 4, gang, STEPS + 1, again=str(folder))
    assert restored, log[-3000:]
    for rank in range(4):
        assert equal(restored[rank]["before"], ended[rank]["after"]), rank
        assert equal(restored[rank]["again"], ended[rank]["after"]), rank
        assert not equal(restored[rank]["after"], ended[rank]["after"]), rank
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    wanted = {name: torch.zeros(entry.size) for name, entry in names.items() if hasattr(entry, "size")}
    dcp.load(wanted, checkpoint_id=folder)
    for rank, end in enumerate(ended):
        for layer in (0, 1) if rank < 2 else (2, 3):
            name = f"layers.{layer}.expert.weight"
            assert torch.equal(wanted[f"parts.{rank % 2}_of_2.model.{name}"], end["after"][name])
            assert torch.equal(wanted[f"model.layers.{layer}.shared.bias"], end["after"][f"layers.{layer}.shared.bias"])

    for node in ("n3", "n0"):  # the rank of the second stage, and the copy that its buddy has
        await gang.lose(node)
    assert gang.newest(4) is None


@pytest.mark.long
async def test_experts_that_nobody_has_declared_are_refused(gang: InProcessGang, tmp_path: Path) -> None:
    gang.begin({0: "n0", 1: "n1"})
    layout = {"pipeline": 1, "experts": 2, "zero": False, "declared": False}
    found, text = await run(tmp_path / "run", layout, 2, gang)
    assert not found
    assert "after step 1, model.layers.0.expert.weight is not equal on ranks 0 and 1 (" in text
    assert 'differs_in={"model.layers.0.expert.weight": expert_group}' in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((2, 4, True), (1, 1, False), id="stages_and_shards_to_one_process"),
        pytest.param((1, 2, False), (2, 2, False), id="replicas_to_stages"),
        pytest.param((1, 2, True), (2, 4, True), id="shards_of_the_optimizer_to_those_of_stages"),
        pytest.param((4, 4, False), (2, 2, True), id="fewer_stages"),
    ],
)
async def test_another_division_of_the_model_goes_on_from_a_durable_checkpoint(
    gang: InProcessGang, tmp_path: Path, first: tuple[int, int, bool], second: tuple[int, int, bool]
) -> None:
    """Each division: stages, ranks, and whether ZeRO-1 shards the optimizer's state."""
    (stages, world, zero), (other_stages, other_world, other_zero) = first, second
    ended = await kept(gang, tmp_path / "first", {"pipeline": stages, "experts": 1, "zero": zero}, world)
    results = await flush(gang, tmp_path / "durable", 1, NODES[:world])
    assert [result for result in results if isinstance(result, BaseException)] == []
    layout = {"pipeline": other_stages, "experts": 1, "zero": other_zero}
    started, log = await run(
        tmp_path / "second", layout, other_world, steps=STEPS + 1, durable=str(tmp_path / "durable")
    )
    assert started, log[-3000:]
    whole, restored = ({}, {})  # type: ignore[var-annotated]
    for rank in ended:
        whole |= rank["after"]
    for rank in started:
        restored |= rank["before"]
    assert "layers.3.expert.weight.exp_avg" in whole
    assert equal(whole, restored)


@pytest.mark.long
async def test_experts_of_another_number_of_ranks_are_refused(gang: InProcessGang, tmp_path: Path) -> None:
    await kept(gang, tmp_path / "first", {"pipeline": 1, "experts": 2, "zero": False}, 2)
    await flush(gang, tmp_path / "durable", 1, NODES[:2])
    layout = {"pipeline": 1, "experts": 4, "zero": False}
    found, text = await run(tmp_path / "second", layout, 4, durable=str(tmp_path / "durable"))
    assert not found
    assert "differs between 2 ranks, and here between 4" in text
