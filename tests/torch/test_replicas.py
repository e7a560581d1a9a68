"""Which part of a state must be equal in all replicas, and what is no finite number."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from muster.checkpoint.training import agreed_states  # noqa: E402
from muster.checkpoint.training.finite_values import not_finite  # noqa: E402
from muster.checkpoint.training.states.replicas import Replicas, find_replicas  # noqa: E402
from muster.checkpoint.training.states.training_state import TrainingState  # noqa: E402

pytestmark = pytest.mark.torch


class Tied(nn.Module):
    """Two names for one parameter, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8, bias=False)
        self.embed = nn.Embedding(8, 4)
        self.embed.weight = self.head.weight
        self.norm = nn.BatchNorm1d(4)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.norm(self.embed(tokens)))


def found(world_size: int = 2, **states: Any) -> Replicas:
    kept = TrainingState(states)
    return find_replicas(kept, kept.capture(0, 1).leaves, world_size)


def stepped(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.arange(8)).sum().backward()
    optimizer.step()
    return optimizer


def test_parameters_and_optimizer_states_are_compared_and_buffers_are_not() -> None:
    net = Tied()
    replicas = found(model=net, optimizer=stepped(net))
    of_model = {"model.head.weight", "model.embed.weight", "model.norm.weight", "model.norm.bias"}
    of_optimizer = {f"optimizer.state.{n}.{key}" for n in range(3) for key in ("step", "exp_avg", "exp_avg_sq")}
    assert replicas.names == of_model | of_optimizer
    assert replicas.ranks == (0, 1)


def test_states_of_parameters_that_no_kept_model_has_are_not_compared() -> None:
    net, other = Tied(), Tied()
    assert not any(name.startswith("optimizer") for name in found(model=net, optimizer=stepped(other)).names)


def test_a_rank_alone_and_a_job_without_a_model_are_not_compared() -> None:
    net = Tied()
    assert found(1, model=net) == Replicas()
    assert found(optimizer=stepped(net)) == Replicas()


def test_a_model_that_is_kept_per_rank_is_not_compared() -> None:
    kept = TrainingState({"model": Tied()}, per_rank=["model"])
    assert find_replicas(kept, kept.capture(0, 1).leaves, 2) == Replicas()


def test_other_ranks_and_another_layout_are_another_group() -> None:
    groups = {Replicas(frozenset({"a"}), ranks).group(layout) for ranks in ((0, 1), (0, 2)) for layout in ("x", "y")}
    assert len(groups) == 4
    assert Replicas().group("x") == 0


def test_replicas_that_are_none_are_found_by_some_of_their_bytes() -> None:
    def samples(seed: int) -> Any:
        torch.manual_seed(seed)
        net = Tied()
        net.norm.running_mean += seed  # buffers may differ
        kept = TrainingState({"model": net, "optimizer": stepped(net)})
        return agreed_states.samples(kept, kept.capture(0, 1).leaves)

    assert agreed_states.first_unequal([samples(1), samples(1), {}]) is None
    found = agreed_states.first_unequal([samples(1), samples(1), samples(2)])
    assert found is not None
    assert found[:3] == ("model.head.weight", 0, 2)
    (name, *_), *_ = one = samples(1)
    assert agreed_states.first_unequal([{(name,): one[(name,)]}, {(name, "S(0)", 1): b"another shard"}]) is None


def test_what_is_not_finite_is_named_with_its_value() -> None:
    nan, inf = float("nan"), float("inf")
    assert not_finite({"loss": 1.5, "gradient norm": None}) == ""
    assert not_finite({"loss": torch.tensor(nan), "gradient norm": -inf}) == "loss = nan, gradient norm = -inf"
    assert not_finite({"loss": torch.tensor([1.0, nan])}) == "loss = nan"
    assert not_finite({"loss": torch.tensor([1.0, 2.0]), "gradient norm": torch.tensor([])}) == ""
