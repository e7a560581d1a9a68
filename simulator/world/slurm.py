"""A Slurm that may be mute, late or wrong, over the in-memory cluster with its measured rules.

Its jobs start agents, its kills end them, its batch scripts end when their gang has.
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


def drive(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that never waits.

    Raises:
        RuntimeError: it does wait.
    """
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    work.close()
    raise RuntimeError("this coroutine waits: it can't run in virtual time")


@coroutine
def _on_its_way() -> Generator[None]:
    yield


class CapriciousSlurm(FakeSlurm):
    """FakeSlurm with whims. `wrong`: the chance that a command fails with an error that is no refusal, half of the
    time after it was carried out; `late_s`: how long an answer takes at most."""

    def __init__(self, cluster: FakeCluster, chance: random.Random) -> None:
        super().__init__(cluster)
        self._chance = chance
        self.wrong = 0.0
        self.late_s = 0.05

    async def whim(self, work: Coroutine[Any, Any, None]) -> None:
        """Carry out a command, or not; tell the truth about it, or not.

        Raises:
            SlurmError: as the command does, or by whim.
        """
        trouble = self._chance.random() < self.wrong
        if trouble and self._chance.random() < 0.5:
            work.close()
            raise SlurmUnavailable("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
        await work
        if trouble:
            raise SlurmTimeout("Socket timed out on send/recv operation")


class DistantSlurm:
    """What a CapriciousSlurm says when it is asked, where each answer is on its way for a while: it tells what was when
    it was given, and may be lost. The coroutines wait once; who drives them says for how long."""

    def __init__(self, near: CapriciousSlurm, chance: random.Random) -> None:
        self._near = near
        self._chance = chance

    async def jobs(self, ids: Collection[int] | None = None) -> JobAnswers | Unknown:
        """See Slurm.jobs."""
        return await self._arrives(await self._near.jobs(ids))

    async def nodes(self, names: Collection[str] | None = None) -> NodeAnswers | Unknown:
        """See Slurm.nodes."""
        return await self._arrives(await self._near.nodes(names))

    async def _arrives(self, answer: _T) -> _T | Unknown:
        await _on_its_way()
        lost = self._near.wrong > 0 and self._chance.random() < self._near.wrong
        return Unknown("the answer was lost") if lost else answer
