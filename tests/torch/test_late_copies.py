"""What only optimizers change is copied beside the next forward and backward pass: the same bytes, or no snapshot."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from muster.checkpoint import Checkpoint  # noqa: E402
from muster.checkpoint.testing.agent_in_thread import AgentInThread  # noqa: E402
from muster.checkpoint.training import snapshot  # noqa: E402
from muster.checkpoint.training.copies import late_copies  # noqa: E402
from muster.checkpoint.training.copies.late_copies import LateCopies  # noqa: E402
from muster.checkpoint.training.states.training_state import StateLeaf  # noqa: E402

pytestmark = pytest.mark.torch


class Gate:
    """Says when late copies may begin, and whether they have been made."""

    def __init__(self) -> None:
        self.is_open, self.copied = threading.Event(), threading.Event()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    copy = snapshot.SnapshotWriter.copy

    def copy_when_open(self: Any, copies: Any) -> None:
        is_late = threading.current_thread().name == late_copies.THREAD_NAME
        assert not is_late or gate.is_open.wait(30)
        copy(self, copies)
        if is_late:
            gate.copied.set()

    monkeypatch.setattr(snapshot.SnapshotWriter, "copy", copy_when_open)
    return gate


class Job:
    def __init__(
        self, agent: AgentInThread, optimizer: Callable[..., Any] = torch.optim.AdamW, device: str = "cpu"
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).to(device)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.checkpoint = Checkpoint(model=self.model, optimizer=self.optimizer, link=agent.connect(), overlap=True)
        self.done = self.checkpoint.restore()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8, device=self.device)).square().sum().backward()

    def train(self) -> None:
        self.backward()
        self.optimizer.step()
        self.done += 1

    def state(self) -> dict[str, Any]:
        states = self.optimizer.state_dict()["state"]
        of_optimizer = {f"{number}.{key}": value for number, state in states.items() for key, value in state.items()}
        found = {**self.model.state_dict(), **of_optimizer}
        return {key: torch.as_tensor(value).clone() for key, value in found.items() if value is not None}


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_restored_state_is_that_of_its_step(agent: AgentInThread, optimizer: Callable[..., Any], device: str) -> None:
    job = Job(agent, optimizer, device)
    states = {}
    for _ in range(5):
        job.train()
        states[job.done] = job.state()
        job.checkpoint.step(job.done)
        job.model(torch.randn(4, 8, device=device))  # changes the running mean, which is no parameter
        if job.done > 1:  # the first snapshot is reported with the next step
            agent.await_committed(job.done)
    job.checkpoint.close()
    again = Job(agent, optimizer, device)
    assert again.done == 5
    assert is_same(again.state(), states[again.done])
    again.checkpoint.close()


def test_an_optimizer_waits_for_what_is_copied(agent: AgentInThread, gate: Gate) -> None:
    job = Job(agent)
    gate.is_open.set()
    for _ in range(2):  # the first snapshot is compared, and reported with the next step
        job.train()
        job.checkpoint.step(job.done)
    agent.await_committed(2)
    gate.is_open.clear()
    job.train()
    expected = job.state()
    job.checkpoint.step(job.done)
    job.backward()
    threading.Timer(0, gate.is_open.set).start()
    job.optimizer.step()
    assert gate.is_open.is_set()
    agent.await_committed(3)
    job.checkpoint.close()
    again = Job(agent)
    assert (again.done, is_same(again.state(), expected)) == (3, True)
    again.checkpoint.close()


def clamp(parameter: Any) -> None:
    with torch.no_grad():
        parameter.clamp_(-0.01, 0.01)


def clamp_data(parameter: Any) -> None:
    parameter.data.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("change", [clamp, clamp_data])
def test_a_change_from_elsewhere_drops_the_snapshot_and_ends_late_copies(
    agent: AgentInThread, gate: Gate, caplog: pytest.LogCaptureFixture, change: Callable[[Any], None]
) -> None:
    job = Job(agent)
    job.train()
    job.checkpoint.step(1)
    gate.is_open.set()
    assert gate.copied.wait(30)
    change(job.model[0].weight)
    with caplog.at_level(logging.WARNING):
        job.train()
    assert "changed a parameter" in caplog.text
    expected = job.state()
    job.checkpoint.step(2)
    change(job.model[0].weight)
    agent.await_committed(2)  # without another step of the optimizer: it was copied at once
    job.checkpoint.close()
    again = Job(agent)
    assert (again.done, is_same(again.state(), expected)) == (2, True)
    again.checkpoint.close()


@pytest.mark.parametrize("last", [True, False])
def test_the_last_step_is_copied_at_once(agent: AgentInThread, gate: Gate, last: bool) -> None:
    job = Job(agent)
    job.train()
    job.checkpoint.step(1, final=last)
    if last:
        agent.await_committed(1)
    gate.is_open.set()
    job.checkpoint.close()
    agent.await_committed(1)


def test_a_copy_that_fails_is_no_snapshot() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    late = LateCopies([optimizer])
    said: list[bool] = []

    def fail(copies: Any) -> None:
        raise RuntimeError("CUDA error")

    late.start([(torch.zeros(2, 2), model.weight)], [], fail, said.append)
    optimizer.step()
    assert (said, late.usable) == ([False], False)
    late.close()


def test_a_change_of_a_dtensor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its local tensor counts no version."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(4, 4, bias=False)
        whole = distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])
        model.weight = nn.Parameter(whole)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        leaves = [StateLeaf(("model", "weight"), model.state_dict()["weight"])]
        late, said = LateCopies([optimizer]), list[bool]()
        late.begin_plan(leaves)
        assert late.leaves == {0}

        def copy(copies: Any) -> None:
            for target, source in copies:
                target.copy_(source)
            if said:  # after the first snapshot, whose bytes are compared
                clamp(model.weight)

        for _ in range(2):
            late.start([(torch.zeros(4, 4), leaves[0].value.to_local())], leaves, copy, said.append)
            late.wait()
        assert said == [True, False]
        late.close()
    finally:
        dist.destroy_process_group()
