"""Blocks of step times, as an agent reports them for a rank."""

from muster.checkpoint.store.block_times import StepBlocks
from muster.v1.rank_pb2 import StepTime


def fed(*steps: int) -> StepBlocks:
    blocks = StepBlocks()
    for step in steps:
        blocks.add(StepTime(step=step, compute_us=100 * step, wait_us=step))
    return blocks


def blocks_of(steps: StepBlocks) -> tuple[int, list[int], list[int]] | None:
    times = steps.times()
    return (times.first_block, list(times.compute_us), list(times.wait_us)) if times is not None else None


def test_a_block_is_reported_when_it_has_all_its_steps() -> None:
    assert blocks_of(fed(1, 2, 3)) is None
    assert blocks_of(fed(1, 2, 3, 4, 5)) == (0, [250], [2])


def test_the_wait_for_data_is_reported_if_it_is_declared() -> None:
    blocks = StepBlocks()
    for step in range(1, 9):
        blocks.add(StepTime(step=step, compute_us=100, wait_us=1, fetch_us=40 if step > 4 else 0))
    times = blocks.times()
    assert times is not None
    assert list(times.fetch_us) == [0, 40]
    without = fed(1, 2, 3, 4).times()
    assert without is not None
    assert list(without.fetch_us) == []


def test_a_run_that_starts_within_a_block_has_the_blocks_of_all_others() -> None:
    assert blocks_of(fed(*range(7, 13))) == (2, [1050], [10])


def test_one_slow_step_does_not_count() -> None:
    blocks = fed(1, 2, 3)
    blocks.add(StepTime(step=4, compute_us=1_000_000, wait_us=0))
    assert blocks_of(blocks) == (0, [250], [1])


def test_the_newest_blocks_are_kept() -> None:
    found = blocks_of(fed(*range(1, 401)))
    assert found is not None
    assert (found[0], len(found[1]), len(found[2])) == (92, 8, 8)


def test_a_step_that_was_not_measured_leaves_its_block_out_and_what_was_before() -> None:
    assert blocks_of(fed(1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12)) == (2, [1050], [10])


def test_steps_that_come_twice_or_late_and_step_0_change_nothing() -> None:
    assert blocks_of(fed(0, 1, 2, 2, 3, 4, 4, 1, 2, 3, 4, 3)) == (0, [250], [2])
