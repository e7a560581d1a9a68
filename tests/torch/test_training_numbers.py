"""What a step of a real model says of itself: tensors, numbers, floating-point operations."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

torch.set_num_threads(1)

from muster.checkpoint import Checkpoint  # noqa: E402
from muster.checkpoint.store.rank_samples import RankSample  # noqa: E402
from muster.checkpoint.testing.agent_in_thread import AgentInThread  # noqa: E402
from muster.checkpoint.training.rank_signals.reported_numbers import ReportedNumbers  # noqa: E402

pytestmark = pytest.mark.torch


def newest(agent: AgentInThread) -> RankSample:
    """What the agent reads of its rank."""
    found: list[RankSample] = []

    def look() -> bool:
        found[:] = agent.checkpoint_service.rank_samples.take()
        return bool(found)

    agent.until(look)
    return found[0]


def trained(agent: AgentInThread, steps: int, **options: Any) -> Checkpoint:
    torch.manual_seed(0)
    model = nn.Linear(8, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = Checkpoint(model=model, optimizer=optimizer, link=agent.connect(), **options)
    checkpoint.restore()
    for step in range(1, steps + 1):
        loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        optimizer.step()
        checkpoint.step(step, loss=loss * 0 + 2.5, gradient_norm=torch.tensor([1.5]), tokens=64, lr=0.1, accuracy=0.75)
    return checkpoint


def test_a_step_says_its_numbers_whatever_they_are(agent: AgentInThread) -> None:
    checkpoint = trained(agent, 1, total_steps=90)
    said = newest(agent).numbers
    assert (said.step, said.last_step, said.flops) == (1, 90, 0.0)
    values = {"loss": 2.5, "gradient_norm": 1.5, "tokens": 64.0, "lr": 0.1, "accuracy": 0.75}
    assert dict(said.numbers) == {name: (1, value) for name, value in values.items()}
    checkpoint.close()


def test_operations_of_one_step_are_counted_on_request(agent: AgentInThread) -> None:
    checkpoint = trained(agent, 3, count_flops=True)
    # Forward, and the gradient of the weights: the input needs none. Two samples, 8 times 4, a product and a sum each.
    assert newest(agent).numbers.flops == 2 * (2 * 2 * 8 * 4)
    checkpoint.close()


def test_a_tensor_of_many_elements_is_no_number(agent: AgentInThread) -> None:
    link = agent.connect()
    numbers = ReportedNumbers(link.send_page)
    numbers.note(1, {"loss": torch.ones(3), "gradient_norm": torch.tensor(2.0, requires_grad=True)})
    assert dict(newest(agent).numbers.numbers) == {"gradient_norm": (1, 2.0)}
    link.close()
