"""Properties of states of DTensors over random meshes: restored with their bits, at the same mesh and at another."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import torch.distributed as dist  # noqa: E402
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from muster.checkpoint.testing.rank_processes import start_ranks  # noqa: E402

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parent / "mesh_properties_script.py"
WORLD = 4
MESHES = [(4,), (2, 2), (1, 4), (4, 1), (2, 1, 2), (1, 2, 2)]
ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 0, 2)]
DTYPES = ["float32", "float64", "bfloat16", "complex64", "int64", "uint8"]


class Ranks:
    """The processes of the ranks, and the store through which they are told examples. Ranks that have failed are
    replaced: they wait for each other."""

    def __init__(self, out: Path) -> None:
        self._out, self._loop, self._process = out, asyncio.new_event_loop(), None
        self._start()

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
        job, self._examples = {"port": self._store.port, "out": str(self._out)}, 0
        self._process = self._loop.run_until_complete(start_ranks(SCRIPT, WORLD, {}, self._out / "log", job, 0))

    def outcomes(self, example: Any) -> set[str]:
        """What the ranks say of an example, up to the first that finds it wrong."""
        number, found = self._examples, set[str]()
        self._examples += 1
        self._store.set(f"example {number}", repr(example))
        for rank in range(WORLD):
            key = f"outcome {number} of {rank}"
            self._store.wait([key], timedelta(seconds=100))
            found.add(self._store.get(key).decode())
            if found != {"right"}:
                self._end()
                self._start()
                break
        return found

    def _end(self) -> None:
        self._process.kill()  # its ranks die with it
        self._loop.run_until_complete(self._process.wait())

    def close(self) -> None:
        self._end()
        self._loop.close()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@st.composite
def layouts(draw: Any, shape: list[int]) -> dict[str, Any]:
    """How a tensor lies over a mesh of all ranks: for each dimension of the mesh which one of the tensor is sharded;
    None: it is replicated."""
    mesh = draw(st.sampled_from(MESHES))
    kinds = st.sampled_from([None, *range(len(shape))])
    placements = [draw(kinds) for _ in mesh]
    return {"shape": list(mesh), "ranks": list(draw(st.sampled_from(ORDERS))), "placements": placements}


@st.composite
def tensors(draw: Any) -> dict[str, Any]:
    """A tensor's kind, and two layouts. Sizes are such that shards are uneven, and some empty."""
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    kinds = {"dtype": draw(st.sampled_from(DTYPES)), "shape": shape}
    return {**kinds, "first": draw(layouts(shape)), "second": draw(layouts(shape))}


def check(ranks: Ranks, example: Any) -> None:
    outcomes = ranks.outcomes(example)
    assert outcomes == {"right"}, "\n".join(outcomes)


FEW = settings(
    max_examples=8,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # each example that is found wrong costs a start of the ranks
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@FEW
@given(example=st.lists(tensors(), min_size=1, max_size=3))
def test_a_state_over_meshes_is_restored_with_its_bits_at_the_same_and_at_another_mesh(
    ranks: Ranks, example: Any
) -> None:
    check(ranks, example)


@pytest.mark.long
@settings(FEW, max_examples=300)
@given(example=st.lists(tensors(), min_size=1, max_size=4))
def test_many_states_over_meshes_are_restored_with_their_bits(ranks: Ranks, example: Any) -> None:
    check(ranks, example)
