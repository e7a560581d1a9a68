"""The operations that take Slurm several steps, written once for every real backend.

A backend supplies the single steps (one RPC or one command each) and inherits the rest of `Slurm`.
The order of steps is what was measured on Slurm 26.05:

- down: DRAIN first, then DOWN, because DRAIN outlives a slurmd that registers again;
- let_go: the node list without the node. Slurm answers "Invalid node name specified" when the batch host is
  not in that list and tells the true cause in slurmctld's log alone, so the cause is read off the job;
- requeue: nodes can be excluded as soon as the requeue is accepted, but the start time is set to
  121 s later (cred_expire + 1) when COMPLETING ends, so it is moved to now only after that. The job is never
  held meanwhile: if we die half way, it still starts by itself.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Final

from muster.slurm.client.backends import completion
from muster.slurm.client.deadline_budget import Budget
from muster.slurm.client.errors import BatchHostRefused, SlurmRefused, SlurmUnavailable
from muster.slurm.client.parsing import refusals
from muster.slurm.client.permit import Permit
from muster.slurm.client.states import JobFlag, JobState
from muster.slurm.client.types import DEFAULT_DEADLINE, Job, JobAnswers, Node, NodeAnswers, Topology, Unknown, excluding

_NO_BATCH_HOST: Final = "You cannot remove the batch host from a job when resizing"
_HELD_BY_PEOPLE: Final = ("JobHeldUser", "JobHeldAdmin")
_POLL_FIRST: Final = 0.02
_POLL_LAST: Final = 0.5


class Procedures(ABC):
    """The Protocol `Slurm` over the single steps of one backend."""

    def __init__(self, permit: Permit) -> None:
        """`permit` is asked before each step that changes something."""
        self._permit = permit

    # The single steps. Queries raise SlurmError here and turn it into Unknown in the Protocol's methods.

    @abstractmethod
    async def _jobs(self, ids: Collection[int] | None, deadline: float) -> JobAnswers: ...

    @abstractmethod
    async def _nodes(self, names: Collection[str] | None, deadline: float) -> NodeAnswers: ...

    @abstractmethod
    async def _topology(self, deadline: float) -> Topology: ...

    @abstractmethod
    async def _update_job(self, what: str, job: int, changes: Mapping[str, str], deadline: float) -> None:
        """`scontrol update jobid=JOB KEY=VALUE...`, by scontrol's keys."""

    @abstractmethod
    async def _update_node(self, what: str, node: str, state: str, reason: str, deadline: float) -> None:
        """`scontrol update nodename=NODE state=STATE reason=REASON`; no reason where it is empty."""

    @abstractmethod
    async def _requeue(self, job: int, deadline: float) -> None: ...

    @abstractmethod
    async def _release(self, job: int, deadline: float) -> None: ...

    # Queries

    async def jobs(
        self, ids: Collection[int] | None = None, *, deadline: float = DEFAULT_DEADLINE
    ) -> JobAnswers | Unknown:
        if ids is not None and not ids:
            return {}
        try:
            return await self._jobs(ids, deadline)
        except (SlurmUnavailable, SlurmRefused) as error:
            return Unknown(str(error))

    async def nodes(
        self, names: Collection[str] | None = None, *, deadline: float = DEFAULT_DEADLINE
    ) -> NodeAnswers | Unknown:
        if names is not None and not names:
            return {}
        try:
            return await self._nodes(names, deadline)
        except (SlurmUnavailable, SlurmRefused) as error:
            return Unknown(str(error))

    async def topology(self, *, deadline: float = DEFAULT_DEADLINE) -> Topology | Unknown:
        try:
            return await self._topology(deadline)
        except (SlurmUnavailable, SlurmRefused) as error:
            return Unknown(str(error))

    # Nodes

    async def drain(self, node: str, reason: str, *, deadline: float = DEFAULT_DEADLINE) -> None:
        await self._update_node(f"drain {node}", node, "DRAIN", one_line(reason), deadline)

    async def down(self, node: str, reason: str, *, deadline: float = DEFAULT_DEADLINE) -> None:
        budget = Budget(deadline)
        await self.drain(node, reason, deadline=deadline)
        what = f"set {node} down"
        await self._update_node(what, node, "DOWN", one_line(reason), budget.need(what))

    async def resume(self, node: str, *, deadline: float = DEFAULT_DEADLINE) -> None:
        budget = Budget(deadline)
        what = f"resume {node}"
        try:
            await self._update_node(what, node, "RESUME", "", deadline)
        except SlurmRefused as error:
            if refusals.NO_TRANSITION not in error.words:
                raise
            found = (await self._nodes([node], budget.need(what))).get(node)
            if not isinstance(found, Node) or found.drained or found.down:
                raise

    # Jobs

    async def let_go(self, job: int, node: str, *, deadline: float = DEFAULT_DEADLINE) -> None:
        what = f"let go of {node} of job {job}"
        budget = Budget(deadline)
        now = await self._job(what, job, budget)
        while node in now.nodes:
            rest = tuple(name for name in now.nodes if name != node)
            try:
                return await self._shrink(what, now, rest, budget)
            except SlurmRefused as error:
                before, now = now, await self._job(what, job, budget)
                if refusals.NO_SUCH_NODE not in error.words or now.nodes == before.nodes:
                    raise

    async def _shrink(self, what: str, job: Job, rest: tuple[str, ...], budget: Budget) -> None:
        if not rest:
            raise BatchHostRefused(what, "it is the only node of the job")
        try:
            await self._update_job(what, job.id, {"NodeList": ",".join(rest)}, budget.need(what))
        except SlurmRefused as error:
            if refusals.NO_SUCH_NODE in error.words and job.batch_host and job.batch_host not in rest:
                raise BatchHostRefused(what, f"{_NO_BATCH_HOST} ({job.batch_host})") from error
            raise

    async def requeue(
        self,
        job: int,
        exclude: Collection[str] = (),
        admit: Collection[str] = (),
        *,
        restarts: int | None = None,
        deadline: float = DEFAULT_DEADLINE,
    ) -> None:
        what = f"requeue job {job}"
        budget = Budget(deadline)
        now = await self._job(what, job, budget)
        if now.state is JobState.CANCELLED:
            raise SlurmRefused(what, refusals.CANCELLED)  # Slurm would take it back, against its user's will
        if now.state is not JobState.PENDING:
            if restarts is not None and now.restart_count > restarts:
                return
            try:
                await self._requeue(job, budget.need(what))
            except SlurmRefused as error:
                if refusals.IS_PENDING not in error.words:  # Slurm, or its user, was quicker
                    raise
        await self._exclude(now, exclude, admit, budget)
        now = await self._wait_completed(what, job, budget)
        if now.state is not JobState.PENDING:
            return  # it has started already
        await self._update_job(what, job, {"StartTime": "now"}, budget.need(what))
        if now.held and now.reason not in _HELD_BY_PEOPLE:
            await self._release(job, budget.need(what))

    async def _exclude(self, job: Job, exclude: Collection[str], admit: Collection[str], budget: Budget) -> None:
        wanted = excluding(job.excluded, exclude, admit)
        if set(wanted) != set(job.excluded):
            what = f"exclude {', '.join(wanted) or 'no node'} from job {job.id}"
            await self._update_job(what, job.id, {"ExcNodeList": ",".join(wanted)}, budget.need(what))

    async def _wait_completed(self, what: str, job: int, budget: Budget) -> Job:
        """The job once the nodes of its last run are given back; SlurmTimeout if that takes too long."""
        pause = _POLL_FIRST
        while JobFlag.COMPLETING in (now := await self._job(what, job, budget)).flags:
            await asyncio.sleep(min(pause, max(budget.left, 0)))
            pause = min(pause * 2, _POLL_LAST)
        return now

    async def set_requeue_flag(self, job: int, flag: bool, *, deadline: float = DEFAULT_DEADLINE) -> None:
        what = f"set the requeue flag of job {job} to {int(flag)}"
        await self._update_job(what, job, {"Requeue": str(int(flag))}, deadline)

    async def set_comment(self, job: int, text: str, *, deadline: float = DEFAULT_DEADLINE) -> None:
        await self._update_job(f"set the comment of job {job}", job, {"Comment": one_line(text)}, deadline)

    async def complete_job(self, job: int, exit_code: int, *, deadline: float = DEFAULT_DEADLINE) -> None:
        await completion.complete(job, exit_code, deadline=deadline, within=self._permit())

    async def _job(self, what: str, job: int, budget: Budget) -> Job:
        found = (await self._jobs([job], budget.need(what)))[job]
        if not isinstance(found, Job):
            raise SlurmRefused(what, f"{refusals.NO_SUCH_JOB} specified for job {job}")
        return found


def one_line(text: str) -> str:
    """`text` as Slurm can show it: one line, no control characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
