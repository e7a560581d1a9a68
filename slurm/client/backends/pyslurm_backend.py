"""The Slurm client over pyslurm, in worker processes: some milliseconds less for each call than the commands.

Two workers: one for questions, which may be long, and one for commands, which must not wait behind them. What
pyslurm has no call for (topology, sbatch's options, signals without its stale errno, a job's base state
while it is COMPLETING) goes through the command-line backend.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from muster.slurm.client.backends.commands import CliSlurm
from muster.slurm.client.backends.procedures import Procedures
from muster.slurm.client.backends.worker_process import WorkerProcess
from muster.slurm.client.deadline_budget import Budget
from muster.slurm.client.errors import SlurmUnavailable
from muster.slurm.client.parsing import json_stream, records
from muster.slurm.client.permit import Permit, unopposed
from muster.slurm.client.states import JobState
from muster.slurm.client.types import DEFAULT_DEADLINE, GONE, Job, JobAnswers, NodeAnswers, Topology

T = TypeVar("T")
START_DEADLINE: Final = 20.0
"""Seconds for a worker to import pyslurm on a busy machine."""


class PyslurmSlurm(Procedures):
    """`Slurm` over two pyslurm workers."""

    def __init__(self, permit: Permit = unopposed) -> None:
        super().__init__(permit)
        self._questions = WorkerProcess()
        self._commands = WorkerProcess(permit=permit)
        self._cli = CliSlurm(permit=permit)

    async def start(self, deadline: float = START_DEADLINE) -> None:
        """Starts both workers. SlurmUnavailable where pyslurm or slurm.conf is missing."""
        budget = Budget(deadline)
        await self._questions.start(deadline)
        await self._commands.start(budget.need("start pyslurm"))

    async def _jobs(self, ids: Collection[int] | None, deadline: float) -> JobAnswers:
        budget = Budget(deadline)
        asked = None if ids is None else sorted(ids)
        answer = await self._questions.ask("show jobs", deadline, "jobs", ids=asked)
        found = {job.id: job for job in await _understood(answer, records.job)}
        # pyslurm shows one word where Slurm has a state and flags: of a COMPLETING job it hides how that
        # ended.
        veiled = [job.id for job in found.values() if job.state is JobState.UNRECOGNISED]
        if veiled:
            plain = await self._cli._jobs(veiled, budget.need("show jobs"))
            found |= {id: job for id, job in plain.items() if isinstance(job, Job)}
        return found if ids is None else {id: found.get(id, GONE) for id in ids}

    async def _nodes(self, names: Collection[str] | None, deadline: float) -> NodeAnswers:
        asked = None if names is None else sorted(names)
        answer = await self._questions.ask("show nodes", deadline, "nodes", names=asked)
        found = {node.name: node for node in await _understood(answer, records.node)}
        return found if names is None else {name: found.get(name, GONE) for name in names}

    async def _topology(self, deadline: float) -> Topology:
        return await self._cli._topology(deadline)

    async def _update_job(self, what: str, job: int, changes: Mapping[str, str], deadline: float) -> None:
        if "" in changes.values():
            await self._cli._update_job(what, job, changes, deadline)  # pyslurm takes "" for "no change"
            return
        await self._commands.ask(what, deadline, "update_job", job=job, changes=dict(changes))

    async def _update_node(self, what: str, node: str, state: str, reason: str, deadline: float) -> None:
        await self._commands.ask(what, deadline, "update_node", node=node, state=state, reason=reason)

    async def _requeue(self, job: int, deadline: float) -> None:
        await self._commands.ask(f"requeue job {job}", deadline, "requeue", job=job)

    async def _release(self, job: int, deadline: float) -> None:
        await self._commands.ask(f"release job {job}", deadline, "release", job=job)

    async def cancel(self, job: int, signal: int | None = None, *, deadline: float = DEFAULT_DEADLINE) -> None:
        await self._cli.cancel(job, signal, deadline=deadline)

    async def submit(
        self,
        script: Path,
        options: Sequence[str] = (),
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        deadline: float = DEFAULT_DEADLINE,
    ) -> int:
        return await self._cli.submit(script, options, cwd=cwd, env=env, deadline=deadline)

    async def aclose(self) -> None:
        await self._questions.aclose()
        await self._commands.aclose()


async def _understood(answer: list[records.Record], read: Callable[[records.Record], T]) -> list[T]:
    try:
        return await json_stream.in_turns(answer, read)
    except (ValueError, KeyError, TypeError) as error:
        raise SlurmUnavailable(f"pyslurm gave what is not understood: {error!r}") from error
