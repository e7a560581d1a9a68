"""Data loaders with workers go on where finished steps have left them, whatever the workers have fetched ahead."""

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

torch.set_num_threads(1)

from muster.checkpoint import Checkpoint, CheckpointError, ShardedSampler  # noqa: E402
from muster.checkpoint.testing.agent_in_thread import AgentInThread  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than processors
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

SAMPLES, BATCH = 41, 2


def working(workers: int) -> dict[str, Any]:
    """Options for so many workers. They are forks: from Python 3.14 on, each would import torch anew."""
    return {"num_workers": workers, "persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}


def numbers(loader: Any) -> Iterator[list[int]]:
    """The batches of one epoch after the other."""
    while True:
        for batch in loader:
            yield batch.tolist()


def read(agent: AgentInThread, make: Any, *starts: int) -> list[list[int]]:
    """What the kept steps read. `make` returns what is kept, and the loader; `starts`: steps after each start."""
    found = []
    for steps in starts:
        kept, loader = make()
        checkpoint = Checkpoint(data=kept, link=agent.connect())
        done = checkpoint.restore()
        batches = numbers(loader)
        for step in range(done + 1, done + steps + 1):
            found.append(next(batches))
            checkpoint.step(step)
            agent.await_committed(step)
        next(batches)  # is lost with the process
        checkpoint.close()
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("by_sample", [False, True])
def test_a_data_loader_goes_on_at_the_next_sample(agent: AgentInThread, workers: int, by_sample: bool) -> None:
    def make() -> Any:
        sampler = ShardedSampler(SAMPLES, batch_size=BATCH, seed=2)
        how = {"sampler": sampler.by_sample(), "batch_size": BATCH} if by_sample else {"batch_sampler": sampler}
        return sampler, DataLoader(range(SAMPLES), **how, **working(workers))  # type: ignore[arg-type]

    found = read(agent, make, 3, 20, 4)
    straight = ShardedSampler(SAMPLES, batch_size=BATCH, seed=2)
    expected = []
    for _ in range(2):
        for batch in straight:
            expected.append(batch)
            straight.finish_steps()
    assert found == expected[: len(found)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_that_reads_more_than_it_says_is_an_error(workers: int) -> None:
    sampler = ShardedSampler(SAMPLES, batch_size=BATCH)
    checkpoint = Checkpoint(sampler=sampler)
    batches = numbers(DataLoader(range(SAMPLES), batch_sampler=sampler, **working(workers)))
    next(batches), next(batches)
    checkpoint.step(1)
    next(batches), next(batches)
    with pytest.raises(CheckpointError, match="has read 1 batches more than the sampler counts"):
        checkpoint.step(2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_works_as_it_is(agent: AgentInThread, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def make() -> Any:
        torch.manual_seed(3)
        loader = stateful.StatefulDataLoader(range(SAMPLES), batch_size=BATCH, shuffle=True, **working(workers))
        return loader, loader

    broken = read(agent, make, 3, 5, 18, 4)
    again = AgentInThread()
    assert broken == read(again, make, 30)
    again.close()
