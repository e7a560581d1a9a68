"""Objects whose states are kept in uncommon ways, ranks that are new, and states that don't fit."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict  # noqa: E402

torch.set_num_threads(1)

from muster.checkpoint import Checkpoint, CheckpointError, ShardedSampler  # noqa: E402
from muster.checkpoint.testing.agent_in_thread import AgentInThread  # noqa: E402
from muster.checkpoint.training import loop  # noqa: E402
from muster.checkpoint.training.states import optimizer_states  # noqa: E402
from muster.checkpoint.training.states.training_state import TrainingState  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def keep(agent: AgentInThread, **states: Any) -> None:
    """Keep the present states as step 1."""
    checkpoint = Checkpoint(**states, link=agent.connect())
    checkpoint.restore()
    checkpoint.step(1, final=True)
    agent.await_committed(1)
    checkpoint.close()


def restore(agent: AgentInThread, **states: Any) -> None:
    """Restore step 1 from memory."""
    checkpoint = Checkpoint(**states, link=agent.connect())
    try:
        assert checkpoint.restore() == 1
    finally:
        checkpoint.close()


class Adapted(nn.Module):
    """A frozen layer, and a small one beside it that is trained: only that one is in the state, a plain dict."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        torch.manual_seed(seed)
        self.trained = nn.Linear(4, 4)

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        whole = super().state_dict(*arguments, **options)
        return {name: value for name, value in whole.items() if name.startswith("trained.")}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict=False, assign=assign)


def test_a_module_whose_state_is_a_plain_dict_is_restored(agent: AgentInThread, tmp_path: Path) -> None:
    kept = Adapted(1)
    keep(agent, model=kept)
    folder = agent.flush(1, tmp_path)
    from_memory, from_folder = Adapted(2), Adapted(3)
    restore(agent, model=from_memory)
    assert Checkpoint(model=from_folder).restore(durable=folder) == 1
    for found in (from_memory, from_folder):
        assert torch.equal(found.trained.weight, kept.trained.weight)


class Nested(torch.optim.Optimizer):
    """Keeps tensors of other dtypes than its parameters in dicts and lists, as some optimizers of second order do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            moments = {"low": torch.full((2,), 0.3, dtype=torch.bfloat16), "count": torch.tensor(3)}
            history = [torch.rand(2, dtype=torch.float64)]
            self.state[parameter] = {"factors": moments, "history": history, "pair": (history[0].clone(), 2)}


def test_what_is_nested_in_an_optimizers_state_keeps_its_dtype(agent: AgentInThread) -> None:
    model, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    kept, found = Nested(model.parameters()), Nested(other.parameters())
    kept.step()
    keep(agent, model=model, optimizer=kept)
    restore(agent, model=other, optimizer=found)
    before, after = kept.state[model.weight], found.state[other.weight]
    for name, value in before["factors"].items():
        assert after["factors"][name].dtype == value.dtype
        assert torch.equal(after["factors"][name], value)
    assert torch.equal(after["history"][0], before["history"][0])
    assert torch.equal(after["pair"][0], before["pair"][0])


def test_names_that_an_optimizer_knows_are_not_kept_once_for_each_parameter() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=1.0)
    names = optimizer_states.parameter_names({"model": model})
    state = optimizer_states.state_of(optimizer, names)
    assert "lr" in state["param_groups"]["0.weight"]
    assert "param_names" not in state["param_groups"]["0.weight"]
    optimizer_states.load(optimizer, state, names)
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_buffer_on_a_mesh_without_parameters_is_restored(agent: AgentInThread) -> None:
    """distribute_module lays buffers over its mesh; fully_shard then moves the parameters alone to a larger one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "tensor"))

        def made(value: float) -> nn.Module:
            model = nn.Module()
            weight = distribute_tensor(torch.full((2,), value), both, [Replicate(), Replicate()])
            model.weight = nn.Parameter(weight)
            model.register_buffer("count", distribute_tensor(torch.full((2,), value), both["tensor"], [Replicate()]))
            return model

        keep(agent, model=made(3.0))
        found = made(5.0)
        restore(agent, model=found)
        assert found.count.to_local().tolist() == [3.0, 3.0]  # type: ignore[operator,union-attr]
    finally:
        torch.distributed.destroy_process_group()


