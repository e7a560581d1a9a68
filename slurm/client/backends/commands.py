"""The Slurm client over Slurm's own commands: for every Slurm from 24.11 on, at a process for each call."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from muster.slurm.client.backends import run_command
from muster.slurm.client.backends.procedures import Procedures
from muster.slurm.client.deadline_budget import Budget
from muster.slurm.client.errors import SlurmRefused, SlurmUnavailable
from muster.slurm.client.parsing import json_stream, records, refusals
from muster.slurm.client.permit import Permit, unopposed
from muster.slurm.client.types import DEFAULT_DEADLINE, GONE, JobAnswers, NodeAnswers, Topology

T = TypeVar("T")


class CliSlurm(Procedures):
    """`scontrol`, `squeue`, `scancel` and `sbatch`, found on PATH or in the folder `bin`."""

    def __init__(self, bin: Path | None = None, permit: Permit = unopposed) -> None:
        super().__init__(permit)
        self._bin = bin

    async def _change(self, what: str, deadline: float, *argv: str) -> None:
        """Runs one command that changes something; raises what its words mean if it fails."""
        await self._run(what, deadline, *argv, within=self._permit())

    async def _run(self, what: str, deadline: float, *argv: str, within: float = math.inf) -> str:
        """Runs one command, returns its output; raises what its words mean if it fails."""
        done = await run_command.run(self._argv(argv), deadline=deadline, within=within)
        if done.status != 0:
            raise refusals.failure(what, done.words)
        return done.out

    def _argv(self, argv: Sequence[str]) -> list[str]:
        return [str(self._bin / argv[0]) if self._bin else argv[0], *argv[1:]]

    async def _jobs(self, ids: Collection[int] | None, deadline: float) -> JobAnswers:
        argv = ["squeue", "--json", "--states=all"]
        if ids is not None:
            argv.append(f"--jobs={','.join(map(str, sorted(ids)))}")
        try:
            out = await self._run("show jobs", deadline, *argv)
        except SlurmRefused as error:
            # Asked for one job alone, squeue fails where it has none; asked for several it leaves them out.
            if ids is None or refusals.NO_SUCH_JOB not in error.words:
                raise
            return dict.fromkeys(ids, GONE)
        found = {job.id: job for job in await _parse("squeue", out, "jobs", records.job)}
        return found if ids is None else {id: found.get(id, GONE) for id in ids}

    async def _nodes(self, names: Collection[str] | None, deadline: float) -> NodeAnswers:
        which = [] if names is None else [",".join(sorted(names))]
        out = await self._run("show nodes", deadline, "scontrol", "show", "node", *which, "--json")
        found = {node.name: node for node in await _parse("scontrol", out, "nodes", records.node)}
        return found if names is None else {name: found.get(name, GONE) for name in names}

    async def _topology(self, deadline: float) -> Topology:
        out = await self._run("show the topology", deadline, "scontrol", "show", "topology")
        return records.topology(out.splitlines())

    async def _update_job(self, what: str, job: int, changes: Mapping[str, str], deadline: float) -> None:
        pairs = [f"{key}={value}" for key, value in changes.items()]
        await self._change(what, deadline, "scontrol", "update", f"JobId={job}", *pairs)

    async def _update_node(self, what: str, node: str, state: str, reason: str, deadline: float) -> None:
        why = [f"Reason={reason}"] if reason else []
        await self._change(what, deadline, "scontrol", "update", f"NodeName={node}", f"State={state}", *why)

    async def _requeue(self, job: int, deadline: float) -> None:
        await self._change(f"requeue job {job}", deadline, "scontrol", "requeue", str(job))

    async def _release(self, job: int, deadline: float) -> None:
        await self._change(f"release job {job}", deadline, "scontrol", "release", str(job))

    async def cancel(self, job: int, signal: int | None = None, *, deadline: float = DEFAULT_DEADLINE) -> None:
        how = [] if signal is None else [f"--signal={signal}"]
        what = f"cancel job {job}" if signal is None else f"send signal {signal} to job {job}"
        try:
            await self._change(what, deadline, "scancel", *how, str(job))
        except SlurmRefused as error:
            if not refusals.has_ended(error):
                raise

    async def submit(
        self,
        script: Path,
        options: Sequence[str] = (),
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        deadline: float = DEFAULT_DEADLINE,
    ) -> int:
        argv = self._argv(["sbatch", "--parsable", *options, str(script)])
        done = await run_command.run(argv, deadline=Budget(deadline).left, cwd=cwd, env=env)
        if done.status != 0:
            raise refusals.failure(f"submit {script}", done.words)
        try:
            return int(done.out.split(";")[0])
        except ValueError:
            raise SlurmUnavailable(f"sbatch --parsable printed {done.out!r}, expected the job's number") from None

    async def aclose(self) -> None:
        """Nothing to end: no process outlives its call."""


async def _parse(program: str, text: str, key: str, read: Callable[[Any], T]) -> list[T]:
    """Reads a command's JSON. What can't be read is a site's trouble (another Slurm), not an absence."""
    try:
        return [read(record) async for record in json_stream.records(text, key)]
    except (ValueError, KeyError, TypeError) as error:
        raise SlurmUnavailable(f"{program} --json gave what is not understood: {error!r}") from error
