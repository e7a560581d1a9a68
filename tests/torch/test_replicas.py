"""Which part of a state must be equal in all replicas, and what is no finite number."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from muster.checkpoint.training.finite_values import not_finite  # noqa: E402
from muster.checkpoint.training.states import replica_samples  # noqa: E402
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


def samples_of(seed: int) -> replica_samples.Samples:
    torch.manual_seed(seed)
    net = Tied()
    net.norm.running_mean += seed  # buffers may differ
    kept = TrainingState({"model": net, "optimizer": stepped(net)})
    return replica_samples.samples(kept, kept.capture(0, 1).leaves)


def test_replicas_that_are_none_are_found_by_some_of_their_bytes() -> None:
    one, other = replica_samples.rows(samples_of(1)), replica_samples.rows(samples_of(2))
    assert len(one) == 16 * len(samples_of(1))
    assert replica_samples.first_unequal({0: one, 1: one, 2: b""}) is None
    unequal = replica_samples.first_unequal({0: one, 5: one, 7: other})
    assert unequal is not None
    names = replica_samples.names_by_number(samples_of(1))
    assert next(name for number, name in names.items() if number in unequal.others) == "model.head.weight"
    assert set(unequal.others.values()) == {7}
    assert unequal.count == len(unequal.others)


def test_shards_and_states_that_only_some_ranks_hold_are_not_compared_with_others() -> None:
    (key, sample), *_ = samples_of(1).items()
    shard, lacking = {(*key, ("S(0)", 1)): b"7 6 5 4 "}, {(*key, ("S(0)", 0)): sample, ("another",): sample}
    by_rank = {rank: replica_samples.rows(found) for rank, found in enumerate([{key: sample}, shard, lacking])}
    assert replica_samples.first_unequal(by_rank) is None


def test_what_is_not_finite_is_named_with_its_value() -> None:
    nan, inf = float("nan"), float("inf")
    assert not_finite({"loss": 1.5, "gradient norm": None}) == ""
    assert not_finite({"loss": torch.tensor(nan), "gradient norm": -inf}) == "loss = nan, gradient norm = -inf"
    assert not_finite({"loss": torch.tensor([1.0, nan])}) == "loss = nan"
    assert not_finite({"loss": torch.tensor([1.0, 2.0]), "gradient norm": torch.tensor([])}) == ""
