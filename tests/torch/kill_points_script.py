"""Trains on ranks of which one is killed in the middle of a snapshot. test_kill_points.py runs it.

The job: {"out", "steps", "point", "rank", "step"}. The rank dies at the point, with the first step from `step` on that
it keeps. Each rank writes the digest of its state after each step to out/RANK.STEP, and what it has restored to
out/RANK.restored: step and digest.
"""

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from muster.checkpoint import Checkpoint
from muster.checkpoint.testing.rank_processes import run_ranks
from muster.checkpoint.training import loop
from muster.checkpoint.training.agent_connection import AgentConnection, SnapshotCost

NUMBERS = 1 << 20
"""Of the tensor in which a copy can end."""
NO_COST = SnapshotCost()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Fuse:
    """An object of the state. It is written as a number, and kills the process instead if it is armed."""

    def __init__(self) -> None:
        self.armed = False

    def __reduce__(self) -> tuple[Any, ...]:
        if self.armed:
            die()
        return int, (1,)


class Connection(AgentConnection):
    """The process dies beside its report."""

    point = ""

    def report_filled(self, slot: int, step: int, cost: SnapshotCost = NO_COST) -> None:
        if self.point == "before the report":
            die()
        super().report_filled(slot, step, cost)
        if self.point == "after the report":
            die()


class Table:
    """A large tensor of each rank's own, in a file. As a counter of steps it is copied like a shard of a model."""

    def __init__(self, rank: int, file: Path) -> None:
        self.file = file
        file.write_bytes(bytes(4 * NUMBERS))
        self.tensor = torch.from_file(str(file), shared=True, size=NUMBERS)
        self.tensor.fill_(rank)

    def finish_steps(self, steps: int) -> None:
        """The training changes it."""

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor.copy_(state["tensor"])


class Cursor:
    """An object of each rank's own. It is asked for its state before anything is copied, and written after tensors."""

    def __init__(self) -> None:
        self.fuse, self.dies_when_asked = Fuse(), False

    def state_dict(self) -> dict[str, Any]:
        if self.dies_when_asked:
            die()
        return {"fuse": self.fuse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"fuse": 1}


def arm(point: str, cursor: Cursor, table: Table) -> None:
    """Die at a point of the next snapshot."""
    match point:
        case "before the copy":
            cursor.dies_when_asked = True
        case "amid a tensor":
            os.truncate(table.file, 2 * NUMBERS)  # the kernel ends a process that reads behind the end (SIGBUS)
        case "amid the objects":
            cursor.fuse.armed = True
        case _:
            Connection.point = point


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, table: torch.Tensor) -> str:
    found = hashlib.sha256(table.numpy().tobytes())
    for tensor in model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    for _, state in sorted(optimizer.state_dict()["state"].items()):
        for _, tensor in sorted(state.items()):
            found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def train(rank: int, job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    loop.AgentConnection = Connection  # type: ignore[misc]
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    out = Path(job["out"])
    table, cursor = Table(rank, out / f"{rank}.table"), Cursor()
    states = {"model": model, "optimizer": optimizer, "table": table, "cursor": cursor}
    checkpoint = Checkpoint(differs_in={"table.*": None}, **states)
    step = checkpoint.restore(warmup=lambda: model(torch.ones(1, 256)).sum().backward())
    if step:
        (out / f"{rank}.restored").write_text(f"{step} {digest(model, optimizer, table.tensor)}")
    while step < job["steps"]:
        step += 1
        optimizer.zero_grad()
        model(torch.full((4, 256), float(step + rank))).square().sum().backward()
        optimizer.step()
        table.tensor += step
        (out / f"{rank}.{step}").write_text(digest(model, optimizer, table.tensor))
        if rank == job["rank"] and step == job["step"]:
            arm(job["point"], cursor, table)
        checkpoint.step(step, final=step == job["steps"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_ranks(train)
