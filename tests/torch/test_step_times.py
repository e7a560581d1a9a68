"""Step times split in compute and wait, as ranks measure them with PyTorch's own hooks."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

torch.set_num_threads(1)

from muster.checkpoint.training.step_timer import HostClock, StepTimer  # noqa: E402

pytestmark = pytest.mark.torch

RANKS = 8
SCRIPT = Path(__file__).parent / "step_times_script.py"


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

    def step(self, compute: float, wait: float, rest: float = 0.0) -> None:
        self.timer.begin_step()
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


def test_eight_gloo_ranks_show_one_step_time_and_the_slow_one_computes_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run([sys.executable, SCRIPT, str(RANKS), "5", str(tmp_path)], check=True, timeout=120)
    ranks = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(RANKS)]
    compute = [statistics.median(rank["compute_us"]) for rank in ranks]
    wait = [statistics.median(rank["wait_us"]) for rank in ranks]
    with capsys.disabled():
        print(
            f"\nwall ms {[round(1000 * rank['wall_s'], 1) for rank in ranks]}"
            f"\ncompute ms {[round(us / 1000, 1) for us in compute]}\nwait ms {[round(us / 1000, 1) for us in wait]}"
        )
    assert max(range(RANKS), key=compute.__getitem__) == 5
    assert min(range(RANKS), key=wait.__getitem__) == 5
    assert {rank["first_block"] for rank in ranks} == {1}


def test_what_the_measurement_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the cost of all calls of a step: no assertion on time."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(150)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

    def run(timer: StepTimer | None) -> float:
        spent = []
        for step in range(1, 120):
            begin = time.perf_counter()
            if timer is not None:
                timer.begin_step()
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            if timer is not None:
                timer.end_step(step)
                timer.measured()
            spent.append(time.perf_counter() - begin)
        return statistics.median(spent)

    run(None)
    timer = StepTimer(model.parameters(), [optimizer], HostClock())
    with_timer = [run(timer) for _ in range(3)]
    timer.close()
    without = [run(None) for _ in range(3)]
    with capsys.disabled():
        print(f"\nstep of 300 parameters, us: {min(without) * 1e6:.1f} without, {min(with_timer) * 1e6:.1f} with times")
