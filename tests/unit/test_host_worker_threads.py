"""Work in parts, for several threads."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from muster.daemon.host.worker_threads import WorkerThreads, run_in_own_thread


@pytest.mark.parametrize(
    ("count", "least", "parts"),
    [
        (0, 4, []),
        (3, 4, [range(3)]),
        (9, 4, [range(4), range(4, 8), range(8, 9)]),
        (100, 4, [range(34), range(34, 68), range(68, 100)]),
    ],
)
def test_the_parts_cover_all_numbers_once_and_come_back_in_order(count: int, least: int, parts: list[range]) -> None:
    threads = WorkerThreads(3)
    assert asyncio.run(threads.in_parts(lambda part: part, count, least)) == parts
    threads.close()


def test_the_parts_run_at_the_same_time() -> None:
    threads, meet = WorkerThreads(3), threading.Barrier(3)
    assert sorted(asyncio.run(threads.in_parts(lambda _: meet.wait(60), 3, 1))) == [0, 1, 2]
    threads.close()


async def test_work_is_awaited_to_its_end_although_its_caller_is_cancelled() -> None:
    threads, begun, may_end, ended = WorkerThreads(1), threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait()
        ended.set()

    caller = asyncio.ensure_future(threads.to_the_end(work))
    assert await asyncio.to_thread(begun.wait, 60)
    for _ in range(3):
        caller.cancel()
        await asyncio.wait({caller}, timeout=0.001)
        assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()
    threads.close()


@pytest.mark.parametrize(("call", "raised"), [(lambda: int("x"), ValueError), (lambda: next(iter(())), RuntimeError)])
async def test_whoever_awaits_a_thread_hears_of_every_error(call: Callable[[], int], raised: type[Exception]) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(raised):
            await run_in_own_thread(call, "fails")
