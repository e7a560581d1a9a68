"""The sharded sampler: every sample of an epoch is read once, whatever happens to the ranks on the way."""

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.checkpoint import CheckpointError, ShardedSampler
from muster.checkpoint.data import permutation
from muster.checkpoint.data.permutation import MOST_SAMPLES, MOST_SORTED_SAMPLES, Permutation


class Loader:
    """Takes batches before they are asked for, as a DataLoader does: `ahead` at once, then one for each that is
    given."""

    def __init__(self, batches: Iterator[list[int]], ahead: int) -> None:
        self.batches, self.ahead = batches, ahead
        self.fetched: deque[list[int]] = deque()
        for _ in range(ahead):
            self.fetch()

    def fetch(self) -> None:
        self.fetched.extend(batch for batch in [next(self.batches, None)] if batch is not None)

    def next(self) -> list[int] | None:
        if not self.fetched:
            self.fetch()
        if not self.fetched:
            return None
        given_out = self.fetched.popleft()
        if self.ahead:
            self.fetch()
        return given_out


@dataclass(frozen=True)
class Generation:
    """Ranks that train for some steps; the last ones are lost with them."""

    world: int
    batch: int = 1
    accumulation: int = 1
    steps: int = 1
    lost: int = 0
    ahead: int = 0


@dataclass
class Run:
    """What the kept steps of a training run have read. `epochs`: how often each sample was read, by epoch."""

    samples: int
    epoch_end: Any
    state: dict[str, Any] | None = None
    epochs: dict[int, Counter[int]] = field(default_factory=dict)

    def go_on(self, generation: Generation) -> None:
        """One generation, from the newest kept step."""
        samplers = [self.sampler(rank, generation) for rank in range(generation.world)]
        for sampler in samplers:
            if self.state is not None:
                sampler.load_state_dict(self.state)
        loaders: list[Loader] = []
        for step in range(generation.steps):
            begun = samplers[0].epoch
            read: list[int] = []
            for micro_batch in range(generation.accumulation):
                found = [loader.next() for loader in loaders]
                if not any(found) and micro_batch == 0:
                    loaders = [Loader(iter(sampler), generation.ahead) for sampler in samplers]
                    found = [loader.next() for loader in loaders]
                assert len({len(batch or ()) for batch in found}) == 1, "ranks got different numbers of samples"
                read += [sample for batch in found for sample in batch or ()]
            for sampler in samplers:
                sampler.finish_steps()
            states = [sampler.state_dict() for sampler in samplers]
            assert all(state == states[0] for state in states), "ranks disagree"
            if step < generation.steps - generation.lost:
                self.state = states[0]
                self.epochs.setdefault(begun, Counter()).update(read)

    def sampler(self, rank: int, generation: Generation) -> ShardedSampler:
        return ShardedSampler(
            self.samples,
            batch_size=generation.batch,
            accumulation=generation.accumulation,
            seed=3,
            epoch_end=self.epoch_end,
            rank=rank,
            num_replicas=generation.world,
        )


GENERATIONS = st.builds(
    Generation,
    world=st.integers(1, 6),
    batch=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    steps=st.integers(1, 6),
    lost=st.integers(0, 2),
    ahead=st.integers(0, 5),
)
RUNS = st.lists(GENERATIONS, min_size=2, max_size=5)


@given(st.integers(1, 60), RUNS)
def test_with_samples_carried_over_each_is_read_once_an_epoch(samples: int, generations: list[Generation]) -> None:
    run = Run(samples, "carry")
    for generation in generations:
        run.go_on(generation)
    read = sum(run.epochs.values(), Counter())
    position = run.state["position"] if run.state else 0
    whole, rest = divmod(position, samples)
    assert read.total() == position
    assert Counter(read[sample] for sample in range(samples)) == +Counter({whole: samples - rest, whole + 1: rest})


@given(st.integers(72, 200), RUNS)
def test_with_samples_dropped_none_is_read_twice_and_less_than_a_step_is_left_out(
    samples: int, generations: list[Generation]
) -> None:
    run = Run(samples, "drop")
    for generation in generations:
        run.go_on(generation)
    largest_step = max(g.world * g.batch * g.accumulation for g in generations)
    ended = run.state["position"] // samples if run.state else 0
    for epoch, read in run.epochs.items():
        assert max(read.values()) == 1
        assert read.total() > samples - largest_step or epoch == ended


