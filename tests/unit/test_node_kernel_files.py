"""Files of the kernel: what is believed of them, how counters grow, and a read that hangs."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.daemon.node.sysfs.counter_growth import CounterGrowth
from muster.daemon.node.sysfs.kernel_files import Unreadable, names, read_count, read_text
from muster.daemon.node.sysfs.reader_thread import ReaderThread, ReadHangs


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "half written"),
        (b"12", "half written"),
        (b"-1\n", "not a count"),
        (b"1e3\n", "not a count"),
        (b"12 13\n", "not a count"),
        ("١\n".encode(), "not a count"),
        (b"18446744073709551616\n", "not a count"),
        (b"\xff\xfe\n", "not text"),
        (b"1\n" * 4096, "too long"),
        (b"N/A (no PMA)\n", "N/A"),
    ],
)
def test_a_file_without_a_whole_value_is_unreadable(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "count").write_bytes(content)
    with pytest.raises(Unreadable, match=words):
        read_count(tmp_path / "count")


def test_a_missing_file_is_told_from_one_that_fails(tmp_path: Path) -> None:
    with pytest.raises(Unreadable) as absent:
        read_text(tmp_path / "absent")
    assert absent.value.missing
    with pytest.raises(Unreadable) as folder:
        read_text(tmp_path)
    assert not folder.value.missing


def test_a_fifo_in_a_files_place_holds_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "count")
    with pytest.raises(Unreadable, match="half written"):
        read_count(tmp_path / "count")


def test_only_plain_names_are_listed_and_not_too_many(tmp_path: Path) -> None:
    for name in ("mlx5_2", "mlx5_10", "a b", "\udcff", "x" * 65, "-"):
        (tmp_path / name).touch()
    assert names(tmp_path, r".*", 10) == ["mlx5_10", "mlx5_2"]
    assert names(tmp_path, r".*", 1) == ["mlx5_10"]


def _growths(*values: int | None, most_per_s: float = 1000.0) -> list[int]:
    counter = CounterGrowth(most_per_s)
    growths = [counter.next(value, float(at)) for at, value in enumerate((*values, *values[-1:]))]
    return [growth.amount for growth in growths if growth and growth.amount]


@pytest.mark.parametrize(
    ("values", "growths"),
    [
        ((5, 5, 5), []),
        ((5, 7, 7, 10), [2, 3]),
        ((5, None, 7), [2]),
        ((1234, 12, 1234, 1234), []),  # half written, with a line end
        ((1234, 0, 0, 3), [3]),  # a reset
        ((1234, 0, 3, 4), [1]),  # the step after a jump counts for nothing
        ((2**32 - 5, 3, 3, 4), [1]),  # a wrap
        ((5, 900_000, 900_000, 900_001), [1]),  # faster than is possible
        ((5, 600, 5, 5), []),  # the next reading does not confirm it
        ((254, 255, 255, 255), []),  # stuck at its largest value
        ((65_530, 65_535, 65_540), [10]),
        ((2**64 - 2, 2**64 - 1, 0), []),
    ],
)
def test_a_counter_grows_only_when_the_next_reading_confirms_it(
    values: tuple[int | None, ...], growths: list[int]
) -> None:
    assert _growths(*values) == growths


@given(st.lists(st.none() | st.integers(0, 2**64), max_size=20))
def test_a_growth_is_never_negative_or_impossible(values: list[int | None]) -> None:
    assert all(0 < amount <= 2000 * len(values) for amount in _growths(*values, most_per_s=2000.0))


@pytest.mark.parametrize("time", [0.0, -5.0])
def test_a_clock_that_stands_still_gives_no_growth(time: float) -> None:
    counter = CounterGrowth(1000.0)
    counter.next(1, 0.0)
    assert counter.next(2, time) is None


async def test_a_read_that_hangs_is_given_up_and_no_second_one_is_started() -> None:
    release, calls = threading.Event(), 0

    def work() -> int:
        nonlocal calls
        calls += 1
        release.wait()
        return calls

    reader = ReaderThread(work, deadline_s=0.01)
    for _ in range(3):
        with pytest.raises(ReadHangs):
            await reader.read()
    release.set()
    patient = asyncio.create_task(_until_it_answers(reader))
    assert await patient == 1
    assert await _until_it_answers(reader) == 2


async def _until_it_answers(reader: ReaderThread[int]) -> int:
    while True:
        try:
            return await reader.read()
        except ReadHangs:
            continue


async def test_one_thread_reads_and_ends_when_it_is_closed() -> None:
    reader = ReaderThread(threading.current_thread, deadline_s=60)
    first = await reader.read()
    assert await reader.read() is first
    reader.close()
    await asyncio.to_thread(first.join)
    assert await reader.read() is not first
    reader.close()


async def test_an_error_of_the_read_is_raised() -> None:
    def work() -> None:
        raise Unreadable("garbage")

    with pytest.raises(Unreadable, match="garbage"):
        await ReaderThread(work, deadline_s=60).read()
