"""Tensors that are a slot's bytes at first: they keep their values, whatever is written to the slot afterwards."""

import mmap
import os
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from muster.checkpoint.format import touched_memory  # noqa: E402
from muster.checkpoint.training.borrowed_pages import BorrowedPages  # noqa: E402

pytestmark = pytest.mark.torch

COUNT = 100_003
"""Numbers of 4 bytes: the last page is not full."""


def no_touch(address: int, size: int) -> bool:
    """As a kernel that does not know how."""
    return False


@pytest.fixture
def slot() -> Iterator[int]:
    """A memfd with a number in each word."""
    descriptor = os.memfd_create("slot")
    os.write(descriptor, torch.arange(COUNT, dtype=torch.int32).numpy().tobytes())
    yield descriptor
    os.close(descriptor)


def private_mapping(slot: int) -> memoryview:
    return memoryview(mmap.mmap(slot, 4 * COUNT, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))


def overwrite(slot: int) -> None:
    os.pwrite(slot, bytes(4 * COUNT), 0)


@pytest.mark.parametrize("touch", [touched_memory.touch, no_touch])
def test_a_tensor_in_use_keeps_its_bytes(slot: int, touch: Callable[[int, int], bool]) -> None:
    shard, borrowed = private_mapping(slot), BorrowedPages(touch)
    tensor = borrowed.tensor(shard[64:], torch.int32, (COUNT - 16,))
    tensor[5] = -1  # the training goes on meanwhile
    borrowed.copy_in_use()
    borrowed.wait()
    overwrite(slot)
    expected = torch.arange(16, COUNT, dtype=torch.int32)
    expected[5] = -1
    assert torch.equal(tensor, expected)


def test_a_tensor_that_only_its_storage_keeps_alive_is_in_use(slot: int) -> None:
    borrowed = BorrowedPages()
    part = borrowed.tensor(private_mapping(slot), torch.int32, (COUNT,))[7:]
    borrowed.copy_in_use()
    borrowed.wait()
    overwrite(slot)
    assert torch.equal(part, torch.arange(7, COUNT, dtype=torch.int32))


def test_what_nobody_uses_is_not_copied(slot: int) -> None:
    shard, borrowed = private_mapping(slot), BorrowedPages()
    borrowed.tensor(shard[:], torch.int32, (COUNT,))
    borrowed.copy_in_use()
    borrowed.wait()
    overwrite(slot)
    assert not any(shard), "the mapping shows what is in the slot"


def test_a_tensor_saves_no_bytes_around_it(slot: int) -> None:
    tensor = BorrowedPages().tensor(private_mapping(slot)[400:100_400], torch.float32, (25_000,))
    assert tensor.untyped_storage().nbytes() == 100_000
    assert not tensor._is_view()


def test_a_small_tensor_keeps_no_slot_mapped(slot: int) -> None:
    tensor = BorrowedPages().tensor(private_mapping(slot)[40:48], torch.int32, (2,))
    overwrite(slot)
    assert tensor.tolist() == [10, 11]


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_empty_tensor_has_its_shape(slot: int, shape: tuple[int, ...]) -> None:
    assert BorrowedPages().tensor(private_mapping(slot)[:0], torch.float32, shape).shape == shape
