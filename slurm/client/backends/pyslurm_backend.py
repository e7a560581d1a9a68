"""The Slurm client that uses pyslurm in worker processes. Each call is some milliseconds faster than a command.

One worker serves queries, which may take long. A second worker serves changes, which must not wait behind queries.
Slurm's commands serve what pyslurm cannot do: topology, sbatch's options, signals without a stale errno, and the base
state of a COMPLETING job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, TypeVar

from muster.slurm.client.backends.commands import CliSlurm
from muster.slurm.client.backends.worker_process import WorkerProcess
from muster.slurm.client.deadline import Deadline, LeaseGuard
from muster.slurm.client.errors import SlurmError, SlurmUnavailable
from muster.slurm.client.parsing import json_stream, records
from muster.slurm.client.states import JobState
from muster.slurm.client.types import (
    GONE,
    Job,
    JobAnswers,
    NodeAnswers,
)

T = TypeVar("T")
START_TIMEOUT_S: Final = 20.0
"""Seconds for a worker to import pyslurm on a busy host."""


class PyslurmSlurm(CliSlurm):
    """The client of Slurm's commands, with two pyslurm workers for the steps that pyslurm can do."""

    def __init__(self, lease_guard: LeaseGuard) -> None:
        super().__init__(lease_guard=lease_guard)
        self._questions = WorkerProcess()
        self._commands = WorkerProcess(lease_guard=lease_guard)

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Starts both workers.

        Raises:
            SlurmUnavailable: pyslurm or slurm.conf is missing.
        """
        deadline = Deadline(timeout_s)
        await self._questions.start(timeout_s)
        await self._commands.start(deadline.require("start pyslurm"))

    async def _jobs(self, ids: Collection[int] | None, timeout_s: float, in_doubt: Collection[int] = ()) -> JobAnswers:
        deadline = Deadline(timeout_s)
        asked = None if ids is None else sorted(ids)
        answer = await self._questions.request("show jobs", timeout_s, "jobs", ids=asked)
        found = {job.id: job for job in await _understood(answer, records.job)}
        # Slurm has a base state and flags. pyslurm shows one word: it hides the base state of a COMPLETING job. It
        # looks at the first 16 bits of a state, so it never shows STOPPED, which is the 17th.
        hidden = {job.id for job in found.values() if job.state is JobState.UNRECOGNISED}
        if asked_again := [id for id in found if id in hidden or id in in_doubt]:
            try:
                plain = await super()._jobs(asked_again, deadline.require("show jobs"))
            except SlurmError:
                if hidden:
                    raise
                plain = {}  # what pyslurm shows of jobs in doubt is true, too
            found |= {id: job for id, job in plain.items() if isinstance(job, Job)}
        return found if ids is None else {id: found.get(id, GONE) for id in ids}

    async def _nodes(self, names: Collection[str] | None, timeout_s: float) -> NodeAnswers:
        asked = None if names is None else sorted(names)
        answer = await self._questions.request("show nodes", timeout_s, "nodes", names=asked)
        found = {node.name: node for node in await _understood(answer, records.node)}
        return found if names is None else {name: found.get(name, GONE) for name in names}

    async def _update_job(self, operation: str, job: int, changes: Mapping[str, str], timeout_s: float) -> None:
        if "" in changes.values() or "Switches" in changes:
            # pyslurm reads "" as "no change", and does not change switches.
            await super()._update_job(operation, job, changes, timeout_s)
            return
        await self._commands.request(operation, timeout_s, "update_job", job=job, changes=dict(changes))

    async def _update_node(self, operation: str, node: str, state: str, reason: str, timeout_s: float) -> None:
        await self._commands.request(operation, timeout_s, "update_node", node=node, state=state, reason=reason)

    async def _requeue(self, job: int, timeout_s: float) -> None:
        await self._commands.request(f"requeue job {job}", timeout_s, "requeue", job=job)

    async def _switches(self, job: Job, timeout_s: float) -> str:
        found = (await super()._jobs([job.id], timeout_s))[job.id]  # pyslurm does not show them
        return found.switches if isinstance(found, Job) else ""

    async def _release(self, job: int, timeout_s: float) -> None:
        await self._commands.request(f"release job {job}", timeout_s, "release", job=job)

    async def aclose(self) -> None:
        await self._questions.aclose()
        await self._commands.aclose()


async def _understood(answer: list[records.Record], read: Callable[[records.Record], T]) -> list[T]:
    try:
        return await json_stream.convert_in_steps(answer, read)
    except ValueError as error:
        raise SlurmUnavailable(f"pyslurm returned a record of an unknown form: {error!r}") from error
