"""Threads for work that would block the event loop: digests, copies of memory, files; questions to other services."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class WorkerThreads:
    """A small pool of threads."""

    def __init__(self, threads: int = 4) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="keeper")

    async def __call__(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in a thread and wait for its result."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args, **kwargs))

    async def to_the_end(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in a thread, to its end even if this is cancelled: the caller frees what `work` uses."""
        running = asyncio.ensure_future(self(work, *args, **kwargs))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({running})
            raise

    async def in_parts(self, work: Callable[[range], T], count: int, least: int) -> list[T]:
        """Run `work` on the numbers below `count` in parts, one for each thread, and wait for all of them.

        Returns:
            What the parts return, in the order of the numbers. A part has `least` numbers or more, but for the last.
        """
        size = max(least, -(-count // self._threads))
        parts = [range(start, min(start + size, count)) for start in range(0, count, size)]
        return await asyncio.gather(*(self(work, part) for part in parts))

    def close(self) -> None:
        """Accept no more work; running work continues to its end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


async def run_in_own_thread(call: Callable[[], T], name: str) -> T:
    """What `call` returns, which may block for very long: the end of the process does not wait for its thread. Whoever
    is cancelled meanwhile leaves the thread behind.

    Raises:
        Exception: `call` has raised it.
    """
    loop, ended, answer = asyncio.get_running_loop(), asyncio.Event(), Future[T]()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001  # whatever it is, somebody waits for the end
            answer.set_exception(error)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=work, name=name, daemon=True).start()
    await ended.wait()
    return answer.result()
