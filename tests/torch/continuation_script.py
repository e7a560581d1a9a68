"""Training that is interrupted and goes on, in ranks that stay alive; test_continuation.py runs it.

The job: {"out"}. Each case writes what came of it to out/CASE.RANK, as JSON:

- `ddp`, `fsdp`: the digest of the whole state after six steps without a break, and after three steps, a restore into
  new objects, and three more.
- `elastic`: the samples that each finished step has read, with four ranks, then three, two and four again.

Every rank has an agent of its own.
"""

import hashlib
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from muster.checkpoint import Checkpoint, ShardedSampler
from muster.checkpoint.testing.agent_in_thread import AgentInThread
from muster.checkpoint.testing.rank_processes import run_ranks
from muster.checkpoint.training.agent_connection import AgentConnection

STEPS, KEPT_STEPS, ACCUMULATION, SAMPLES = 6, 3, 3, 97


class Squares:
    """A data set whose samples are their own numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        return torch.tensor([number / SAMPLES, (number / SAMPLES) ** 2, number])


def loader_of(sampler: ShardedSampler, workers: int) -> Iterator[Any]:
    """One epoch after the other."""
    # With a generator of its own, a new iterator draws nothing from the generator that dropout uses.
    loader = DataLoader(
        Squares(),
        batch_sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,  # others import torch anew
        generator=torch.Generator().manual_seed(0),
    )
    while True:
        yield from loader


class Job:
    """What a user's script makes at its start, and its loop."""

    def __init__(self, mode: str, seed: int, link: AgentConnection | None) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        net = nn.Sequential(nn.Linear(2, 32), nn.Dropout(0.2), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        self.mode = mode
        self.model: Any = (
            nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001) if mode == "ddp" else sharded(net)
        )
        torch.manual_seed(seed + dist.get_rank())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=mode == "ddp")
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        # The first scale is as large as can be, so that the scaler skips steps and becomes smaller.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
        self.sampler = ShardedSampler(SAMPLES, batch_size=2, accumulation=ACCUMULATION, seed=5)
        self.checkpoint = Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            sampler=self.sampler,
            link=link,
        )
        self.step = 0

    def restore(self) -> None:
        self.step = self.checkpoint.restore(warmup=lambda: self.loss(torch.ones(2, 3)).backward())
        self.batches = loader_of(self.sampler, workers=0)

    def loss(self, batch: Any) -> Any:
        return nn.functional.mse_loss(self.model(batch[:, :2]).squeeze(1), batch[:, 0] * 2)

    def train(self, until: int, agent: AgentInThread | None = None) -> None:
        """Finish steps. With an agent, each step is committed before the next one begins, but the one whose states are
        new: the ranks plan again before the next one."""
        while self.step < until:
            had_states = bool(self.optimizer.state)
            self.train_step()
            self.step += 1
            self.checkpoint.step(self.step)
            if agent is not None and (self.step == 1 or had_states):
                agent.await_committed(self.step)

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        for micro_batch in range(ACCUMULATION):
            last = micro_batch == ACCUMULATION - 1
            if self.mode == "fsdp":
                self.model.set_requires_gradient_sync(last)
            else:
                self.model.require_backward_grad_sync = last  # what no_sync() sets
            self.scaler.scale(self.loss(next(self.batches)) / ACCUMULATION).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    def applied(self) -> float:
        """Steps that changed the weights: the scaler skips those that overflow."""
        return max(float(state["step"]) for state in self.optimizer.state_dict()["state"].values())

    def digest(self) -> str:
        file = io.BytesIO()
        states = [self.optimizer, self.scheduler, self.scaler, self.sampler]
        model = {name.removeprefix("module."): local(value) for name, value in self.model.state_dict().items()}
        moments = {n: {k: local(v) for k, v in s.items()} for n, s in self.optimizer.state_dict()["state"].items()}
        rest = [state.state_dict() for state in states[1:]]
        torch.save([model, moments, rest, torch.get_rng_state(), random.getstate()], file)
        return hashlib.sha256(file.getvalue()).hexdigest()


def local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def sharded(net: nn.Sequential) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net[2], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def continue_training(mode: str, agent: AgentInThread) -> dict[str, Any]:
    """The state after six steps, without and with a break."""
    straight = Job(mode, 1, None)
    straight.restore()
    straight.train(STEPS)
    broken = Job(mode, 1, agent.connect())
    broken.restore()
    broken.train(KEPT_STEPS, agent)
    broken.train_step()  # is lost
    broken.checkpoint.close()
    again = Job(mode, 99, agent.connect())
    again.restore()
    begun = again.step
    again.train(STEPS, agent)
    return {"straight": straight.digest(), "again": again.digest(), "begun": begun, "applied": again.applied()}


def read_in(world: int, steps: int, link: AgentConnection, agent: AgentInThread, durable: Path | None) -> Iterator[Any]:
    """Train for so many steps as one of `world` ranks; yields each finished step and what this rank has read for it.

    The last step is not reported, and so it is lost with the rank. The ranks have no model: only what they read counts.
    """
    sampler = ShardedSampler(Squares(), batch_size=2, seed=5)
    checkpoint = Checkpoint(sampler=sampler, link=link)
    done = checkpoint.restore(durable=durable)
    batches = loader_of(sampler, workers=1)
    for step in range(done + 1, done + steps + 1):
        samples = next(batches)[:, 2].int().tolist()
        dist.barrier()
        checkpoint.step(step)
        agent.await_committed(step)
        yield step, samples
    next(batches)
    checkpoint.close()


def shrink_and_grow(rank: int, agent: AgentInThread, out: Path) -> list[Any]:
    """The steps in which this rank took part: [step, world size, samples]."""
    read: list[Any] = []
    for start, (world, steps) in enumerate(((4, 4), (3, 3), (2, 4), (4, 5))):
        if rank >= world:
            continue
        meet(out / f"elastic{start}", rank, world)
        if start == 3:  # a requeue at the full size: no memory is left
            agent = AgentInThread(rank)
        durable = out / "durable" if start == 3 else None
        read += [[step, world, samples] for step, samples in read_in(world, steps, agent.connect(), agent, durable)]
        if start == 2:
            agent.flush(read[-1][0], out / "durable", range(world))
            dist.barrier()
        dist.destroy_process_group()
    return read


def meet(file: Path, rank: int, world: int) -> None:
    """Join the other ranks in a process group."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)


def train(rank: int, job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    out = Path(job["out"])
    meet(out / "store", rank, 4)
    for case in job["cases"]:
        found = continue_training(case, AgentInThread(rank))
        (out / f"{case}.{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()
    (out / f"elastic.{rank}").write_text(json.dumps(shrink_and_grow(rank, AgentInThread(rank), out)))


if __name__ == "__main__":
    run_ranks(train)