class Factored(torch.optim.Optimizer):
    """Keeps one number for each row, and one for each column, as Adafactor does, and a counter of one element."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            rows = torch.ones_like(parameter.detach()[:, :1])
            columns = torch.ones_like(parameter.detach()[:1])
            self.state[parameter] = {"rows": rows, "columns": columns, "count": torch.ones(1)}


def test_states_of_rows_and_columns_are_laid_out_as_their_parameter(agent: AgentInThread, tmp_path: Path) -> None:
    """Nothing in the new run has their layout before its first step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def made() -> Any:
            model = nn.Module()
            model.weight = nn.Parameter(distribute_tensor(torch.rand(4, 2), mesh, [Shard(0)]))
            return model, Factored(model.parameters())

        model, optimizer = made()
        optimizer.step()
        keep(agent, model=model, optimizer=optimizer)
        other, found = made()
        assert Checkpoint(model=other, optimizer=found).restore(durable=agent.flush(1, tmp_path)) == 1
        state = found.state[other.weight]
        for name, placement, shape in (("rows", Shard(0), (4, 1)), ("columns", Replicate(), (1, 2))):
            assert (state[name].placements, state[name].shape) == ((placement,), shape)
            assert torch.equal(state[name].to_local(), torch.ones(shape))
        assert not isinstance(state["count"], DTensor)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("flat", [False, True])
def test_a_folder_of_torchs_own_states_by_name_is_loaded(tmp_path: Path, flat: bool) -> None:
    """As get_optimizer_state_dict gives them, with parameters of names with dots."""

    def made() -> Any:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        return model, torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 1}])

    model, optimizer = made()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    by_name = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"model": model.state_dict(), "optimizer": by_name}, checkpoint_id=tmp_path / "step_00000001_g0")
    other, found = made()
    found.param_groups[1]["lr"] = 2
    assert Checkpoint(model=other, optimizer=found).restore(durable=tmp_path) == 1
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for key, value in optimizer.state[theirs].items():
            assert torch.equal(found.state[mine][key], value)
    assert found.param_groups[1]["lr"] == 1


class Reader:
    """An object that has no state before it begins to read."""

    def __init__(self, position: int | None = None) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        assert self.position is not None, "it has not begun"
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_load_asks_no_object_of_the_ranks_own_for_its_state(agent: AgentInThread, tmp_path: Path) -> None:
    keep(agent, model=nn.Linear(2, 2), reader=Reader(5))
    reader = Reader()
    assert Checkpoint(model=nn.Linear(2, 2), reader=reader).restore(durable=agent.flush(1, tmp_path)) == 1
    assert reader.position == 5


def test_a_further_rank_loads_no_other_ranks_own_state_from_a_folder(
    agent: AgentInThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = nn.Linear(2, 2)
    generator = torch.Generator().manual_seed(1)
    keep(agent, model=kept, reader=Reader(5), generator=generator)
    folder = agent.flush(1, tmp_path)
    monkeypatch.setattr(loop, "rank_and_world_size", lambda: (1, 2))
    model, reader, own = nn.Linear(2, 2), Reader(), torch.Generator().manual_seed(2)
    with caplog.at_level(logging.WARNING):
        assert Checkpoint(model=model, reader=reader, generator=own).restore(durable=folder) == 1
    assert torch.equal(model.weight, kept.weight)
    assert reader.position is None
    assert own.initial_seed() == 2
    assert "no state of reader was kept for this rank" in caplog.text


@pytest.mark.parametrize(
    ("model", "groups", "words"),
    [
        (
            nn.Linear(2, 3),
            1,
            r"model can't load its kept state: Error.*: size mismatch for weight: .* \(and 1 more like it\). Make it",
        ),
        (nn.Linear(2, 2), 2, "optimizer can't load its kept state: .*different number of parameter groups"),
    ],
    ids=["another_shape", "a_group_is_missing"],
)
def test_a_state_that_does_not_fit_is_named(agent: AgentInThread, model: Any, groups: int, words: str) -> None:
    kept = nn.Linear(2, 2)
    keep(agent, model=kept, optimizer=torch.optim.SGD(kept.parameters(), lr=1.0))
    parameters = [{"params": [p]} for p in model.parameters()] if groups == 2 else model.parameters()
    with pytest.raises(CheckpointError, match=f"(?s){words}"):
        restore(agent, model=model, optimizer=torch.optim.SGD(parameters, lr=1.0))


@pytest.mark.parametrize("by_sample", [False, True])
def test_a_loader_whose_sampler_nobody_counts_is_refused(by_sample: bool) -> None:
    sampler = ShardedSampler(10, batch_size=2)
    loader = SimpleNamespace(
        batch_sampler=SimpleNamespace(sampler=sampler.by_sample()) if by_sample else sampler,
        sampler=sampler.by_sample() if by_sample else None,
        state_dict=dict,
        load_state_dict=lambda state: None,
    )
    with pytest.raises(CheckpointError, match="give Checkpoint the sampler in place of the loader"):
        Checkpoint(loader=loader)
    Checkpoint(loader=loader, sampler=sampler)


def test_the_buckets_of_a_compiled_model_are_known() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        for wrapped in (model, SimpleNamespace(_orig_mod=model, state_dict=dict, load_state_dict=dict)):
            assert TrainingState({"model": wrapped}).has_bucket_rebuild()
    finally:
        torch.distributed.destroy_process_group()
