"""The Slurm client that uses pyslurm in worker processes. Each call is some milliseconds faster than a command.

One worker serves queries, which may take long. A second worker serves changes, which must not wait behind queries. The
command-line backend serves what pyslurm cannot do: topology, sbatch's options, signals without a stale errno, and the
base state of a COMPLETING job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from muster.fabric.sources.slurm_topology import SlurmTopology
from muster.slurm.client.backends.commands import CliSlurm
from muster.slurm.client.backends.procedures import Procedures
from muster.slurm.client.backends.worker_process import WorkerProcess
from muster.slurm.client.deadline import DEFAULT_TIMEOUT_S, Deadline, LeaseGuard, no_lease
from muster.slurm.client.errors import SlurmUnavailable
from muster.slurm.client.parsing import json_stream, records
from muster.slurm.client.states import JobState
from muster.slurm.client.types import (
    GONE,
    Job,
    JobAnswers,
    NeverStarts,
    NodeAnswers,
    Partition,
    StartEstimate,
    Unknown,
)

T = TypeVar("T")
START_TIMEOUT_S: Final = 20.0
"""Seconds for a worker to import pyslurm on a busy host."""


class PyslurmSlurm(Procedures):
    """Implements `Slurm` with two pyslurm workers."""

    def __init__(self, lease_guard: LeaseGuard = no_lease) -> None:
        super().__init__(lease_guard)
        self._questions = WorkerProcess()
        self._commands = WorkerProcess(lease_guard=lease_guard)
        self._cli = CliSlurm(lease_guard=lease_guard)

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Starts both workers.

        Raises:
            SlurmUnavailable: pyslurm or slurm.conf is missing.
        """
        deadline = Deadline(timeout_s)
        await self._questions.start(timeout_s)
        await self._commands.start(deadline.require("start pyslurm"))

    async def _jobs(self, ids: Collection[int] | None, timeout_s: float) -> JobAnswers:
        deadline = Deadline(timeout_s)
        asked = None if ids is None else sorted(ids)
        answer = await self._questions.request("show jobs", timeout_s, "jobs", ids=asked)
        found = {job.id: job for job in await _understood(answer, records.job)}
        # Slurm has a base state and flags. pyslurm shows one word: it hides the base state of a COMPLETING job.
        hidden = [job.id for job in found.values() if job.state is JobState.UNRECOGNISED]
        if hidden:
            plain = await self._cli._jobs(hidden, deadline.require("show jobs"))
            found |= {id: job for id, job in plain.items() if isinstance(job, Job)}
        return found if ids is None else {id: found.get(id, GONE) for id in ids}

    async def _nodes(self, names: Collection[str] | None, timeout_s: float) -> NodeAnswers:
        asked = None if names is None else sorted(names)
        answer = await self._questions.request("show nodes", timeout_s, "nodes", names=asked)
        found = {node.name: node for node in await _understood(answer, records.node)}
        return found if names is None else {name: found.get(name, GONE) for name in names}

    async def _topologies(self, timeout_s: float) -> tuple[SlurmTopology, ...]:
        return await self._cli._topologies(timeout_s)

    async def _partitions(self, timeout_s: float) -> Mapping[str, Partition]:
        return await self._cli._partitions(timeout_s)

    async def _update_job(self, operation: str, job: int, changes: Mapping[str, str], timeout_s: float) -> None:
        if "" in changes.values() or "Switches" in changes:
            # pyslurm reads "" as "no change", and does not change switches.
            await self._cli._update_job(operation, job, changes, timeout_s)
            return
        await self._commands.request(operation, timeout_s, "update_job", job=job, changes=dict(changes))

    async def _update_node(self, operation: str, node: str, state: str, reason: str, timeout_s: float) -> None:
        await self._commands.request(operation, timeout_s, "update_node", node=node, state=state, reason=reason)

    async def _requeue(self, job: int, timeout_s: float) -> None:
        await self._commands.request(f"requeue job {job}", timeout_s, "requeue", job=job)

    async def _switches(self, job: Job, timeout_s: float) -> str:
        found = (await self._cli._jobs([job.id], timeout_s))[job.id]  # pyslurm does not show them
        return found.switches if isinstance(found, Job) else ""

    async def _release(self, job: int, timeout_s: float) -> None:
        await self._commands.request(f"release job {job}", timeout_s, "release", job=job)

    async def cancel(self, job: int, signal: int | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        await self._cli.cancel(job, signal, timeout_s=timeout_s)

    async def submit(
        self,
        script: Path,
        options: Sequence[str] = (),
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int:
        return await self._cli.submit(script, options, cwd=cwd, env=env, timeout_s=timeout_s)

    async def estimate_start(
        self,
        script: Path,
        options: Sequence[str] = (),
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> StartEstimate | NeverStarts | Unknown:
        return await self._cli.estimate_start(script, options, cwd=cwd, env=env, timeout_s=timeout_s)

    async def max_switch_wait_s(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int | Unknown:
        return await self._cli.max_switch_wait_s(timeout_s=timeout_s)

    async def private_data(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> frozenset[str] | Unknown:
        return await self._cli.private_data(timeout_s=timeout_s)

    async def aclose(self) -> None:
        await self._questions.aclose()
        await self._commands.aclose()


async def _understood(answer: list[records.Record], read: Callable[[records.Record], T]) -> list[T]:
    try:
        return await json_stream.convert_in_steps(answer, read)
    except ValueError as error:
        raise SlurmUnavailable(f"pyslurm returned a record of an unknown form: {error!r}") from error