@given(st.integers(1, 60), RUNS)
def test_with_padding_fewer_samples_than_ranks_are_read_twice(samples: int, generations: list[Generation]) -> None:
    run = Run(samples, "pad")
    for generation in generations:
        run.go_on(generation)
    ended = run.state["position"] // samples if run.state else 0
    most = max(g.world for g in generations)
    for epoch, read in run.epochs.items():
        assert read.total() - len(read) < max(most, 1)
        assert len(read) == samples or epoch == ended
        assert epoch == ended or samples < most or max(read.values()) <= 2


@pytest.mark.parametrize("ahead", [0, 7])
@pytest.mark.parametrize("samples", [1000, MOST_SORTED_SAMPLES + 1000])
def test_each_sample_is_read_once_through_two_shrinks_and_a_growth(samples: int, ahead: int) -> None:
    run = Run(samples, "carry")
    steps = samples // (8 * 32)
    for world in (8, 7, 5, 8):
        run.go_on(Generation(world=world, batch=32, steps=steps // 3 + 2, lost=2, ahead=ahead))
    run.go_on(Generation(world=8, batch=32, steps=steps, ahead=ahead))
    assert run.state is not None
    assert run.state["position"] >= samples
    assert set(sum(run.epochs.values(), Counter())) == set(range(samples))
    first_epoch: Counter[int] = run.epochs[0]
    assert first_epoch.total() - len(first_epoch) < 8 * 32, "only the last step's samples are those of the next epoch"


def test_steps_of_one_size_read_the_same_samples_in_any_number_of_ranks() -> None:
    def step(world: int, batch: int, accumulation: int) -> set[int]:
        run = Run(100, "carry")
        run.go_on(Generation(world=world, batch=batch, accumulation=accumulation))
        return set(run.epochs[0])

    assert step(8, 2, 1) == step(4, 4, 1) == step(4, 2, 2) == step(1, 1, 16)


def test_the_order_never_changes_from_version_to_version() -> None:
    """Kept positions are positions in this order. If this fails, ORDER_VERSION has to grow."""
    assert permutation.ORDER_VERSION == 1
    assert Permutation(10, 0, 0).samples_at(np.arange(10)).tolist() == [3, 8, 9, 4, 7, 6, 0, 2, 1, 5]
    assert Permutation(10**6, 7, 3).samples_at(np.arange(5)).tolist() == [147068, 275260, 559138, 392546, 299070]
    last = Permutation(MOST_SAMPLES, 2**64 - 1, 2**40).samples_at(np.array([MOST_SAMPLES - 1])).tolist()
    assert last == [126208719373144]


@given(st.integers(0, 2000), st.integers(0, 2**64 - 1), st.integers(0, 2**32))
def test_an_order_is_a_permutation(more: int, seed: int, epoch: int) -> None:
    for samples in (1 + more, MOST_SORTED_SAMPLES + 1 + more):
        found = Permutation(samples, seed, epoch).samples_at(np.arange(samples))
        assert np.array_equal(np.sort(found), np.arange(samples))


@pytest.mark.parametrize("samples", [2000, MOST_SORTED_SAMPLES + 1])
def test_orders_look_random(samples: int) -> None:
    """Neighbours are not correlated, nor are epochs or seeds; one sample in expectation stays at its place."""
    orders = [Permutation(samples, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    found = [order.samples_at(np.arange(samples)) for order in orders]
    noise = 5 / math.sqrt(samples)
    for order in found:
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < noise
        assert np.count_nonzero(order == np.arange(samples)) < 10
        assert np.count_nonzero(np.diff(order) == 1) < 10
    for number, order in enumerate(found):
        for other in found[:number]:
            assert abs(np.corrcoef(order, other)[0, 1]) < noise
            assert np.count_nonzero(order == other) < 10


def test_the_cipher_spreads_each_sample_over_all_places() -> None:
    """Chi-squared of where three samples of 70,000 lie in 4,096 orders, in 16 equal parts."""
    samples, orders, parts = 70_000, 4096, 16
    places = np.stack([Permutation(samples, 1, e).samples_at(np.array([0, 1, samples - 1])) for e in range(orders)])
    for place in places.T:
        seen = np.bincount(place * parts // samples, minlength=parts)
        expected = orders / parts
        assert ((seen - expected) ** 2 / expected).sum() < 44, "p < 0.0001 for 15 degrees of freedom"


def test_without_shuffling_samples_come_in_their_own_order() -> None:
    sampler = ShardedSampler(range(10), batch_size=2, shuffle=False, rank=1, num_replicas=2)
    assert list(sampler) == [[2, 3], [6, 7], [0, 1]]


@pytest.mark.parametrize("epoch_end", ["carry", "pad"])
def test_a_samples_own_seed_follows_from_its_position(epoch_end: Any) -> None:
    """Whatever the ranks are, and whether or not the order is shuffled."""

    def pairs(world: int, batch: int, **options: Any) -> list[tuple[int, int]]:
        ranks = [
            ShardedSampler(20, batch_size=batch, epoch_end=epoch_end, rank=r, num_replicas=world, seed=5, **options)
            for r in range(world)
        ]
        return [pair for batches in zip(*ranks, strict=True) for batch in batches for pair in batch][:20]

    shuffled = pairs(1, 5, with_seeds=True)
    assert shuffled == pairs(5, 2, with_seeds=True) == pairs(3, 3, with_seeds=True)
    assert [sample for sample, _ in shuffled] == pairs(1, 5)
    assert [seed for _, seed in pairs(2, 5, with_seeds=True, shuffle=False)] == [seed for _, seed in shuffled]
    assert len({seed for _, seed in shuffled}) == 20
    assert all(0 <= seed < 2**63 for _, seed in shuffled)


def test_the_seeds_of_another_epoch_are_others() -> None:
    sampler = ShardedSampler(4, batch_size=4, with_seeds=True, rank=0, num_replicas=1)
    first = dict(next(iter(sampler)))
    sampler.finish_steps()
    second = dict(next(iter(sampler)))
    assert first.keys() == second.keys() == set(range(4))
    assert not set(first.values()) & set(second.values())
    golden = {0: 9180893390338439306, 1: 8656270604905167883, 2: 3571458680210446991, 3: 150207072870977559}
    assert first == golden, "equal from version to version"


def test_samples_one_by_one_are_those_of_the_batches() -> None:
    sampler = ShardedSampler(50, batch_size=4, rank=1, num_replicas=3)
    assert list(sampler.by_sample()) == [sample for batch in sampler for sample in batch]
    assert len(sampler.by_sample()) == len(sampler) * 4 == 20


def test_the_lengths_are_those_of_an_epoch_and_of_what_is_left_of_it() -> None:
    for epoch_end, batches, left in (("carry", 4, 2), ("drop", 2, 2), ("pad", 3, 1)):
        sampler = Run(26, epoch_end).sampler(0, Generation(world=2, batch=5, accumulation=2))
        assert len(sampler) == sampler.remaining_batches() == len(list(sampler)) == batches, epoch_end
        sampler.finish_steps()
        assert len(sampler) == batches
        assert sampler.remaining_batches() == len(list(sampler)) == left, epoch_end


def read_steps(sampler: ShardedSampler, steps: int, batches: int = 1, ahead: int = 0) -> None:
    """A script whose steps read so many batches."""
    loader = Loader(iter(sampler), ahead)
    for _ in range(steps):
        for _ in range(batches):
            loader.next()
        sampler.finish_steps()


@pytest.mark.parametrize("ahead", [0, 3, 50])
def test_a_step_that_reads_more_batches_than_the_sampler_counts_is_an_error(ahead: int) -> None:
    sampler = ShardedSampler(1000, batch_size=2, rank=0, num_replicas=2)
    with pytest.raises(
        CheckpointError, match=r"has read 3 batches more than the sampler counts for it \(1 batches of 2 samples"
    ):
        read_steps(sampler, 2, batches=4, ahead=ahead)


def test_a_step_that_reads_fewer_batches_than_the_sampler_counts_is_an_error() -> None:
    sampler = ShardedSampler(1000, batch_size=2, accumulation=4, rank=0, num_replicas=2)
    with pytest.raises(CheckpointError, match="the sampler counts 4 batches of 2 samples for a step"):
        read_steps(sampler, 3, batches=2)
    sampler = ShardedSampler(10, batch_size=2, rank=0, num_replicas=1)
    batches = iter(sampler)
    next(batches)
    with pytest.raises(CheckpointError, match="have read fewer"):
        sampler.finish_steps(7)
    sampler = ShardedSampler(10, batch_size=2, rank=0, num_replicas=1)
    with pytest.raises(CheckpointError, match="have read fewer"):
        read_steps(sampler, 6)  # there are five


def test_a_batch_that_makes_no_step_is_counted_when_the_script_says_so() -> None:
    sampler = ShardedSampler(1000, batch_size=2, rank=0, num_replicas=2)
    loader = Loader(iter(sampler), ahead=3)
    for number in range(20):
        loader.next()
        sampler.finish_steps()  # of every other batch the script makes a step
        assert sampler.position == 4 * (number + 1)


def test_a_peek_beside_the_training_is_no_error() -> None:
    sampler = ShardedSampler(1000, batch_size=2, rank=0, num_replicas=1)
    batches = Loader(iter(sampler), ahead=3)
    for step in range(30):
        batches.next()
        if step in (0, 7):
            peek = Loader(iter(sampler), ahead=2)
            assert peek.next() == Loader(iter(sampler), ahead=0).next()
        sampler.finish_steps()
    batches.next(), batches.next()
    with pytest.raises(CheckpointError, match="has read 1 batches more"):
        sampler.finish_steps()


def test_an_iterator_from_before_the_restore_is_refused() -> None:
    sampler = ShardedSampler(100, batch_size=2, rank=0, num_replicas=1)
    old = iter(sampler)
    next(old)
    sampler.load_state_dict({**sampler.state_dict(), "position": 40})
    with pytest.raises(CheckpointError, match="before the state was restored"):
        sampler.finish_steps()
    sampler = ShardedSampler(100, batch_size=2, rank=0, num_replicas=1)
    next(iter(sampler))  # for the warmup
    sampler.load_state_dict({**sampler.state_dict(), "position": 40})
    sampler.finish_steps()
    assert sampler.position == 42


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"data": 99}, "samples=100, and this sampler has samples=99"),
        ({"seed": 5}, "seed=0, and this sampler has seed=5"),
        ({"shuffle": False}, "shuffle=True, and this sampler has shuffle=False"),
    ],
)
def test_a_position_in_another_order_is_refused(other: dict[str, Any], words: str) -> None:
    usual: dict[str, Any] = {"data": 100, "batch_size": 2, "rank": 0, "num_replicas": 1}
    state = ShardedSampler(**usual).state_dict()
    with pytest.raises(CheckpointError, match=words):
        ShardedSampler(**{**usual, **other}).load_state_dict(state)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"data": []}, "samples=0: a whole number, 1 to"),
        ({"batch_size": 0}, "batch_size=0: a whole number, 1 or more"),
        ({"batch_size": 2.0}, "batch_size=2.0"),
        ({"accumulation": True}, "accumulation=True"),
        ({"seed": -1}, "seed=-1"),
        ({"rank": 4}, "rank=4: a whole number, 0 to 3"),
        ({"rank": None}, "rank and num_replicas belong together"),
        ({"epoch_end": "keep"}, "epoch_end='keep': one of 'carry', 'drop', 'pad'"),
        ({"epoch_end": "drop", "data": 7}, "7 samples are fewer than the 8 of one step"),
    ],
)
def test_bad_values_are_named(bad: dict[str, Any], words: str) -> None:
    usual: dict[str, Any] = {"data": 100, "batch_size": 2, "rank": 0, "num_replicas": 4}
    with pytest.raises(CheckpointError, match=words):
        ShardedSampler(**{**usual, **bad})


@pytest.mark.parametrize("epoch_end", ["carry", "drop", "pad"])
def test_the_epoch_after_further_steps_is_foreseen(epoch_end: Any) -> None:
    sampler = ShardedSampler(22, batch_size=4, accumulation=2, epoch_end=epoch_end, rank=0, num_replicas=1)
    foreseen = [sampler.epoch_after(steps) for steps in range(8)]
    found = []
    for _ in foreseen:
        found.append(sampler.epoch)
        sampler.finish_steps()
    assert foreseen == found
    assert found[-1] in (2, 3)
