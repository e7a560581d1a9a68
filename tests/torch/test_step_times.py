"""Step times split in compute and wait, as ranks measure them with PyTorch's own hooks."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

torch.set_num_threads(1)

from muster.checkpoint.training.rank_signals.step_timer import StepTimer  # noqa: E402

pytestmark = pytest.mark.torch


class ManualClock:
    """A device whose time the test sets. `reached`: how far the device has come."""

    def __init__(self) -> None:
        self.at = 0.0
        self.reached = float("inf")

    def note(self) -> float:
        return self.at

    def has_passed(self, moment: float) -> bool:
        return moment <= self.reached

    def between_us(self, first: float, second: float) -> float:
        return (second - first) * 1e6


class Loop:
    """A training loop of one rank, in which the test says how long each part takes."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.clock = ManualClock()
        self.timer = StepTimer(self.model.parameters(), [self.optimizer], self.clock)
        self.steps = 0

    def step(self, compute: float, wait: float, rest: float = 0.0, fetch: float = 0.0) -> None:
        self.timer.begin_step()
        self.clock.at += fetch
        if fetch:
            self.timer.add_fetch(fetch * 1e6)
        self.clock.at += compute
        self.model(torch.ones(1, 2)).sum().backward()
        self.clock.at += wait
        self.optimizer.step()
        self.clock.at += rest
        self.steps += 1
        self.timer.end_step(self.steps)

    def measured(self) -> list[tuple[int, int, int]]:
        return [(t.step, t.compute_us, t.wait_us) for t in self.timer.measured()]


def test_a_step_is_split_at_the_last_gradient_and_at_the_optimizer() -> None:
    loop = Loop()
    loop.step(1.0, 1.0)  # learns which gradient comes last
    loop.step(0.5, 0.25, rest=0.125)
    loop.step(2.0, 0.0)
    assert loop.measured() == [(2, 625_000, 250_000), (3, 2_000_000, 0)]
    assert loop.measured() == []


def test_the_declared_wait_for_data_is_a_part_of_compute() -> None:
    loop = Loop()
    loop.step(1.0, 1.0, fetch=0.5)  # learns which gradient comes last
    loop.step(0.5, 0.25, fetch=0.25)
    loop.step(0.5, 0.25)
    assert [(t.compute_us, t.wait_us, t.fetch_us) for t in loop.timer.measured()] == [
        (750_000, 250_000, 250_000),
        (500_000, 250_000, 0),
    ]


def test_what_the_device_has_not_reached_is_reported_later() -> None:
    loop = Loop()
    loop.clock.reached = 3.0
    for _ in range(3):
        loop.step(1.0, 0.5)
    assert [step for step, _, _ in loop.measured()] == [2]
    loop.clock.reached = 4.5
    assert [step for step, _, _ in loop.measured()] == [3]


def test_a_device_far_behind_keeps_few_moments() -> None:
    loop = Loop()
    loop.clock.reached = 0.0
    for _ in range(30):
        loop.step(1.0, 0.5)
    loop.clock.reached = float("inf")
    assert [step for step, _, _ in loop.measured()] == list(range(23, 31))


def test_only_one_gradient_has_a_hook_once_the_last_is_known() -> None:
    loop = Loop()
    loop.step(1.0, 1.0)
    hooks = [len(getattr(p, "_post_accumulate_grad_hooks", None) or {}) for p in loop.model.parameters()]
    assert sorted(hooks) == [0, 0, 0, 1]
    loop.timer.close()
    assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in loop.model.parameters())


def test_another_last_gradient_is_learned_and_a_void_step_not_measured() -> None:
    loop = Loop()
    loop.step(1.0, 1.0)
    for parameter in loop.model[0].parameters():
        parameter.requires_grad_(False)
    for _ in range(3):
        loop.step(1.0, 0.5)
    assert [step for step, _, _ in loop.measured()] == [4]
    loop.timer.begin_step()
    loop.timer.void_step()
    loop.optimizer.step()
    loop.timer.end_step(9)
    assert loop.measured() == []
