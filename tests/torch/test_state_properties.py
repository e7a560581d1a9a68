"""Properties over random states: what is kept has the same bits when it is restored, from memory and from a folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import torch.distributed.checkpoint as dcp  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from muster.checkpoint import Checkpoint, CheckpointError  # noqa: E402
from muster.checkpoint.format.errors import RestoreError  # noqa: E402
from muster.checkpoint.testing.agent_in_thread import AgentInThread  # noqa: E402
from muster.checkpoint.training.agent_connection import AgentConnection  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

torch.set_num_threads(1)
FEW = settings(
    max_examples=15, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentInThread]:
    agent = AgentInThread()
    yield agent
    agent.close()


@dataclass
class Position:
    """An object of the user's own."""

    epoch: int
    words: tuple[str, ...]


class Held:
    """Any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def base(draw: Any) -> Any:
    """A contiguous tensor of random bytes."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    if dtype == torch.bool:
        return torch.arange(torch.Size(shape).numel()).view(shape) % draw(st.integers(1, 3)) == 0
    count = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def view_of(draw: Any, tensor: Any) -> Any:
    """A view of a tensor's memory: parts, other strides, lazily conjugated or negated values."""
    kind = draw(st.sampled_from(["same", "transposed", "part", "every_second", "expanded", "conjugated", "negated"]))
    if kind == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    if kind == "part" and tensor.dim() and tensor.shape[0]:
        return tensor[draw(st.integers(0, tensor.shape[0] - 1)) :]
    if kind == "every_second" and tensor.dim():
        return tensor[..., ::2]
    if kind == "expanded":
        return tensor.expand(2, *tensor.shape)
    if kind == "conjugated" and tensor.is_complex():
        return tensor.conj()
    if kind == "negated" and tensor.dtype.is_floating_point and tensor.element_size() >= 4:
        return torch._neg_view(tensor)
    return tensor


@st.composite
def states(draw: Any) -> Any:
    """A nested state. Its tensors are views of a few memories, so that some share theirs."""
    bases = [base(draw) for _ in range(draw(st.integers(1, 3)))]
    tensors = st.sampled_from(bases).flatmap(lambda tensor: st.builds(lambda: view_of(draw, tensor)))
    keys = st.one_of(st.integers(0, 3), st.sampled_from(["weight", "bias", "0weight", "Größe"]))
    objects = st.one_of(
        st.none(),
        st.integers(),
        st.text(max_size=3),
        st.builds(Position, st.integers(0, 9), st.tuples(st.text(max_size=2))),
        st.tuples(st.integers(), st.none()),
        st.lists(st.integers(), max_size=2),
    )
    inner = st.recursive(
        st.one_of(tensors, objects),
        lambda deeper: st.one_of(st.lists(deeper, max_size=3), st.dictionaries(keys, deeper, max_size=3)),
        max_leaves=8,
    )
    return draw(st.dictionaries(keys, inner, min_size=1, max_size=4))


def bits(value: Any) -> Any:
    """A nested state with the bits of its tensors, which can be compared."""
    if isinstance(value, dict):
        return {key: bits(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(bits, value)]
    if isinstance(value, torch.Tensor):
        # Each lazy view has a bit of its own; this makes the values that it stands for.
        plain = torch.empty(value.numel(), dtype=value.dtype)
        plain.copy_(value.detach().resolve_conj().resolve_neg().reshape(-1))
        return value.dtype, tuple(value.shape), plain.view(torch.uint8).tolist()
    return value


def blank(value: Any) -> Any:
    """The same nested state without its values, for plain torch to load into."""
    if isinstance(value, dict):
        return {key: blank(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return list(map(blank, value))
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def shared_memory(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The path of each tensor with bytes, and what is equal for tensors that are one in memory."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from shared_memory(inner, (*path, key))
    if isinstance(value, torch.Tensor) and value.numel():
        lazy = (value.is_conj(), value.is_neg())
        yield path, (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), lazy)


def pairs(value: Any) -> set[frozenset[Any]]:
    """Which tensors are one in memory."""
    found = list(shared_memory(value))
    return {frozenset((p, q)) for p, of_p in found for q, of_q in found if p != q and of_p == of_q}


def keep(agent: AgentInThread, state: Any) -> AgentConnection:
    """Keep a state in memory, as the newest one. Its step has the number of the generation."""
    connection = agent.connect()
    checkpoint = Checkpoint(held=Held(state), per_rank=(), link=connection)
    connection.join()
    checkpoint._was_restored = True  # the state before is of another example
    checkpoint.step(agent.generation, final=True)
    agent.await_committed(agent.generation)
    return connection


@FEW
@given(state=states())
def test_a_state_is_restored_with_its_bits_and_its_shared_memory(agent: AgentInThread, state: Any) -> None:
    keep(agent, state).close()
    restored = Held()
    checkpoint = Checkpoint(held=restored, per_rank=(), link=agent.connect())
    checkpoint.restore()
    assert bits(restored.state) == bits(state)
    assert pairs(restored.state) >= pairs(state)
    checkpoint.close()


@FEW
@given(state=states())
def test_a_flushed_state_is_loaded_with_its_bits_by_plain_torch_and_by_muster(
    agent: AgentInThread, state: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    connection = keep(agent, state)
    folder = agent.flush(agent.generation, tmp_path_factory.mktemp("durable"))
    connection.close()
    # Everything in the folder: what is left out, torch takes for a sign of its older format.
    others = {"muster": {"step": 0, "structure": None}, "ranks": {"0": {"generators": None}}}
    plain = {"held": with_text_keys(blank(state)), **others}
    if not has_empty_dict(state):  # torch saves none, and does not load a state with one
        dcp.load(plain, checkpoint_id=folder)
        assert bits(plain["held"]) == bits(with_text_keys(state))
    restored = Held()
    assert Checkpoint(held=restored, per_rank=()).restore(durable=folder) == agent.generation
    assert bits(restored.state) == bits(state)


def with_text_keys(value: Any) -> Any:
    """The state with the keys that plain torch gives it."""
    if isinstance(value, dict):
        return {str(key): with_text_keys(inner) for key, inner in value.items()}
    return [*map(with_text_keys, value)] if isinstance(value, list) else value


def has_empty_dict(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, dict) and not value) or any(map(has_empty_dict, inner))


def test_names_that_can_not_be_told_apart_are_refused(agent: AgentInThread) -> None:
    with pytest.raises(CheckpointError, match=r"two values have the name held\.1"):
        keep(agent, {1: 0, "1": 1})


@FEW
@given(data=st.data())
def test_a_bit_that_flips_anywhere_in_a_slot_is_found(agent: AgentInThread, data: st.DataObject) -> None:
    connection = keep(agent, {"weight": torch.arange(40.0), "word": "a"})
    position = data.draw(st.integers(0, len(connection.slots[0]) - 1))
    bit = data.draw(st.integers(0, 7))
    for slot in connection.slots:  # the other one may hold the state of an example before
        slot[position] ^= 1 << bit
    connection.close()
    again = agent.connect()
    with pytest.raises(RestoreError, match=r"can't be had: .* of \d+ pieces"):
        Checkpoint(held=Held(), per_rank=(), link=again).restore()
    again.close()
