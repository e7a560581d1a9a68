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
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.daemon.agent.ranks.zygote_handle import PRELOAD
from muster.daemon.agent.testing.processes import alive
from muster.daemon.agent.testing.scripted_gang import Gang, scripted_gang
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
            if step + 1 == int(os.environ.get("STEPS", "1000")):
                break
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


async def all_ranks_reach(gang: Gang, generation: int, words: str) -> None:
    async with asyncio.timeout(300):
        while len(marks(gang, generation).get(words, [])) < len(gang.nodes):  # noqa: ASYNC110 - files tell nobody
            await asyncio.sleep(0.02)


async def begin(gang: Gang, generation: int) -> None:
    gang.fence(generation - 1)
    await gang.until(lambda: gang.all(lambda n: gang.status(n).fenced_generation >= generation - 1))
    await gang.until(lambda: gang.status("n0").store_generation == generation)
    gang.coordinator.order(gang.run_order(generation))


async def test_from_a_killed_rank_to_the_first_step(gang: Gang, capsys: pytest.CaptureFixture[str]) -> None:
    await gang.start(4, sys.executable, gang.script(TRAIN))
    await begin(gang, 1)
    await all_ranks_reach(gang, 1, "step 5")
    table = []
    for generation in (2, 3, 4):
        killed = time.time()
        os.kill(rank_pid(gang, "n1"), signal.SIGKILL)
        await gang.until(lambda: gang.rank("n1", generation - 1).phase == RANK_PHASE_EXITED)  # noqa: B023
        told = time.time()
        await begin(gang, generation)
        ordered = time.time()
        await all_ranks_reach(gang, generation, "step 5")
        found = marks(gang, generation)
        phases = {"told": told, "fenced": ordered} | {
            words: max(found[words]) for words in ("script", "group", "model", "step 1")
        }
        table.append(" ".join(f"{name} {1000 * (at - killed):.0f}" for name, at in phases.items()))
    steps = [max(found[f"step {n}"]) for n in range(1, 6)]
    step = statistics.median(b - a for a, b in itertools.pairwise(steps))
    with capsys.disabled():
        print(f"\nrank killed, 4 ranks, ms since the kill, a step takes {1000 * step:.0f} ms:", *table, sep="\n  ")
    # No rank imported torch for itself, which would take longer than all of that.
    assert not [node for node in gang.nodes if "started by exec" in (gang.folder / f"{node}.err").read_text()]


async def test_nothing_is_imported_late(gang: Gang) -> None:
    await gang.start(1, sys.executable, gang.script(TRAIN), env={"STEPS": "2"})
    await begin(gang, 1)
    await gang.until(lambda: gang.rank("n0", 1).phase == RANK_PHASE_EXITED)
    output = gang.output(0, 1)
    assert gang.rank("n0", 1).exit_code == 0, output
    assert int(re.findall(r"^parameters (\d+)$", output, re.M)[0]) >= 3_000_000
    (late,) = re.findall(r"^late ?(.*)$", output, re.M)
    assert len(late.split()) <= 2, late  # what costs nothing
    assert "started by exec" not in (gang.folder / "n0.err").read_text()


async def test_loaders_work_and_end_with_their_rank(gang: Gang) -> None:
    await gang.start(2, sys.executable, gang.script(TRAIN), env={"WORKERS": "2"})
    await begin(gang, 1)
    await all_ranks_reach(gang, 1, "step 3")
    rank = rank_pid(gang, "n0")
    loaders = descendants(rank)
    gang.fence(1)
    await gang.until(lambda: gang.all(lambda n: gang.status(n).fenced_generation == 1))
    assert len(loaders) >= 2
    assert not [pid for pid in loaders if Path(f"/proc/{pid}").exists()]
    assert not alive(rank)  # its zygote reaps it after the agent knows of the end


async def test_the_store_is_the_agents(gang: Gang) -> None:
    show = """
        import os, torch.distributed as dist
        dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        print(os.environ["MASTER_PORT"] == str(store.port), os.environ["TORCHELASTIC_USE_AGENT_STORE"])
        dist.barrier()
        dist.destroy_process_group()
    """
    await gang.start(2, sys.executable, gang.script(show))
    await begin(gang, 1)
    await gang.until(lambda: gang.all(lambda n: gang.rank(n, 1).phase == RANK_PHASE_EXITED))
    for rank in range(2):
        assert gang.output(rank, 1).splitlines()[-1] == "True True", gang.output(rank, 1)
        assert "failed to bind" not in gang.output(rank, 1)


async def test_a_cold_start_finds_the_store_too(gang: Gang) -> None:
    """A zygote with more than one thread: the ranks are started by exec and meet in the same store."""
    (gang.folder / "busy.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    show = "import torch.distributed as dist; dist.init_process_group('gloo'); print('met', dist.get_world_size())"
    await gang.start(2, sys.executable, gang.script(show), preload=[*PRELOAD, "busy"])
    await begin(gang, 1)
    await gang.until(lambda: gang.all(lambda n: gang.rank(n, 1).phase == RANK_PHASE_EXITED))
    assert [gang.output(rank, 1).splitlines()[-1] for rank in range(2)] == ["met 2"] * 2
    assert "started by exec: it has 2 threads" in (gang.folder / "n0.err").read_text()


async def test_random_generators_are_those_of_fresh_processes(gang: Gang) -> None:
    show = "import torch, numpy, random; print(torch.rand(1).item(), numpy.random.rand(), random.random())"
    await gang.start(1, sys.executable, gang.script(show), preload=[*PRELOAD, "numpy", "numpy.random"])
    drawn: list[str] = []
    for generation in (1, 2):
        await begin(gang, generation)
        await gang.until(lambda: gang.rank("n0", generation).phase == RANK_PHASE_EXITED)  # noqa: B023
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
