"""The operations that need several commands to Slurm, written once for all real backends.

A backend implements the single steps (one RPC or one command each) and inherits the rest of `Slurm`. The order of the
steps comes from measurements on Slurm 26.05:

- down: DRAIN first, then DOWN. DRAIN remains set when slurmd registers again.
- remove_node: update the job's node list to the list without the node. If the batch host is not in the new list, Slurm
  answers "Invalid node name specified" and writes the true cause only to slurmctld's log. So this module reads the
  cause from the job.
- requeue: Slurm accepts excluded nodes as soon as it has accepted the requeue. When COMPLETING ends, Slurm sets the
  start time to 121 s later (cred_expire + 1). So the start time is set to now after COMPLETING. The job is never held
  during the procedure: if this process dies halfway, the job still starts.
- requeue of a job with `--switches`: Slurm does not wait for the switches again, and starts the job on any nodes. The
  same request, set once more, makes it wait again.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Final

from muster.fabric.sources.slurm_topology import SlurmTopology
from muster.slurm.client.backends import completion
from muster.slurm.client.deadline import DEFAULT_TIMEOUT_S, Deadline, LeaseGuard
from muster.slurm.client.errors import BatchHostRefused, SlurmRefused, SlurmUnavailable
from muster.slurm.client.parsing import error_messages
from muster.slurm.client.states import JobFlag, JobState
from muster.slurm.client.types import (
    Job,
    JobAnswers,
    Node,
    NodeAnswers,
    Partition,
    Unknown,
    updated_exclusions,
)

_log = logging.getLogger(__name__)
_NO_BATCH_HOST: Final = "You cannot remove the batch host from a job when resizing"
_HELD_BY_PEOPLE: Final = ("JobHeldUser", "JobHeldAdmin")
"""Slurm's job reasons for a hold that a person has set. Muster does not release such a job."""
_POLL_FIRST: Final = 0.02
"""Seconds before the second poll for the end of COMPLETING. The interval doubles up to `_POLL_LAST`."""
_POLL_LAST: Final = 0.5
"""Seconds: the longest interval between two polls."""


