"""Request nodes of the site's shared pool from Slurm, as the job's user, when an order asks for them.

Each request is a Slurm job of one node whose agent joins this gang. A request is submitted once, however often the
order is repeated. Every later status carries Slurm's answer.
"""

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from muster.daemon.host import clock, private_file
from muster.slurm.client.batch_script import NotOneLine, PoolJob, render_pool_script
from muster.slurm.client.errors import SlurmError
from muster.slurm.client.parsing import limits
from muster.slurm.client.sbatch_options import SbatchOption, WrongOption, read_texts
from muster.slurm.client.submit_environment import for_sbatch
from muster.v1.agent_pb2 import PoolAnswer, PoolRequest

log = logging.getLogger(__name__)

SBATCH_TIMEOUT_S = 120.0
_CANCEL_S = 20.0
_NO_END_TIME = 2**32 - 2
"""The end time that Slurm gives for a job without a time limit."""
_SITE_VARIABLES = frozenset({"MUSTER_CONFIG", "MUSTER_AUTH"})
"""Variables of Muster that the new job needs. The others belong to the current job: the new one must not see them."""
_INHERITED_OPTIONS = {
    "partition": "SLURM_JOB_PARTITION",
    "account": "SLURM_JOB_ACCOUNT",
    "qos": "SLURM_JOB_QOS",
}
"""sbatch options that the new job inherits from the current job unless the spec or the request gives them."""
_RESERVATION = {"reservation": "SLURM_JOB_RESERVATION"}
"""Likewise, for a request that names a node of the job (--nodelist): the node is still part of the reservation that the
job runs in, and Slurm gives it to no job outside. The nodes of the shared pool need not be part of it."""


class JobSubmitter(Protocol):
    """The part of the Slurm client that is used here."""

    async def submit(self, script: Path, *, cwd: Path, env: Mapping[str, str] | None, timeout_s: float) -> int:
        """See muster.slurm.client.types.Slurm."""
        ...

    async def cancel(self, job: int, *, timeout_s: float) -> None:
        """See muster.slurm.client.types.Slurm."""
        ...

    async def pending_reason(self, job: int) -> str:
        """See muster.slurm.client.backends.sbatch.Sbatch."""
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
        sbatch: submits and cancels as this user.
        changed: called when `answers` has changed.
    """

    def __init__(self, terms: PoolRequestDefaults, sbatch: JobSubmitter, changed: Callable[[], None]) -> None:
        self._terms = terms
        self._sbatch = sbatch
        self._changed = changed
        self._answers: dict[int, PoolAnswer | None] = {}
        self._wanted_serials: set[int] = set()

    def answers(self) -> list[PoolAnswer]:
        """Slurm's answers so far."""
        return [answer for answer in self._answers.values() if answer is not None]

    def new_requests(self, requests: Sequence[PoolRequest]) -> list[PoolRequest]:
        """Return those of `requests`, all requests of the newest order, that were never returned before."""
        self._wanted_serials = {request.serial for request in requests}
        new = [request for request in requests if request.serial not in self._answers]
        self._answers.update({request.serial: None for request in new})
        return new

    async def submit(self, request: PoolRequest) -> None:
        """Submit the job for one request."""
        try:
            number = await self._submit(request)
            reason = await self._sbatch.pending_reason(number)
            if request.serial not in self._wanted_serials:
                await self._cancel(number, "its pool request has ended")
                return
            answer = PoolAnswer(serial=request.serial, slurm_job_id=number)
            log.info("job submitted for pool request %d: %d", request.serial, number)
            if limits.LASTING.fullmatch(reason):
                answer = PoolAnswer(serial=request.serial, error=f"no node of the shared pool: the limit {reason}")
                await self._cancel(number, answer.error)
        except (SlurmError, OSError, NotOneLine, WrongOption) as error:
            answer = PoolAnswer(serial=request.serial, error=f"no node of the shared pool: {error}")
            log.error("%s", answer.error)
        self._answers[request.serial] = answer
        self._changed()

    async def _cancel(self, number: int, why: str) -> None:
        """Cancel a job that the coordinator does not know."""
        log.info("cancelling job %d: %s", number, why)
        try:
            await self._sbatch.cancel(number, timeout_s=_CANCEL_S)
        except SlurmError as error:  # the coordinator turns its agent away, should it start
            log.error("job %d could not be cancelled: %s", number, error)

    async def _submit(self, request: PoolRequest) -> int:
        terms = self._terms
        folder = Path(terms.job.spec.run_dir)
        path = folder / f"{terms.job.gang}-pool{request.serial}.sbatch"
        options = [self._comment(), *self._inherited_options(request), *request.options]
        text = render_pool_script(terms.job, request.serial, options, self._minutes_left())
        # It holds [env]. An earlier agent of this gang may have written it for the same request.
        await asyncio.to_thread(private_file.replace, path, text)
        environ = {
            name: value
            for name, value in for_sbatch(terms.environ).items()
            if name in _SITE_VARIABLES or not name.startswith("MUSTER_")
        }
        return await self._sbatch.submit(path, cwd=folder, env=environ, timeout_s=SBATCH_TIMEOUT_S)

    def _comment(self) -> str:
        """What the new job is for, as squeue and sacct show it: its name is that of the gang's own job. A pool job that
        asks does not know the number of that one.
        """
        environ, name = self._terms.environ, self._terms.job.spec.name
        own = "" if environ.get("MUSTER_POOL") else environ.get("SLURM_JOB_ID", "")
        return str(
            SbatchOption("comment", f"muster: a node for job {own} ({name})" if own else f"muster: a node for {name}")
        )

    def _inherited_options(self, request: PoolRequest) -> Iterator[str]:
        asked = {option.name for option in read_texts(request.options)}
        given = asked | {option.name for option in read_texts(self._terms.job.spec.node_options)}
        for key, name in (_INHERITED_OPTIONS | (_RESERVATION if "nodelist" in asked else {})).items():
            if key not in given and (value := self._terms.environ.get(name)):
                yield str(SbatchOption(key, value))

    def _minutes_left(self) -> int | None:
        """Minutes until the gang's job ends. None: no limit, or the job has passed its first end time, so the limit was
        extended."""
        ends_at = self._terms.ends_at
        left = 0 if ends_at is None else math.ceil((ends_at - clock.wall()) / 60)
        return left if left > 0 else None


def job_end_time(environ: Mapping[str, str] = os.environ) -> float | None:
    """Unix seconds at which Slurm ends the job of this process; None: unknown, or no time limit."""
    text = environ.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isdigit() and 0 < int(text) < _NO_END_TIME else None
