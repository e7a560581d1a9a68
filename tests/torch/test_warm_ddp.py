"""A real data-parallel job under real agents: what a restart costs from the fence to the first step, and why so
little.
"""

import asyncio
import itertools
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from muster.daemon.agent.ranks.zygote_handle import PRELOAD
from muster.daemon.testing.scripted_gang import Gang, alive, scripted_gang
from muster.v1.agent_pb2 import RANK_PHASE_EXITED

pytestmark = pytest.mark.torch

TRAIN = """
    import os, sys, time

    def mark(words):
        print(f"@{time.time():.4f} {words}", flush=True)

    def main():
        mark("script")
        before = set(sys.modules)
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, TensorDataset

        mark("imports")
        dist.init_process_group("gloo")
        mark("group")
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        print("store", os.environ["MASTER_PORT"] == str(store.port), os.environ["TORCHELASTIC_USE_AGENT_STORE"])
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        model = nn.Sequential(nn.Embedding(256, 256), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
                              nn.Linear(256, 256))
        parameters = sum(p.numel() for p in model.parameters())
        model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        mark("model")
        data = TensorDataset(torch.randint(0, 256, (4096, 16)))
        loader = DataLoader(data, batch_size=1, num_workers=int(os.environ.get("WORKERS", "0")))
        for step, (batch,) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            mark(f"step {step + 1}")
            if step == 0:
                new = set(sys.modules) - before
                late = sorted(name for name in new if name.startswith(("torch", "numpy", "sympy")))
                print("parameters", parameters)
                print("late", *late, flush=True)
        dist.destroy_process_group()

    if __name__ == "__main__":  # loaders import this file again
        main()
"""


@pytest.fixture
async def gang(tmp_path: Path) -> AsyncIterator[Gang]:
    async with scripted_gang(tmp_path, PRELOAD) as found:
        yield found


def marks(gang: Gang, generation: int) -> dict[str, list[float]]:
    """When each rank has reached each mark, in seconds of the wall clock."""
    found: dict[str, list[float]] = {}
    for rank in range(len(gang.nodes)):
        for at, words in re.findall(r"^@([\d.]+) (.*)$", gang.output(rank, generation), re.M):
            found.setdefault(words, []).append(float(at))
    return found


async def run_until(gang: Gang, generation: int, done: Callable[[int], bool]) -> int:
    """Run `generation` until it is `done`; return the generation that is.

    That is a later one if this machine was so busy that an agent heard nobody for seconds, and killed its ranks. A
    coordinator answers that with the next generation, too.
    """
    while True:
        before = self_fences(gang)
        await begin(gang, generation)
        async with asyncio.timeout(300):
            while not (done(generation) or failed(gang, generation)):  # noqa: ASYNC110 - files tell nobody
                await asyncio.sleep(0.02)
        if done(generation):
            return generation
        outputs = [gang.output(rank, generation) for rank in range(len(gang.nodes))]
        assert self_fences(gang) > before, "\n".join(["a rank has failed, and no agent has killed it", *outputs])
        generation += 1


async def train(gang: Gang, generation: int, words: str) -> int:
    """Run `generation` until all ranks have reached `words`; return the generation in which they have."""
    return await run_until(gang, generation, lambda g: len(marks(gang, g).get(words, [])) == len(gang.nodes))


async def run_to_the_end(gang: Gang, generation: int = 1) -> int:
    """Run `generation` until all its ranks have ended well; return the generation in which they have."""
    return await run_until(gang, generation, lambda g: gang.all(lambda node: ended(gang, node, g)))


def ended(gang: Gang, node: str, generation: int) -> bool:
    """Whether the rank of the node has ended well."""
    rank = gang.rank(node, generation)
    return rank.phase == RANK_PHASE_EXITED and rank.exit_code == 0


def failed(gang: Gang, generation: int) -> bool:
    """Whether a rank has ended otherwise."""
    ranks = [gang.rank(node, generation) for node in gang.nodes]
    return any(rank.phase == RANK_PHASE_EXITED and rank.exit_code != 0 for rank in ranks)


def self_fences(gang: Gang) -> int:
    """How often an agent of the gang has killed its ranks because it heard nobody."""
    said = "killing all ranks: neither the coordinator nor a majority"
    return sum((gang.folder / f"{node}.err").read_text().count(said) for node in gang.nodes)


async def begin(gang: Gang, generation: int) -> None:
    gang.fence(generation - 1)
    await gang.until(lambda: gang.all(lambda n: gang.status(n).fenced_generation >= generation - 1))
    await gang.until(lambda: gang.status("n0").store_generation == generation)
    gang.coordinator.order(gang.run_order(generation))


