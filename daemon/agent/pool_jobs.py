"""Nodes of the site's shared pool: this agent asks Slurm for them, as the job's user, where its orders say so.

Each is a small job of one node, and its agent joins this gang. A request is made once, however often the order comes;
what Slurm said stands in every status from then on.
"""

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from muster.daemon.host import clock
from muster.slurm.client.batch_script import PoolJob, render_pool_script
from muster.slurm.client.errors import SlurmError
from muster.v1.agent_pb2 import PoolAnswer, PoolRequest

log = logging.getLogger(__name__)

SBATCH_TIMEOUT_S = 120.0
_CANCEL_S = 20.0
_NEVER = 2**32 - 2
"""Slurm's end of a job without a time limit."""
_OF_A_JOB = ("SLURM", "SBATCH", "MUSTER_")
"""Prefixes of variables that belong to the job at hand, ..."""
_OF_THE_SITE = frozenset({"SLURM_CONF", "MUSTER_CONFIG", "MUSTER_AUTH"})
"""... but for these."""
_AS_THE_JOB = {
    "--partition": "SLURM_JOB_PARTITION",
    "--account": "SLURM_JOB_ACCOUNT",
    "--qos": "SLURM_JOB_QOS",
}
"""What the small job has in common with the job at hand where nothing else is said."""


class JobSubmitter(Protocol):
    """What is needed of the Slurm client."""

    async def submit(self, script: Path, *, cwd: Path, env: Mapping[str, str] | None, timeout_s: float) -> int:
        """See muster.slurm.client.types.Slurm."""
        ...

    async def cancel(self, job: int, *, timeout_s: float) -> None:
        """See muster.slurm.client.types.Slurm."""
        ...


@dataclass(frozen=True, slots=True)
class PoolRequestDefaults:
    """The values that all requests share. `ends_at`: Unix seconds at which the gang's own job reaches its time limit;
    None: the job has no time limit."""

    job: PoolJob
    ends_at: float | None
    environ: Mapping[str, str]


class PoolRequests:
    """The requests of one agent.

    Args:
        sbatch: Slurm, as this user.
        changed: called when `answers` has something new to say.
    """

    def __init__(self, terms: PoolRequestDefaults, sbatch: JobSubmitter, changed: Callable[[], None]) -> None:
        self._terms = terms
        self._sbatch = sbatch
        self._changed = changed
        self._answers: dict[int, PoolAnswer | None] = {}
        self._named: set[int] = set()

    def answers(self) -> list[PoolAnswer]:
        """What Slurm has said so far."""
        return [answer for answer in self._answers.values() if answer is not None]

    def new_requests(self, requests: Sequence[PoolRequest]) -> list[PoolRequest]:
        """Those of `requests`, all that the newest order names, that are new; each is given out once, to be asked."""
        self._named = {request.serial for request in requests}
        new = [request for request in requests if request.serial not in self._answers]
        self._answers.update({request.serial: None for request in new})
        return new

    async def submit(self, request: PoolRequest) -> None:
        """Submit the small job."""
        try:
            number = await self._submit(request)
            if request.serial not in self._named:
                await self._take_back(number)
                return
            answer = PoolAnswer(serial=request.serial, slurm_job_id=number)
            log.info("request %d for a node of the shared pool is job %d", request.serial, number)
        except (SlurmError, OSError) as error:
            answer = PoolAnswer(serial=request.serial, error=f"no node of the shared pool: {error}")
            log.error("%s", answer.error)
        self._answers[request.serial] = answer
        self._changed()

    async def _take_back(self, number: int) -> None:
        """Slurm took its time, and the request is over: nobody else knows of the job."""
        log.info("job %d, for a node of the shared pool, is wanted no more", number)
        await self._sbatch.cancel(number, timeout_s=_CANCEL_S)

    async def _submit(self, request: PoolRequest) -> int:
        terms = self._terms
        folder = Path(terms.job.spec.run_dir)
        path = folder / f"{terms.job.gang}-pool{request.serial}.sbatch"
        text = render_pool_script(
            terms.job, request.serial, [*self._as_the_job(request), *request.options], self._minutes()
        )
        await asyncio.to_thread(path.write_text, text, "utf-8")
        environ = {
            name: value
            for name, value in terms.environ.items()
            if name in _OF_THE_SITE or not name.startswith(_OF_A_JOB)
        }
        return await self._sbatch.submit(path, cwd=folder, env=environ, timeout_s=SBATCH_TIMEOUT_S)

    def _as_the_job(self, request: PoolRequest) -> Iterator[str]:
        given = {option.partition("=")[0] for option in (*self._terms.job.spec.node_options, *request.options)}
        for key, name in _AS_THE_JOB.items():
            if key not in given and (value := self._terms.environ.get(name)):
                yield f"{key}={value}"

    def _minutes(self) -> int | None:
        """None also where the job has outlived the end that it started with: that was put off since."""
        ends_at = self._terms.ends_at
        left = 0 if ends_at is None else math.ceil((ends_at - clock.wall()) / 60)
        return left if left > 0 else None


def job_end_time(environ: Mapping[str, str] = os.environ) -> float | None:
    """When Slurm ends the job that this process belongs to, in Unix seconds; None: not known, or never."""
    text = environ.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isdigit() and 0 < int(text) < _NEVER else None
