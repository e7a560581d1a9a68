"""`muster submit job.toml [-- sbatch options]`: renders one script, calls sbatch once, registers the gang.

The order ensures that Slurm queues no job without a coordinator: check the spec, check that the coordinator answers,
write the script into the run folder, call sbatch as the user, register the gang with the coordinator. If the
registration fails, the job registers itself when its agents start.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sysconfig
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from muster.checkpoint.format import trusted_folder
from muster.daemon.host import private_file
from muster.daemon.host.plain_text import plain
from muster.daemon.transport import gang_ids
from muster.daemon.transport.site_config import Site
from muster.launcher.command import Command, connect, load_site, print_note
from muster.launcher.coordinator_client import CoordinatorClient
from muster.launcher.errors import LauncherError, NotAllowed, SiteFault, Unavailable, WrongInput
from muster.launcher.spec import spec
from muster.launcher.spec.estimate_tables import write_tables
from muster.launcher.spec.flags import add_options
from muster.launcher.spec.placement import IfNotAvailable
from muster.launcher.submission.memory_check import check_memory
from muster.launcher.submission.refusals import hint_for
from muster.launcher.submission.script import Submission, node_options, render
from muster.launcher.submission.traffic import group_traffic, spreading
from muster.slurm.client.backends.commands import CliSlurm
from muster.slurm.client.errors import NotPermitted, SlurmError, SlurmRefused, SlurmTimeout, SlurmUnavailable
from muster.slurm.client.types import Slurm
from muster.v1.common_pb2 import JobSpec

if TYPE_CHECKING:
    from muster.launcher.fabric import ReportedDomains

SBATCH_TIMEOUT_S = 60.0
"""Seconds to wait for sbatch. A busy slurmctld, or the site's job_submit plugin, may take long."""
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_AGENT = "muster-agent"


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", type=Path, metavar="job.toml")
    parser.add_argument("options", nargs="*", metavar="sbatch option", help="options for sbatch; after --")
    parser.add_argument("--dry-run", action="store_true", help="print the script and do not queue the job")
    parser.add_argument("--force", action="store_true", help="queue the job even if the coordinator does not answer")
    parser.add_argument("--json", action="store_true", help="print job id, gang id and script path as one JSON object")
    add_options(parser)
    parser.usage = "%(prog)s [options] job.toml [-- sbatch options]"


async def _run(options: argparse.Namespace) -> int:
    submission = prepare(options, load_site(options))
    await check_memory(submission.job, CliSlurm())
    submission = await with_shape(submission, CliSlurm(), partial(_reported, options))
    text = render(submission)
    if options.dry_run:
        print(text, end="")
        return 0
    if shutil.which("sbatch") is None:
        raise _no_sbatch()
    await submit(submission, text, options, CliSlurm())
    return 0


COMMAND = Command(_arguments, _run)


def prepare(options: argparse.Namespace, site: Site) -> Submission:
    """Reads job.toml and creates a new gang id.

    Raises:
        WrongInput: job.toml is not valid.
    """
    job, more = spec.load(options.job, options), tuple(options.options)
    # `localhost` would be a different host on each node. Then the nodes use the address in their own settings.
    address = "" if site.coordinator_hosts() & _LOOPBACK else site.coordinator
    return Submission(
        job=job,
        spec=_wire(job, more),
        gang=gang_ids.new_gang_id(job.name, os.geteuid()),
        coordinator=address,
        options=more,
        agent=_agent_command(),
    )


def _wire(job: spec.Job, options: Sequence[str]) -> JobSpec:
    """The job as the coordinator and the agents get it. `options`: those of sbatch on the command line."""
    wire = job.to_proto(work_dir=os.getcwd())
    wire.node_options.extend(node_options(job, options))
    wire.traffic.extend(group_traffic(job))
    wire.estimate_tables = write_tables(job)
    wire.spreading.CopyFrom(spreading(job))
    return wire


async def _reported(options: argparse.Namespace) -> ReportedDomains | None:
    from muster.launcher.node_reports import ask_domains  # few jobs need it

    return await ask_domains(options)


async def with_shape(
    submission: Submission, slurm: Slurm, reported: Callable[[], Awaitable[ReportedDomains | None]] | None = None
) -> Submission:
    """The submission with the options that give the job the nodes that its groups ask for. It says which.

    Args:
        reported: asks for the NVLink domains that nodes report. None: they are not asked.

    Raises:
        WrongInput: Slurm's network has no such place.
    """
    if submission.job.nodes == 1:
        return submission
    from muster.launcher.allocation import ask  # a job of one node does not need it

    job, clusters = submission.job, ask.asking(submission.job)
    shrinks, own_shape = job.placement.if_not_available == "shrink", ask.has_own_shape(job, submission.options)
    found = ask.Allocation(job, job.spares, strict=True)
    if shrinks or not own_shape:
        wanted = () if own_shape else clusters
        found = await ask.allocate(job, wanted, submission.options, render(submission), slurm, reported)
    if found.reason:
        print_note(f"muster: {found.reason}")
    for warning in found.warnings:
        print_note(f"muster: {warning}")
    wire = _wire(found.job, submission.options)
    wire.spares = found.spares
    _add_choice(wire, found.job, ask.if_worse(found, clusters, own_shape=own_shape))
    return replace(
        submission, job=found.job, spec=wire, shape=found.options, shape_notes=tuple(map(plain, found.notes))
    )


