"""Four ranks over gloo on four nodes in one process: faults, restores, and the files of a flush."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402

from muster.checkpoint.format.versions import Version  # noqa: E402
from muster.checkpoint.testing.gang_in_one_process import InProcessGang  # noqa: E402
from muster.checkpoint.testing.rank_processes import start_ranks  # noqa: E402
from muster.v1 import agent_pb2  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:torch.distributed is")]

# Before 2.8 fully_shard ran on accelerators alone.
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8)
FSDP_ON_CPU = pytest.mark.skipif(OLD, reason="no fully_shard on CPU in this torch")
# Ranks that share one GPU use gloo, which has no collectives for FSDP2 there.
ON_GPU = pytest.param("ddp", "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
# Training with DDP goes through faults on the real Slurm, too.
MODES_ON_DEVICES = [
    pytest.param("ddp", "cpu", marks=pytest.mark.long),
    pytest.param("fsdp", "cpu", marks=FSDP_ON_CPU),
    ON_GPU,
]

SCRIPT = Path(__file__).parent / "checkpoint_script.py"
HOMES = {0: "n0", 1: "n1", 2: "n2", 3: "n3"}


async def until(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    end = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        for training in Training.running:
            assert not training.process.returncode, (training.out / "log").read_text()[-3000:]
        assert asyncio.get_running_loop().time() < end, "it never came to that"
        await asyncio.sleep(0.001)


class Training:
    """One generation of the script, one process a rank."""

    running: ClassVar[list["Training"]] = []

    def __init__(
        self,
        out: Path,
        steps: int,
        mode: str,
        world: int = 4,
        durable: str = "",
        device: str = "cpu",
        every: int | str = 1,
    ) -> None:
        self.out = out
        self.world = world
        self.job = {"steps": steps, "mode": mode, "device": device, "out": str(out), "durable": durable, "every": every}

    async def start(self, gang: InProcessGang | None = None, places: dict[int, str] = HOMES) -> None:
        sockets = {rank: gang.socket(rank, node) for rank, node in places.items()} if gang is not None else {}
        generation = gang.generation if gang is not None else 0
        self.process = await start_ranks(SCRIPT, self.world, sockets, self.out / "log", self.job, generation)
        Training.running.append(self)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()  # its ranks die with it
        await self.process.wait()
        Training.running.remove(self)

    async def result(self) -> list[str]:
        async with asyncio.timeout(120):
            assert await self.process.wait() == 0, (self.out / "log").read_text()[-3000:]
        return [(self.out / str(rank)).read_text() for rank in range(self.world)]


@pytest.fixture
async def gang() -> AsyncIterator[InProcessGang]:
    gang = InProcessGang("g")
    await gang.add(*HOMES.values())
    yield gang
    for training in list(Training.running):
        await training.kill()
    await gang.close()


def committed(gang: InProcessGang) -> int:
    return min(node.checkpoint_service.committed().step for node in gang.nodes.values())


async def recover(gang: InProcessGang, places: dict[int, str], training: Training) -> Version:
    newest = gang.newest(4)
    assert newest is not None
    gang.begin(places, gang.plan(newest))
    await training.start(gang, places)
    return newest


async def flush(gang: InProcessGang, version: Version, out: Path) -> Path:
    """Write a committed version; returns its folder."""
    order = agent_pb2.FlushOrder(serial=1, version=version.to_wire(), reason="test")
    order.sources.extend(gang.plan(version, agent_pb2.TIER_OWN).sources)
    durable = out / "durable"
    await asyncio.gather(*(n.checkpoint_service.flush(order, str(durable)) for n in gang.nodes.values()))
    return durable / f"step_{version.step:08}_g{version.generation}_g"


@pytest.mark.parametrize(("mode", "device"), MODES_ON_DEVICES)
async def test_a_run_with_faults_ends_with_the_bits_of_a_run_without(
    gang: InProcessGang, tmp_path: Path, mode: str, device: str
) -> None:
    straight = Training(tmp_path, 24, mode, device=device)
    await straight.start()
    expected = await straight.result()
    training = Training(tmp_path, 24, mode, device=device)
    gang.begin(HOMES)
    await training.start(gang)
    await until(lambda: committed(gang) >= 6)
    await training.kill()
    await gang.lose("n2")
    await gang.add("spare")
    places = {**HOMES, 2: "spare"}
    first = await recover(gang, places, training)
    assert first.step >= 6

    await until(lambda: committed(gang) >= 14)
    await training.kill()
    await gang.lose("n0")
    await gang.add("spare0")
    second = await recover(gang, {**places, 0: "spare0"}, training)
    assert second.step >= 14
    assert second.generation == 2
    assert await training.result() == expected
    await until(lambda: committed(gang) == 24)

    text = (tmp_path / "log").read_text()
    assert text.count("rank 0 has merged what 4 ranks hold") == 1, "restored ranks hold the same"
    folder = await flush(gang, Version(3, 24), tmp_path)
    state = {"muster": {"step": 0}}
    dcp.load(state, checkpoint_id=folder)
    assert state["muster"]["step"] == 24


async def test_all_ranks_keep_the_same_steps_at_the_interval_that_the_leader_chooses(
    gang: InProcessGang, tmp_path: Path
) -> None:
    """A snapshot costs far more than a thousandth of such steps, so most steps are not kept."""
    training = Training(tmp_path, 200, "ddp", every="auto")
    gang.begin(HOMES)
    await training.start(gang)
    leader, seen = gang.nodes["n0"].checkpoint_service, set[int]()
    await until(lambda: seen.add(committed(gang)) or committed(gang) >= 17)  # type: ignore[func-returns-value]
    first = sum(0 < step <= 17 for step in seen)
    await until(lambda: seen.add(committed(gang)) or committed(gang) == 200)  # type: ignore[func-returns-value]
    cost = leader.snapshot_cost()
    assert cost is not None
    assert cost.auto_interval
    assert cost.every > 1
    assert cost.stall_us > 0
    assert cost.step_us > 0
    assert len(seen) - first < 183 / 2
    assert len(await training.result()) == 4


async def test_all_ranks_stop_after_the_same_step(gang: InProcessGang, tmp_path: Path) -> None:
    training = Training(tmp_path, 5000, "ddp")
    gang.begin(HOMES)
    await training.start(gang)
    await until(lambda: committed(gang) >= 3)
    for node in gang.nodes.values():
        node.checkpoint_service.stop_ranks("maintenance")
        await asyncio.sleep(0.05)
    steps = {int(line.split()[1]) for line in await training.result()}
    assert len(steps) == 1
    last = steps.pop()
    await until(lambda: committed(gang) == last)


# That another layout goes on from FSDP's checkpoint is tested each time (test_reshard_gang).
@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp", marks=[FSDP_ON_CPU, pytest.mark.long])])
async def test_a_flush_loads_with_plain_torch_and_at_another_world_size(
    gang: InProcessGang, tmp_path: Path, mode: str
) -> None:
    training = Training(tmp_path, 12, mode)
    gang.begin(HOMES)
    await training.start(gang)
    await training.result()
    await until(lambda: committed(gang) == 12)
    folder = await flush(gang, Version(1, 12), tmp_path)
    sys.path.insert(0, str(SCRIPT.parent))
    from checkpoint_script import Net

    net = Net()
    if mode == "fsdp":
        net.norm = None
    state = {"model": net.state_dict(), "muster": {"step": 0}}
    dcp.load(state, checkpoint_id=folder)
    assert state["muster"]["step"] == 12
    ended = torch.load(tmp_path / "model.pt")
    assert ended.keys() == state["model"].keys()
    for key, value in state["model"].items():
        assert torch.equal(value, ended[key]), key
    assert (folder / "__0_0.distcp").stat().st_size > 100_000

    # Two ranks go on from the checkpoint of four.
    two = Training(tmp_path, 14, mode, world=2, durable=str(folder.parent))
    await two.start()
    assert all(line.endswith(" 14") for line in await two.result())
