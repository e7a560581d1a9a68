"""Every kind of tensor is kept with its bits: subclasses, strides, views that share memory, nested states."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402

from muster.checkpoint import Checkpoint, CheckpointError  # noqa: E402
from muster.checkpoint.testing.agent_in_thread import AgentInThread  # noqa: E402
from muster.checkpoint.training.states.inner_tensors import put_together, taken_apart  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

torch.set_num_threads(1)


class Quantized(torch.Tensor):
    """A tensor of 8-bit codes with a scale for each row, as libraries make them. `codes` may be quantized again."""

    codes: Any
    scales: Any
    signed: bool

    @staticmethod
    def __new__(cls, codes: Any, scales: Any, signed: bool) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype)

    def __init__(self, codes: Any, scales: Any, signed: bool) -> None:
        self.codes, self.scales, self.signed = codes, scales, signed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], {"signed": self.signed}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], context: Any, shape: Any, stride: Any) -> Any:
        return cls(inner["codes"], inner["scales"], context["signed"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if function in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            return cls(function(args[0].codes), function(args[0].scales), args[0].signed)
        if function is aten.copy_.default and isinstance(args[1], cls):
            args[0].codes.copy_(args[1].codes)
            args[0].scales.copy_(args[1].scales)
            return args[0]
        raise NotImplementedError(f"{function} of a quantized tensor")


def quantized(seed: int, signed: bool = True) -> Any:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (6, 5), dtype=torch.uint8, generator=generator)
    return Quantized(codes, torch.rand(6, 1, generator=generator), signed)


class Opaque(torch.Tensor):
    """A subclass that does not tell its inner tensors."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

    __torch_dispatch__ = classmethod(lambda cls, function, types, args=(), kwargs=None: args[0])  # type: ignore[assignment]


class Net(nn.Module):
    """A model with a quantized weight, and one whose codes are quantized once more."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.plain = nn.Linear(3, 2)
        self.register_buffer("weight", quantized(seed))
        self.register_buffer("twice", Quantized(quantized(seed + 1, signed=False), torch.rand(6, 1), signed=True))


class Adam8bit(torch.optim.Optimizer):
    """An optimizer with quantized moments."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            state["moment"] = quantized(17 * state["step"] + number)


def bits(value: Any) -> Any:
    """A nested state as values that can be compared, with the bits of its tensors."""
    if isinstance(value, dict):
        return {key: bits(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(bits, value)]
    if not isinstance(value, torch.Tensor):
        return value
    parts, recipe = taken_apart(value.detach())
    raw = [part.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist() for part in parts]
    return recipe, [(part.dtype, tuple(part.shape)) for part in parts], raw


def test_a_dtensor_of_partial_sums_is_refused() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        assert len(taken_apart(DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False))[0]) == 1
        with pytest.raises(CheckpointError, match=r"gradient is a DTensor of partial sums .*: redistribute it"):
            taken_apart(DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False), "gradient")
    finally:
        torch.distributed.destroy_process_group()


def test_a_tensor_of_a_subclass_is_taken_apart_at_any_depth() -> None:
    value = Quantized(quantized(1, signed=False), torch.rand(6, 1), signed=True)
    parts, recipe = taken_apart(value)
    assert [part.dtype for part in parts] == [torch.uint8, torch.float32, torch.float32]
    again = put_together(recipe, iter(parts))
    assert again.signed
    assert not again.codes.signed
    assert again.codes.codes is value.codes.codes


def test_tensors_of_subclasses_are_kept_and_restored(agent: AgentInThread, tmp_path: Path) -> None:
    net = Net(1)
    optimizer = Adam8bit(net.parameters())
    checkpoint = Checkpoint(model=net, optimizer=optimizer, link=agent.connect())
    checkpoint.restore()
    for n in (1, 2):
        optimizer.step()
        net.weight.codes += 1
        checkpoint.step(n, final=n == 2)
        agent.await_committed(n)
    folder = agent.flush(2, tmp_path)
    kept = bits([dict(net.state_dict()), optimizer.state_dict()])
    checkpoint.close()

    for link, durable in ((agent.connect(), None), (None, folder)):
        other = Net(5)
        weight = other.weight.codes
        other_optimizer = Adam8bit(other.parameters())
        if durable is None:
            other_optimizer.step()  # one has a state to load into, the other has none
        again = Checkpoint(model=other, optimizer=other_optimizer, link=link)
        assert again.restore(durable=durable) == 2
        assert bits([dict(other.state_dict()), other_optimizer.state_dict()]) == kept
        assert other.weight.codes is weight, "loaded in place"
        again.close()


def test_a_durable_subclass_is_what_torch_saves(agent: AgentInThread, tmp_path: Path) -> None:
    net = Net(1)
    checkpoint = Checkpoint(model=net, link=agent.connect())
    checkpoint.restore()
    checkpoint.step(1, final=True)
    agent.await_committed(1)
    folder = agent.flush(1, tmp_path)
    state = {"model": Net(4).state_dict()}
    with torch.serialization.safe_globals([Quantized]):
        dcp.load(state, checkpoint_id=folder)
    assert bits(dict(state["model"])) == bits(dict(net.state_dict()))
    checkpoint.close()


def test_a_context_that_changes_is_planned_anew(agent: AgentInThread) -> None:
    net = Net(1)
    checkpoint = Checkpoint(model=net, link=agent.connect())
    checkpoint.restore()
    for n, signed in ((1, True), (2, False)):
        net.weight.signed = signed
        checkpoint.step(n, final=True)
        agent.await_committed(n)
    checkpoint.close()
    other = Net(5)
    other.weight.signed = False
    again = Checkpoint(model=other, link=agent.connect())
    assert again.restore() == 2
    assert bits(dict(other.state_dict())) == bits(dict(net.state_dict()))
    again.close()


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (lambda: Opaque(), "value is a Opaque without bytes of its own"),
        (lambda: torch.empty(3, device="meta"), "value is on the meta device"),
        (lambda: torch.eye(3).to_sparse(), "value is no plain strided tensor"),
    ],
)
def test_a_tensor_without_bytes_that_could_be_kept_is_named(agent: AgentInThread, tensor: Any, words: str) -> None:
    net = nn.Module()
    net.register_buffer("value", tensor())
    checkpoint = Checkpoint(model=net, link=agent.connect())
    checkpoint.restore()
    with pytest.raises(CheckpointError, match=words):
        checkpoint.step(1)
    checkpoint.close()
