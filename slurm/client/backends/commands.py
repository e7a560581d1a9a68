"""The Slurm client that runs Slurm's own commands.

This client works with every Slurm from 24.11 on. Each call starts one process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from muster.fabric.sources.slurm_topology import Kind, SlurmTopology
from muster.slurm.client import submit_environment
from muster.slurm.client.backends import run_command
from muster.slurm.client.backends.procedures import Procedures
from muster.slurm.client.backends.sbatch import Sbatch
from muster.slurm.client.deadline import DEFAULT_TIMEOUT_S, Deadline, LeaseGuard, no_lease
from muster.slurm.client.errors import SlurmError, SlurmRefused, SlurmUnavailable
from muster.slurm.client.parsing import error_messages, json_stream, records, start_text, topology_conf, topology_text
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
_MOST_NAMES = 10_000


class CliSlurm(Sbatch, Procedures):
    """Runs `scontrol`, `squeue`, `scancel` and `sbatch`, from PATH or from the folder `bin`."""

    def __init__(self, bin: Path | None = None, lease_guard: LeaseGuard = no_lease) -> None:
        Sbatch.__init__(self, bin)
        Procedures.__init__(self, lease_guard)
        self._names: dict[int, str] = {}
        """By job that was asked for: the name of an array's task; empty: it is none."""

    async def _change(self, operation: str, timeout_s: float, *argv: str) -> None:
        """Runs one command that changes something. Raises the SlurmError for the command's error message."""
        await self._run(operation, timeout_s, *argv, lease_s=self._lease_guard())

    async def _run(self, operation: str, timeout_s: float, *argv: str, lease_s: float = math.inf) -> str:
        """Runs one command and returns its standard output. Raises the SlurmError for the command's error message."""
        env = submit_environment.for_commands(os.environ)
        done = await run_command.run(self._argv(argv), timeout_s=timeout_s, env=env, lease_s=lease_s)
        if done.exit_status != 0:
            raise error_messages.to_error(operation, done.error_text)
        return done.stdout

    async def _jobs(self, ids: Collection[int] | None, timeout_s: float, in_doubt: Collection[int] = ()) -> JobAnswers:
        argv = ["squeue", "--json", "--states=all"]
        if ids is not None:
            argv.append(f"--jobs={','.join(map(str, sorted(ids)))}")
        try:
            out = await self._run("show jobs", timeout_s, *argv)
        except SlurmRefused as error:
            # squeue fails if one single requested job is unknown. It omits unknown jobs from a longer list.
            if ids is None or error_messages.NO_SUCH_JOB not in error.message:
                raise
            return dict.fromkeys(ids, GONE)
        found = {job.id: job for job in await _parse("squeue", out, "jobs", records.job)}
        if ids is None:
            return found
        answer: JobAnswers = {id: found.get(id, GONE) for id in ids}
        self._note_names(answer)
        return answer

    async def _nodes(self, names: Collection[str] | None, timeout_s: float) -> NodeAnswers:
        which = [] if names is None else [",".join(sorted(names))]
        # After "--", no word is an option.
        out = await self._run("show nodes", timeout_s, "scontrol", "--json", "show", "node", "--", *which)
        found = {node.name: node for node in await _parse("scontrol", out, "nodes", records.node)}
        return found if names is None else {name: found.get(name, GONE) for name in names}

    async def _topologies(self, timeout_s: float) -> tuple[SlurmTopology, ...]:
        deadline = Deadline(timeout_s)
        named = await self._named_topologies(deadline)
        if not named:
            return (topology_text.read(await self._show_topology((), deadline)),)
        whole = [await self._with_units(topology, deadline) for topology in named]
        return tuple(whole) if len(whole) == 1 else await self._with_partitions(whole, deadline)

    async def _named_topologies(self, deadline: Deadline) -> tuple[SlurmTopology, ...]:
        """What topology.yaml has. Empty if Slurm has no such file, or is older than 25.05."""
        operation = "show the topologies"
        try:
            out = await self._run(operation, deadline.require(operation), "scontrol", "show", "topoconf")
            return topology_conf.read(out)
        except SlurmRefused:
            return ()
        except records.UnknownForm as error:
            return (SlurmTopology(Kind.FLAT, problem=str(error)),)

    async def _with_units(self, topology: SlurmTopology, deadline: Deadline) -> SlurmTopology:
        """`topology` with its switches, blocks or rings. A torus has its units already."""
        if topology.units or topology.kind in (Kind.FLAT, Kind.TORUS):
            return topology
        found = topology_text.read(await self._show_topology((topology.name,), deadline))
        problem = found.problem
        if not problem and found.kind is not topology.kind:
            problem = f"Slurm says it is of kind {topology.kind.value}, and prints {found.kind.value}"
        kind = Kind.FLAT if problem else found.kind
        return replace(found, kind=kind, name=topology.name, default=topology.default, problem=problem)

    async def _show_topology(self, name: Sequence[str], deadline: Deadline) -> str:
        """What Slurm prints of one topology: nothing of a flat network. It exits with 0 after an error, too."""
        operation = "show the topology"
        env = submit_environment.for_commands(os.environ)  # SLURM_TOPO_LEN cuts lists of nodes
        argv = self._argv(["scontrol", "show", "topology", *name])
        done = await run_command.run(argv, timeout_s=deadline.require(operation), env=env)
        if done.exit_status != 0 or (not done.stdout.strip() and done.stderr.strip()):
            if topology_text.NONE in done.error_text:
                return ""
            raise error_messages.to_error(operation, done.error_text)
        return done.stdout

    async def _partitions(self, timeout_s: float) -> Mapping[str, Partition]:
        out = await self._run("show partitions", timeout_s, "scontrol", "--json", "show", "partition")
        return {one.name: one for one in await _parse("scontrol", out, "partitions", records.partition)}

    async def _with_partitions(
        self, topologies: Sequence[SlurmTopology], deadline: Deadline
    ) -> tuple[SlurmTopology, ...]:
        """The topologies with the partitions that name them, and the nodes of all partitions that use them."""
        found = await self._partitions(deadline.require("show partitions"))

        def completed(topology: SlurmTopology) -> SlurmTopology:
            names = (topology.name, "") if topology.default else (topology.name,)
            members = {node for one in found.values() if one.topology in names for node in one.nodes}
            partitions = tuple(one.name for one in found.values() if one.topology == topology.name)
            return replace(topology, partitions=partitions, members=tuple(sorted(members)))

        return tuple(map(completed, topologies))

    async def _update_job(self, operation: str, job: int, changes: Mapping[str, str], timeout_s: float) -> None:
        pairs = [f"{key}={value}" for key, value in changes.items()]
        deadline = Deadline(timeout_s)
        named = await self._named(job, deadline.require(operation))
        await self._change(operation, deadline.require(operation), "scontrol", "update", f"JobId={named}", *pairs)

    async def _update_node(self, operation: str, node: str, state: str, reason: str, timeout_s: float) -> None:
        why = [f"Reason={reason}"] if reason else []
        await self._change(operation, timeout_s, "scontrol", "update", f"NodeName={node}", f"State={state}", *why)

    async def _requeue(self, job: int, timeout_s: float) -> None:
        await self._change_named(f"requeue job {job}", timeout_s, job, "scontrol", "requeue")

    async def _switches(self, job: Job, timeout_s: float) -> str:
        return job.switches

    async def _release(self, job: int, timeout_s: float) -> None:
        await self._change_named(f"release job {job}", timeout_s, job, "scontrol", "release")

    async def _change_named(self, operation: str, timeout_s: float, job: int, *command: str) -> None:
        deadline = Deadline(timeout_s)
        named = await self._named(job, deadline.require(operation))
        await self._change(operation, deadline.require(operation), *command, named)

    async def _named(self, job: int, timeout_s: float) -> str:
        """The words with which Slurm's commands mean this job alone. The last task of an array has the array's own id,
        which means all tasks there."""
        if job not in self._names:
            await CliSlurm._jobs(self, [job], timeout_s)
        return self._names.get(job) or str(job)

    def _note_names(self, jobs: JobAnswers) -> None:
        """Remember which of these jobs are tasks of arrays. A job that Slurm has forgotten keeps its name."""
        for id, job in jobs.items():
            if isinstance(job, Job):
                self._names[id] = job.array_task
            self._names.setdefault(id, "")
        while len(self._names) > _MOST_NAMES:
            del self._names[next(iter(self._names))]

    async def cancel(self, job: int, signal: int | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        how = [] if signal is None else [f"--signal={signal}"]
        operation = f"cancel job {job}" if signal is None else f"send signal {signal} to job {job}"
        try:
            await self._change_named(operation, timeout_s, job, "scancel", *how)
        except SlurmRefused as error:
            if not error_messages.says_job_ended(error):
                raise

    async def estimate_start(
        self,
        script: Path,
        options: Sequence[str] = (),
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> StartEstimate | NeverStarts | Unknown:
        kept = submit_environment.for_commands(env or os.environ)
        argv = self._argv(["sbatch", "--test-only", *options, str(script)])
        try:
            done = await run_command.run(argv, timeout_s=timeout_s, cwd=cwd, env=kept)
            if done.exit_status != 0:
                raise error_messages.to_error(f"test {script}", done.error_text)
            return start_text.read(done.stderr)
        except SlurmRefused as error:
            return NeverStarts(error.message)
        except (SlurmError, ValueError) as error:
            return Unknown(str(error))

    async def max_switch_wait_s(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int | Unknown:
        return await self._of_configuration(start_text.max_switch_wait_s, timeout_s)

    async def private_data(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> frozenset[str] | Unknown:
        return await self._of_configuration(start_text.private_data, timeout_s)

    async def _of_configuration(self, read: Callable[[str], T], timeout_s: float) -> T | Unknown:
        """What `read` finds in Slurm's configuration."""
        try:
            return read(await self._run("show the configuration", timeout_s, "scontrol", "show", "config"))
        except (SlurmError, ValueError) as error:
            return Unknown(str(error))


async def _parse(program: str, text: str, key: str, read: Callable[[Any], T]) -> list[T]:
    """Reads a command's JSON.

    Raises:
        SlurmUnavailable: the JSON has an unknown form (another Slurm version). It must not be read as "no such job".
    """
    try:
        return [read(record) async for record in json_stream.records(text, key)]
    except ValueError as error:
        raise SlurmUnavailable(f"{program} --json printed JSON of an unknown form: {error!r}") from error