def _add_choice(wire: JobSpec, job: spec.Job, choice: IfNotAvailable) -> None:
    """Tells the coordinator what follows if Slurm hands out worse nodes."""
    if choice == "relax":
        return
    wire.if_worse, wire.retries = choice, job.placement.retries
    if choice == "shrink":
        from muster.launcher.allocation.shrink import smaller_jobs  # few jobs need it

        wire.smaller.extend(smaller.nodes for smaller in smaller_jobs(job))


def _agent_command() -> str:
    """ "muster-agent" if it is on PATH, because sbatch passes PATH to the job. Else its absolute path beside this
    program.
    """
    beside = Path(sysconfig.get_path("scripts")) / _AGENT
    return _AGENT if shutil.which(_AGENT) or not beside.exists() else str(beside)


async def submit(submission: Submission, text: str, options: argparse.Namespace, slurm: Slurm) -> int:
    """Queues `text`, registers the gang and prints the result. Returns the Slurm job id.

    Raises:
        LauncherError: nothing was queued.
    """
    site = load_site(options)
    async with AsyncExitStack() as connection:
        coordinator: CoordinatorClient | None = None
        try:
            coordinator = await connection.enter_async_context(connect(site))
            await coordinator.has_gang(submission.gang)
        except (Unavailable, SiteFault) as error:
            if not options.force:
                nothing = "Nothing was queued. With --force the job is queued, and registers itself when it starts"
                raise type(error)(error.message, "\n  ".join(filter(None, (error.hint, nothing)))) from None
            print_note(f"muster: {error.message}; the job is queued because of --force")
            coordinator = None
        path = _write(submission, text)
        try:
            job = await _sbatch(slurm, path, submission.job)
        except LauncherError:
            path.unlink(missing_ok=True)
            raise
        registered = await _register(submission, job, site, coordinator)
    _report(submission, job, path, registered, as_json=options.json)
    return job


def _write(submission: Submission, text: str) -> Path:
    _check_durable(submission.spec.durable_dir)
    folder = Path(submission.spec.run_dir)
    path = folder / f"{submission.gang}.sbatch"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        private_file.create(path, text)  # it holds [env]
    except OSError as error:
        raise WrongInput(
            f"run_dir = {str(folder)!r}: {error.filename or path} can't be written: {error.strerror}",
            "it must be a writable folder on shared storage with free space. Nothing was queued",
        ) from None
    return path


def _check_durable(durable_dir: str) -> None:
    """Checks what this host can see of the durable folder. Storage that only compute nodes see is checked by the
    agents.
    """
    folder = Path(durable_dir)
    nearest = folder if folder.exists() else folder.parent
    if not durable_dir or not nearest.exists():
        return
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        wrong = f"{nearest} is not a folder" if not nearest.is_dir() else f"you may not write to {nearest}"
        raise WrongInput(
            f"durable_dir = {durable_dir!r}: {wrong}",
            "it must be a writable folder on storage that all nodes share. Nothing was queued",
        )
    if folder.exists() and (unsafe := trusted_folder.why_not_restored(folder)):
        raise WrongInput(f"durable_dir = {durable_dir!r}: {unsafe}", "Nothing was queued")


async def _sbatch(slurm: Slurm, path: Path, job: spec.Job) -> int:
    # Slurm sets SLURM_RESTART_COUNT only in restarted jobs. A job that such a job submits must not inherit the value.
    environ = {name: value for name, value in os.environ.items() if name != "SLURM_RESTART_COUNT"}
    try:
        return await slurm.submit(path, cwd=Path.cwd(), env=environ, timeout_s=SBATCH_TIMEOUT_S)
    except SlurmTimeout as error:
        raise Unavailable(
            f"{error}", "the job may have been queued: check with squeue --me before you submit again"
        ) from None
    except SlurmUnavailable as error:
        raise _no_slurm(error) from None
    except NotPermitted as error:
        raise NotAllowed(str(error), "Nothing was queued") from None
    except SlurmRefused as error:
        hint = hint_for(error.message, job)
        raise WrongInput(
            f"sbatch refused the job: {error.message}", f"{hint}. Nothing was queued" if hint else "Nothing was queued"
        ) from None
    finally:
        await slurm.aclose()


def _no_sbatch() -> LauncherError:
    return SiteFault(
        "sbatch is not on PATH: Slurm's commands are not installed on this host",
        "submit on a login node of the cluster, or test the job here with: muster run --local. Nothing was queued",
    )


def _no_slurm(error: SlurmError) -> LauncherError:
    if shutil.which("sbatch") is None:
        return _no_sbatch()
    return Unavailable(f"Slurm does not answer: {error}", "check slurmctld with: scontrol ping. Nothing was queued")


async def _register(submission: Submission, job: int, site: Site, connected: CoordinatorClient | None) -> bool:
    """`connected`: the coordinator that answered before sbatch was called. While sbatch ran, another one may have taken
    over.
    """
    if connected is not None:
        with suppress(Unavailable):
            await connected.register(submission.gang, job, submission.spec)
            return True
    try:
        async with connect(site) as coordinator:
            await coordinator.register(submission.gang, job, submission.spec)
        return True
    except LauncherError as error:
        print_note(f"muster: job {job} is queued but not registered yet: {error.message}")
        print_note("  the job registers itself when its agents start; until then muster status does not show it")
        return False


def _report(submission: Submission, job: int, path: Path, registered: bool, *, as_json: bool) -> None:
    if as_json:
        summary = {"slurm_job_id": job, "gang_id": submission.gang, "script": str(path), "registered": registered}
        print(json.dumps(summary), flush=True)
        return
    print(job, flush=True)
    count = f"{submission.spec.nodes} + {submission.spec.spares} nodes"
    print_note(f"{submission.spec.name} is job {job} ({count}). Watch it: muster status -f {job}")
