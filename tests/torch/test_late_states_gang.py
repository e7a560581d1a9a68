"""States that appear after the first snapshot, on some ranks only: training goes on, and what is new is kept."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.checkpoint.format.versions import Version  # noqa: E402
from muster.checkpoint.testing.gang_in_one_process import InProcessGang  # noqa: E402
from muster.checkpoint.testing.rank_processes import run_to_end  # noqa: E402
from muster.v1 import agent_pb2  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:torch.distributed is")]

SCRIPT = Path(__file__).parent / "late_states_script.py"
NODES = ("n0", "n1", "n2")
NEVER = 1000


async def run(out: Path, job: dict[str, Any], gang: InProcessGang | None = None) -> list[Any]:
    """What each rank has written at the end of a run. With a gang, its last step is committed."""
    world = len(job["tokens"])
    sockets = {rank: gang.socket(rank, NODES[rank]) for rank in range(world)} if gang else {}
    failed, text = await run_to_end(SCRIPT, out, world, job, sockets, gang.generation if gang else 0)
    assert not failed, text[-3000:]
    last = Version(gang.generation, job["steps"]) if gang else Version(0, 0)
    async with asyncio.timeout(60):
        while gang and any(gang.nodes[n].committed() < last for n in NODES[:world]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return [torch.load(out / f"{rank}.pt") for rank in range(world)]


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param({"tokens": [[1, 4], [1, NEVER], [3, 6]], "frozen": 0}, id="experts"),
        pytest.param({"tokens": [[1, 1], [1, 7]], "frozen": 0}, id="at_the_last_step", marks=pytest.mark.long),
        pytest.param({"tokens": [[], [], []], "frozen": 3}, id="thawed_layer", marks=pytest.mark.long),
    ],
)
async def test_what_appears_late_on_one_rank_is_kept(gang: InProcessGang, tmp_path: Path, job: dict[str, Any]) -> None:
    world = len(job["tokens"])
    places = {rank: NODES[rank] for rank in range(world)}
    gang.begin(places)
    ended = await run(tmp_path / "first", {**job, "steps": 7}, gang)

    version = Version(1, 7)
    order = agent_pb2.FlushOrder(serial=1, version=version.to_wire(), reason="test")
    order.sources.extend(gang.plan(version, agent_pb2.TIER_OWN).sources)
    durable = tmp_path / "durable"
    await asyncio.gather(*(n.checkpoint_service.flush(order, str(durable)) for n in gang.nodes.values()))

    gang.begin(places, gang.plan(version))
    again = {**job, "steps": 8, "again": str(durable / "step_00000007_g1_g")}
    restored = await run(tmp_path / "second", again, gang)
    for rank in range(world):
        assert equal(restored[rank]["before"], ended[rank]["after"]), rank
        assert equal(restored[rank]["again"], ended[rank]["after"]), rank
        assert not equal(restored[rank]["after"], ended[rank]["after"]), rank