class Procedures(ABC):
    """Implements the Protocol `Slurm` on the single steps of one backend."""

    def __init__(self, lease_guard: LeaseGuard) -> None:
        """`lease_guard` is called before each step that changes something."""
        self._lease_guard = lease_guard

    # The single steps. Queries raise SlurmError here. The Protocol's methods return Unknown instead.

    @abstractmethod
    async def _jobs(
        self, ids: Collection[int] | None, timeout_s: float, in_doubt: Collection[int] = ()
    ) -> JobAnswers: ...

    @abstractmethod
    async def _nodes(self, names: Collection[str] | None, timeout_s: float) -> NodeAnswers: ...

    @abstractmethod
    async def _topologies(self, timeout_s: float) -> tuple[SlurmTopology, ...]: ...

    @abstractmethod
    async def _partitions(self, timeout_s: float) -> Mapping[str, Partition]: ...

    @abstractmethod
    async def _update_job(self, operation: str, job: int, changes: Mapping[str, str], timeout_s: float) -> None:
        """`scontrol update jobid=JOB KEY=VALUE...`. `changes` uses scontrol's keys."""

    @abstractmethod
    async def _update_node(self, operation: str, node: str, state: str, reason: str, timeout_s: float) -> None:
        """`scontrol update nodename=NODE state=STATE reason=REASON`. An empty `reason` is left out."""

    @abstractmethod
    async def _requeue(self, job: int, timeout_s: float) -> None: ...

    @abstractmethod
    async def _release(self, job: int, timeout_s: float) -> None: ...

    @abstractmethod
    async def _switches(self, job: Job, timeout_s: float) -> str:
        """What the job asks of its leaf switches, also if this backend's `_jobs` does not show it."""

    # Queries

    async def jobs(
        self,
        ids: Collection[int] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        in_doubt: Collection[int] = (),
    ) -> JobAnswers | Unknown:
        if ids is not None and not ids:
            return {}
        try:
            return await self._jobs(ids, timeout_s, in_doubt)
        except (SlurmUnavailable, SlurmRefused) as error:
            return Unknown(str(error))

    async def nodes(
        self, names: Collection[str] | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> NodeAnswers | Unknown:
        if names is not None and not names:
            return {}
        try:
            return await self._nodes(names, timeout_s)
        except (SlurmUnavailable, SlurmRefused) as error:
            return Unknown(str(error))

    async def topologies(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[SlurmTopology, ...] | Unknown:
        try:
            return await self._topologies(timeout_s)
        except (SlurmUnavailable, SlurmRefused) as error:
            return Unknown(str(error))

    async def partitions(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Mapping[str, Partition] | Unknown:
        try:
            return await self._partitions(timeout_s)
        except (SlurmUnavailable, SlurmRefused) as error:
            return Unknown(str(error))

    # Nodes

    async def drain(self, node: str, reason: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        await self._update_node(f"drain {node}", node, "DRAIN", one_line(reason), timeout_s)

    async def down(self, node: str, reason: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        deadline = Deadline(timeout_s)
        await self.drain(node, reason, timeout_s=timeout_s)
        operation = f"set {node} down"
        await self._update_node(operation, node, "DOWN", one_line(reason), deadline.require(operation))

    async def resume(self, node: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        deadline = Deadline(timeout_s)
        operation = f"resume {node}"
        try:
            await self._update_node(operation, node, "RESUME", "", timeout_s)
        except SlurmRefused as error:
            if not error_messages.says_no_transition(error):
                raise
            found = (await self._nodes([node], deadline.require(operation))).get(node)
            if not isinstance(found, Node) or found.drained or found.down:
                raise

    # Jobs

    async def remove_node(self, job: int, node: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        operation = f"remove {node} from job {job}"
        deadline = Deadline(timeout_s)
        current = await self._job(operation, job, deadline)
        while node in current.nodes:
            remaining = tuple(name for name in current.nodes if name != node)
            try:
                return await self._shrink(operation, current, remaining, deadline)
            except SlurmRefused as error:
                previous, current = current, await self._job(operation, job, deadline)
                if error_messages.NO_SUCH_NODE not in error.message or current.nodes == previous.nodes:
                    raise

    async def _shrink(self, operation: str, job: Job, remaining: tuple[str, ...], deadline: Deadline) -> None:
        if not remaining:
            raise BatchHostRefused(operation, "it is the only node of the job")
        try:
            await self._update_job(operation, job.id, {"NodeList": ",".join(remaining)}, deadline.require(operation))
        except SlurmRefused as error:
            if error_messages.NO_SUCH_NODE in error.message and job.batch_host and job.batch_host not in remaining:
                raise BatchHostRefused(operation, f"{_NO_BATCH_HOST} ({job.batch_host})") from error
            raise

    async def requeue(
        self,
        job: int,
        exclude: Collection[str] = (),
        admit: Collection[str] = (),
        *,
        restarts: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        operation = f"requeue job {job}"
        deadline = Deadline(timeout_s)
        current = await self._job(operation, job, deadline)
        if current.state is JobState.CANCELLED:
            raise SlurmRefused(
                operation, error_messages.CANCELLED
            )  # Slurm itself would requeue it, against the user's will
        if current.state is not JobState.PENDING:
            if restarts is not None and current.restart_count > restarts:
                return
            try:
                await self._requeue(job, deadline.require(operation))
            except SlurmRefused as error:
                if error_messages.IS_PENDING not in error.message:  # Slurm or the user has already requeued the job
                    raise
        await self._exclude(current, exclude, admit, deadline)
        await self._wait_for_switches_again(current, deadline)
        current = await self._wait_completed(operation, job, deadline)
        if current.state is not JobState.PENDING:
            return  # the job has already started
        try:
            await self._update_job(operation, job, {"StartTime": "now"}, deadline.require(operation))
        except SlurmRefused as error:
            if error_messages.HAS_STARTED not in error.message:
                raise
            return  # the job has started since the last query
        if current.held and current.reason not in _HELD_BY_PEOPLE:
            await self._release(job, deadline.require(operation))

    async def _wait_for_switches_again(self, job: Job, deadline: Deadline) -> None:
        operation = f"have job {job.id} wait for its switches again"
        switches = await self._switches(job, deadline.require(operation))
        if not switches:
            return
        try:
            await self._update_job(operation, job.id, {"Switches": switches}, deadline.require(operation))
        except SlurmRefused as error:  # the job runs already, or this Slurm can't: it is requeued all the same
            _log.warning("%s: %s", operation, error)

    async def _exclude(self, job: Job, exclude: Collection[str], admit: Collection[str], deadline: Deadline) -> None:
        new_exclusions = updated_exclusions(job.excluded, exclude, admit)
        if set(new_exclusions) != set(job.excluded):
            operation = f"exclude {', '.join(new_exclusions) or 'no node'} from job {job.id}"
            await self._update_job(
                operation, job.id, {"ExcNodeList": ",".join(new_exclusions)}, deadline.require(operation)
            )

    async def _wait_completed(self, operation: str, job: int, deadline: Deadline) -> Job:
        """Waits until COMPLETING has ended, and returns the job. Raises SlurmTimeout at the deadline."""
        pause = _POLL_FIRST
        while JobFlag.COMPLETING in (current := await self._job(operation, job, deadline)).flags:
            await asyncio.sleep(min(pause, max(deadline.remaining_s, 0)))
            pause = min(pause * 2, _POLL_LAST)
        return current

    async def set_requeue_flag(self, job: int, flag: bool, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        operation = f"set the requeue flag of job {job} to {int(flag)}"
        await self._update_job(operation, job, {"Requeue": str(int(flag))}, timeout_s)

    async def set_comments(
        self, job: int, comment: str = "", admin_comment: str = "", *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        texts = {"Comment": one_line(comment), "AdminComment": one_line(admin_comment)}
        changes = {key: text for key, text in texts.items() if text}
        await self._update_job(f"set the comments of job {job}", job, changes, timeout_s)

    async def complete_job(self, job: int, exit_code: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        await completion.complete(job, exit_code, timeout_s=timeout_s, lease_s=self._lease_guard())

    async def _job(self, operation: str, job: int, deadline: Deadline) -> Job:
        found = (await self._jobs([job], deadline.require(operation)))[job]
        if not isinstance(found, Job):
            raise SlurmRefused(operation, f"{error_messages.NO_SUCH_JOB} specified for job {job}")
        return found


def one_line(text: str) -> str:
    """Returns `text` as one line without control characters, as Slurm can show it."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
