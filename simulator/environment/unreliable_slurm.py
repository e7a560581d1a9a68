"""A Slurm that may fail, answer late or not answer.

The in-memory cluster behind it follows the rules measured on Slurm.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

from muster.slurm.client.errors import SlurmTimeout, SlurmUnavailable
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.slurm.client.types import JobAnswers, NodeAnswers, Unknown

_T = TypeVar("_T")


def run_without_waiting(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that never waits.

    Raises:
        RuntimeError: the coroutine waits.
    """
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    work.close()
    raise RuntimeError("this coroutine waits: it can't run in virtual time")


@coroutine
def _wait_once() -> Generator[None]:
    yield


class UnreliableSlurm(FakeSlurm):
    """Commands that may fail.

    `error_rate`: the probability that a command fails with an error other than a refusal. In half of these cases Slurm
    has executed the command. `max_delay_s`: the longest time until an answer comes, in seconds.
    """

    def __init__(self, cluster: FakeCluster, rng: random.Random) -> None:
        super().__init__(cluster)
        self._rng = rng
        self.error_rate = 0.0
        self.max_delay_s = 0.05

    async def run_unreliably(self, work: Coroutine[Any, Any, None]) -> None:
        """Execute a command or not, and report its result or an error.

        Raises:
            SlurmError: the command failed, or the simulator decided to report a failure.
        """
        fails = self._rng.random() < self.error_rate
        if fails and self._rng.random() < 0.5:
            work.close()
            raise SlurmUnavailable("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
        await work
        if fails:
            raise SlurmTimeout("Socket timed out on send/recv operation")


class DelayedSlurm:
    """The answers of an UnreliableSlurm, delivered late.

    An answer shows the state at the time it was given, and it may be lost. Each coroutine waits once; the caller
    decides for how long.
    """

    def __init__(self, slurm: UnreliableSlurm, rng: random.Random) -> None:
        self._slurm = slurm
        self._rng = rng

    async def jobs(self, ids: Collection[int] | None = None, *, in_doubt: Collection[int] = ()) -> JobAnswers | Unknown:
        """See Slurm.jobs."""
        return await self._delayed(await self._slurm.jobs(ids))

    async def nodes(self, names: Collection[str] | None = None) -> NodeAnswers | Unknown:
        """See Slurm.nodes."""
        return await self._delayed(await self._slurm.nodes(names))

    async def _delayed(self, answer: _T) -> _T | Unknown:
        await _wait_once()
        lost = self._slurm.error_rate > 0 and self._rng.random() < self._slurm.error_rate
        return Unknown("the answer was lost") if lost else answer
