"""A sampler whose order is a pure function of seed and position, for any number of ranks.

    sampler = ShardedSampler(data, batch_size=8, seed=1)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=4, generator=torch.Generator())
    checkpoint = Checkpoint(model=ddp, optimizer=optimizer, sampler=sampler)

The position counts the samples of finished steps, of all ranks together: `Checkpoint.step` counts them, and what a
loader has fetched ahead does not count. So the state is a few numbers, equal on all ranks. After a restore any number
of ranks, with any batch size, goes on with exactly the samples that no finished step has read.
"""

from collections.abc import Iterator, Sized
from operator import index
from typing import Any, SupportsIndex, get_args
from weakref import ref

from muster.checkpoint.data.division import Division, EpochEnd
from muster.checkpoint.data.handed_out import HandedOut
from muster.checkpoint.data.permutation import MOST_SAMPLES, ORDER_VERSION
from muster.checkpoint.format.errors import CheckpointError


class ShardedSampler:
    """Deals the samples of a data set to ranks, in batches. A DataLoader takes it as its batch_sampler.

    Each iteration yields the batches of this rank from the present position to the end of the epoch. An iterator that
    was made before a restore yields what it would have yielded without it: make iterators after the restore.

    Args:
        data: the data set, or its number of samples. Samples are known by their index.
        batch_size: samples that this rank reads at once.
        accumulation: batches of a rank that make one step of the optimizer.
        seed: of the order, 0 to 2^64 - 1, equal on all ranks. Each epoch has its own order.
        shuffle: False: each epoch is in the data set's own order.
        epoch_end: what becomes of the samples that are left at the end of an epoch, and too few for a step.
            "carry": the step takes the first samples of the next epoch as well, so that each sample of each epoch is
            read once. "drop": they are left out. "pad": the step is smaller, and all ranks get equally many samples:
            fewer than `num_replicas` are read a second time.
        with_seeds: True: the data set is asked for pairs (index, seed). This seed, of 63 bits, follows from the
            sampler's seed and the sample's position: what is drawn from it is equal after a restore.
        rank, num_replicas: which of how many ranks that read different samples. Default: those of the default process
            group. Ranks of one tensor-parallel group read the same samples: give them the same number.

    Raises:
        CheckpointError: a number is not allowed, or an epoch is too small for a step.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        batch_size: int,
        accumulation: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        epoch_end: EpochEnd = "carry",
        with_seeds: bool = False,
        rank: int | None = None,
        num_replicas: int | None = None,
    ) -> None:
        if (rank is None) != (num_replicas is None):
            raise CheckpointError("rank and num_replicas belong together: give both, or none of them")
        if rank is None or num_replicas is None:
            rank, num_replicas = _rank_and_world_size()
        samples = _whole("samples", data if isinstance(data, int) else len(data), 1, MOST_SAMPLES)
        batch_size = _whole("batch_size", batch_size, 1)
        accumulation = _whole("accumulation", accumulation, 1)
        seed = _whole("seed", seed, 0, 2**64 - 1)
        num_replicas = _whole("num_replicas", num_replicas, 1)
        rank = _whole("rank", rank, 0, num_replicas - 1)
        if epoch_end not in get_args(EpochEnd):
            raise CheckpointError(f"epoch_end={epoch_end!r}: one of {', '.join(map(repr, get_args(EpochEnd)))}")
        self.batch_size = batch_size
        self._division = Division(
            samples, batch_size, accumulation, rank, num_replicas, epoch_end, seed, shuffle, with_seeds
        )
        if epoch_end == "drop" and self._division.step_samples > samples:
            raise CheckpointError(
                f"{samples} samples are fewer than the {self._division.step_samples} of one step ({num_replicas} ranks "
                f'x {accumulation} x {batch_size}), and epoch_end="drop" would leave all out: choose "carry" or "pad"'
            )
        self._position = 0
        self._iterators: list[ref[HandedOut]] = []
        """Those that may have the batches of the present steps. What is no longer in use has gone."""
        self._outdated: list[ref[HandedOut]] = []
        """Those from before the state was loaded."""

    @property
    def position(self) -> int:
        """Samples that finished steps of all ranks have read, over all epochs; those that were dropped count as
        well."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch of the next step, counted from 0."""
        return self.epoch_after(0)

    def epoch_after(self, steps: int) -> int:
        """The epoch of the step that follows so many more steps."""
        position = self._position
        for _ in range(_whole("steps", steps, 0)):
            position = self._division.after_step(position)
        return self._division.begin(position) // self._division.samples

    def __iter__(self) -> Iterator[list[Any]]:
        """The batches of this rank from the position of the finished steps to the end of the epoch."""
        handed_out = HandedOut(self._division, self._position)
        self._iterators.append(ref(handed_out))
        return handed_out

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch; one step's more than in some epochs if samples are carried over."""
        return self._division.epoch_batches

    def remaining_batches(self) -> int:
        """Batches of this rank that are left in this epoch."""
        return self._division.batches_between(self._position, self._division.end(self._position))

    def by_sample(self) -> "SampleView":
        """The same samples one by one: the `sampler` of a DataLoader with this sampler's `batch_size`."""
        return SampleView(self)

    def finish_steps(self, steps: int = 1) -> None:
        """Count the samples of finished steps. `Checkpoint.step` calls this for the samplers that it keeps.

        Call it for batches that the script has read and makes no step of, on all ranks alike.

        Raises:
            CheckpointError: the steps did not read the batches that the sampler counts for them.
        """
        for _ in range(_whole("steps", steps, 0)):
            self._position = self._division.after_step(self._position)
        if steps:
            self._check_iterators()

    def _check_iterators(self) -> None:
        """Check that some iterator in use can have the batches of the finished steps. Another one may be a peek."""
        live = [iterator for known in self._iterators if (iterator := known()) is not None]
        problems = {iterator: iterator.problem(self._position) for iterator in live}
        fitting = [iterator for iterator, problem in problems.items() if not problem]
        if live and not fitting:
            raise CheckpointError(problems[live[-1]])
        if not live and any(known() is not None for known in self._outdated):
            raise CheckpointError(
                "the batches of this step come from an iterator that was made before the state was restored: call "
                "iter(loader) after restore()"
            )
        self._iterators = [ref(iterator) for iterator in fitting]

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position of. Equal on all ranks."""
        return {
            "position": self._position,
            "samples": self._division.samples,
            "seed": self._division.seed,
            "shuffle": self._division.shuffle,
            "order_version": ORDER_VERSION,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a kept position. The numbers of ranks, batch size and accumulation may differ.

        Raises:
            CheckpointError: it is a position in another order.
        """
        own = self.state_dict()
        for name in ("order_version", "samples", "seed", "shuffle"):
            if state.get(name) != own[name]:
                raise CheckpointError(
                    f"the kept position is one in an order with {name}={state.get(name)}, and this sampler has "
                    f"{name}={own[name]}: go on with the same data set, seed and shuffle, or start without this state"
                )
        self._position = int(state["position"])
        self._outdated, self._iterators = self._outdated + self._iterators, []


class SampleView:
    """The samples of a sampler's batches, one by one."""

    def __init__(self, sampler: ShardedSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        """The samples of this rank from the position of the finished steps to the end of the epoch."""
        return (sample for batch in iter(self.sampler) for sample in batch)

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch; some fewer if the last batch is smaller."""
        return len(self.sampler) * self.sampler.batch_size


def _whole(name: str, value: SupportsIndex, least: int, most: int | None = None) -> int:
    """The value as an int."""
    whole = index(value) if isinstance(value, SupportsIndex) and not isinstance(value, bool) else None
    if whole is None or whole < least or (most is not None and whole > most):
        limit = "or more" if most is None else f"to {most}"
        raise CheckpointError(f"{name}={value!r}: a whole number, {least} {limit}")
    return whole


def _rank_and_world_size() -> tuple[int, int]:
    from muster.checkpoint.training.agreements.process_group import (
        rank_and_world_size,  # imports torch, which no order needs
    )

    return rank_and_world_size()
