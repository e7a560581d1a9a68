"""Copies in host memory: every byte arrives, whatever kind of tensor it belongs to."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from muster.checkpoint.training.copies import memory_copy  # noqa: E402
from muster.checkpoint.training.copies.memory_copy import copy_tensors, is_plain  # noqa: E402

pytestmark = pytest.mark.torch

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@pytest.fixture(autouse=True)
def small_parts() -> Iterator[None]:
    """Parts and threads as a large state has them, and some threads of torch."""
    before, threads = memory_copy._LEAST_BYTES_PER_THREAD, torch.get_num_threads()
    memory_copy._LEAST_BYTES_PER_THREAD = 64
    torch.set_num_threads(4)
    yield
    memory_copy._LEAST_BYTES_PER_THREAD = before
    torch.set_num_threads(threads)


def tensor_of(shape: list[int], dtype: torch.dtype, kind: str) -> torch.Tensor:
    """A tensor whose bytes are where the kind says: in a row, or not, or not as they are read."""
    made = torch.randint(0, 2, shape) if dtype is torch.bool else torch.randint(0, 1000, shape)
    made = made.to(dtype)
    if kind == "transposed":
        return made.t() if made.dim() == 2 else made
    if kind == "every other":
        return torch.stack([made, made], dim=-1)[..., 0]
    if kind == "conjugated":
        return made.conj()
    return torch.nn.Parameter(made, requires_grad=False) if kind == "parameter" else made


@settings(max_examples=30, deadline=None, database=None)  # the sources are read-only in the image
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 40), max_size=3),
            st.sampled_from(DTYPES),
            st.sampled_from(("plain", "transposed", "every other", "conjugated", "parameter")),
        ),
        max_size=6,
    )
)
def test_each_source_arrives_in_its_target(drawn: list[tuple[list[int], torch.dtype, str]]) -> None:
    sources = [tensor_of(shape, dtype, kind) for shape, dtype, kind in drawn]
    targets = [torch.empty(source.shape, dtype=source.dtype) for source in sources]
    pairs = list(zip(targets, sources, strict=True))
    copy_tensors(pairs)
    assert all(torch.equal(target, source) for target, source in pairs)


def test_another_dtype_is_converted_as_torch_does() -> None:
    source, target = torch.tensor([1.5, 2.5]), torch.empty(2, dtype=torch.float64)
    copy_tensors([(target, source)])
    assert target.tolist() == [1.5, 2.5]


def test_a_subclass_is_not_plain() -> None:
    class Scaled(torch.Tensor):
        """Its bytes may need a scale that is elsewhere."""

    assert not is_plain(torch.ones(2).as_subclass(Scaled))
    assert is_plain(torch.ones(2))
