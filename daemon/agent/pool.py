"""Nodes of the site's shared pool: this agent asks Slurm for them, as the job's user, where its orders say so.

Each is a small job of one node, and its agent joins this gang. A request is made once, however often the order comes;
what Slurm said stands in every status from then on.
"""

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from muster.daemon import clock
from muster.launcher.script import PoolJob, render_pool
from muster.slurm.client.errors import SlurmError
from muster.v1.agent_pb2 import PoolAnswer, PoolRequest

log = logging.getLogger(__name__)

SBATCH_S = 20.0
_OF_A_JOB = ("SLURM", "SBATCH", "MUSTER_")
"""Prefixes of variables that belong to the job at hand."""


class Sbatch(Protocol):
    """What is needed of the Slurm client."""

    async def submit(self, script: Path, *, cwd: Path, env: Mapping[str, str] | None, deadline: float) -> int:
        """See muster.slurm.client.types.Slurm."""
        ...


@dataclass(frozen=True, slots=True)
class Terms:
    """What every request has in common. `ends_at`: when the gang's own job comes to its time limit, in Unix seconds;
    None: it has none."""

    job: PoolJob
    ends_at: float | None
    environ: Mapping[str, str]


class Pool:
    """The requests of one agent.

    Args:
        sbatch: Slurm, as this user.
        changed: called when `answers` has something new to say.
    """

    def __init__(self, terms: Terms, sbatch: Sbatch, changed: Callable[[], None]) -> None:
        self._terms = terms
        self._sbatch = sbatch
        self._changed = changed
        self._answers: dict[int, PoolAnswer | None] = {}

    def answers(self) -> list[PoolAnswer]:
        """What Slurm has said so far."""
        return [answer for answer in self._answers.values() if answer is not None]

    def unasked(self, requests: Iterable[PoolRequest]) -> list[PoolRequest]:
        """Those of `requests` that are new; each is given out once, to be asked."""
        new = [request for request in requests if request.serial not in self._answers]
        self._answers.update({request.serial: None for request in new})
        return new

    async def ask(self, request: PoolRequest) -> None:
        """Submit the small job."""
        try:
            number = await self._submit(request)
            answer = PoolAnswer(serial=request.serial, slurm_job_id=number)
            log.info("request %d for a node of the shared pool is job %d", request.serial, number)
        except (SlurmError, OSError) as error:
            answer = PoolAnswer(serial=request.serial, error=f"no node of the shared pool: {error}")
            log.error("%s", answer.error)
        self._answers[request.serial] = answer
        self._changed()

    async def _submit(self, request: PoolRequest) -> int:
        terms = self._terms
        folder = Path(terms.job.spec.run_dir)
        path = folder / f"{terms.job.gang}-pool{request.serial}.sbatch"
        text = render_pool(terms.job, request.serial, request.options, self._minutes())
        await asyncio.to_thread(path.write_text, text)
        environ = {name: value for name, value in terms.environ.items() if not name.startswith(_OF_A_JOB)}
        return await self._sbatch.submit(path, cwd=folder, env=environ, deadline=SBATCH_S)

    def _minutes(self) -> int | None:
        ends_at = self._terms.ends_at
        return None if ends_at is None else max(1, math.ceil((ends_at - clock.wall()) / 60))


def ends_at(environ: Mapping[str, str] = os.environ) -> float | None:
    """When Slurm ends the job that this process belongs to, in Unix seconds; None: not known, or never."""
    text = environ.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isdigit() and 0 < int(text) < _NEVER else None


_NEVER = 2**32 - 2