@dataclass(frozen=True)
class Restart:
    """Two ranks that start again after one was killed. `phases`: milliseconds since then. `outputs`: of the ranks that
    were started again. `errors`: of the agents."""

    phases: str
    step_s: float
    outputs: list[str]
    errors: list[str]


@pytest.fixture(scope="module")
def restart(tmp_path_factory: pytest.TempPathFactory) -> Restart:
    return asyncio.run(restart_once(tmp_path_factory.mktemp("restart")))


async def restart_once(folder: Path) -> Restart:
    async with scripted_gang(folder, PRELOAD) as gang:
        await gang.start(2, sys.executable, gang.script(TRAIN))
        generation = await train(gang, 1, "step 5")
        killed = time.time()
        with suppress(LookupError):  # its agent has just killed it, as in `train`
            os.kill(rank_pid(gang, "n1"), signal.SIGKILL)
        await gang.until(lambda: gang.rank("n1", generation).phase == RANK_PHASE_EXITED)
        told = time.time()
        found = marks(gang, again := await train(gang, generation + 1, "step 5"))
        phases = {"told": told} | {words: max(found[words]) for words in ("script", "group", "model", "step 1")}
        steps = [max(found[f"step {n}"]) for n in range(1, 6)]
        return Restart(
            " ".join(f"{name} {1000 * (at - killed):.0f}" for name, at in phases.items()),
            statistics.median(b - a for a, b in itertools.pairwise(steps)),
            [gang.output(rank, again) for rank in range(2)],
            [(gang.folder / f"{node}.err").read_text() for node in gang.nodes],
        )


def test_from_a_killed_rank_to_the_first_step(restart: Restart, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nrank killed, 2 ranks, a step takes {1000 * restart.step_s:.0f} ms, ms since the kill:")
        print(f"  {restart.phases}")
    # No rank imported torch for itself, which would take longer than all of that.
    assert not [error for error in restart.errors if "started by exec" in error]


def test_nothing_is_imported_late(restart: Restart) -> None:
    for output in restart.outputs:
        assert int(re.findall(r"^parameters (\d+)$", output, re.M)[0]) >= 3_000_000
        (late,) = re.findall(r"^late ?(.*)$", output, re.M)
        assert len(late.split()) <= 2, late  # what costs nothing


def test_the_store_is_the_agents(restart: Restart) -> None:
    for output in restart.outputs:
        assert re.findall(r"^store (.*)$", output, re.M) == ["True True"], output
        assert "failed to bind" not in output


async def test_loaders_work_and_end_with_their_rank(gang: Gang) -> None:
    await gang.start(1, sys.executable, gang.script(TRAIN), env={"WORKERS": "2"})
    generation = await train(gang, 1, "step 3")
    rank = rank_pid(gang, "n0")
    loaders = descendants(rank)
    gang.fence(generation)
    await gang.until(lambda: gang.all(lambda n: gang.status(n).fenced_generation == generation))
    assert len(loaders) >= 2
    assert not [pid for pid in loaders if Path(f"/proc/{pid}").exists()]
    assert not alive(rank)  # its zygote reaps it after the agent knows of the end


@pytest.mark.long
async def test_a_cold_start_finds_the_store_too(gang: Gang) -> None:
    """A zygote with more than one thread: the ranks are started by exec and meet in the same store."""
    (gang.folder / "busy.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    show = "import torch.distributed as dist; dist.init_process_group('gloo'); print('met', dist.get_world_size())"
    await gang.start(2, sys.executable, gang.script(show), preload=[*PRELOAD, "busy"])
    generation = await run_to_the_end(gang)
    assert [gang.output(rank, generation).splitlines()[-1] for rank in range(2)] == ["met 2"] * 2
    assert "started by exec: it has 2 threads" in (gang.folder / "n0.err").read_text()


async def test_random_generators_are_those_of_fresh_processes(gang: Gang) -> None:
    show = "import torch, numpy, random; print(torch.rand(1).item(), numpy.random.rand(), random.random())"
    await gang.start(1, sys.executable, gang.script(show), preload=[*PRELOAD, "numpy", "numpy.random"])
    generation, drawn = 0, list[str]()
    for _ in range(2):
        generation = await run_to_the_end(gang, generation + 1)
        drawn += gang.output(0, generation).split()
    assert len(set(drawn)) == 6


def rank_pid(gang: Gang, node: str) -> int:
    """The rank: the one descendant of the agent that leads a session and is no zygote or store."""
    for pid in descendants(gang.agent_pid(node)):
        if Path(f"/proc/{pid}/comm").read_text().startswith("rank"):
            return pid
    raise LookupError(node)


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found
