"""`muster submit job.toml [-- sbatch options]`: renders one script, calls sbatch once, registers the gang.

A batch script of the user's own is passed to launcher/scripts.

The order ensures that Slurm queues no job without a coordinator: ask the coordinator and check the spec at the same
time, write the script into the run folder, call sbatch as the user, register the gang with the coordinator. If the
registration fails, the job registers itself when its agents start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sysconfig
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.daemon.host import private_file
from muster.daemon.host.plain_text import plain
from muster.daemon.transport import gang_ids
from muster.daemon.transport.site_config import Site
from muster.launcher.command import Command, load_site, print_note
from muster.launcher.errors import LauncherError, NotAllowed, SiteFault, Unavailable, WrongInput
from muster.launcher.runs.kept import RunRecord
from muster.launcher.spec.flags import add_options
from muster.launcher.submission import path_checks
from muster.launcher.submission.job_message import add_choice, job_message, lacks_peak
from muster.launcher.submission.limits import doubts_of
from muster.launcher.submission.notes import notes
from muster.launcher.submission.origin import Asked, add_origin_options, choose_origin
from muster.launcher.submission.refusals import hint_for
from muster.launcher.submission.registration import Registration
from muster.launcher.submission.script import Submission, render, sbatch_options
from muster.launcher.submission.storage_look import LOOK_S, look
from muster.slurm.client import submit_environment
from muster.slurm.client.backends.sbatch import Sbatch
from muster.slurm.client.errors import NotPermitted, SlurmError, SlurmRefused, SlurmTimeout, SlurmUnavailable
from muster.slurm.client.parsing.sbatch_request import time_limit_s
from muster.slurm.client.sbatch_options import SbatchOption, WrongOption, read_words, value_of
from muster.v1.common_pb2 import JobSpec
from muster.wording import counted

if TYPE_CHECKING:
    from muster.launcher.fabric import ReportedDomains
    from muster.launcher.spec.spec import Job
    from muster.slurm.client.types import Slurm

SBATCH_TIMEOUT_S = 60.0
"""Seconds to wait for sbatch. A busy slurmctld, or the site's job_submit plugin, may take long."""
_PEAK_TIMEOUT_S = 5.0
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_AGENT = "muster-agent"


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job",
        type=Path,
        metavar="job.toml | SCRIPT",
        help="the job; docs/JOBTOML.md describes it. Or a script for sbatch, with its options before it and its "
        "arguments behind it; docs/SCRIPTS.md",
    )
    parser.add_argument(
        "options", nargs="*", default=[], metavar="sbatch option", help="options for sbatch; after job.toml --"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script and do not queue the job")
    parser.add_argument("--force", action="store_true", help="queue the job even if the coordinator does not answer")
    add_origin_options(parser)
    parser.add_argument("--json", action="store_true", help="print job id, gang id and script path as one JSON object")
    parser.add_argument("--launch-line", type=int, metavar="N", help="the line of a script that becomes the gang")
    add_options(parser)
    parser.usage = "%(prog)s [options] job.toml [-- sbatch options] | SCRIPT [arguments]"
    parser.set_defaults(call=None)


def _split(words: Sequence[str], own: Mapping[str, argparse.Action]) -> tuple[list[str], dict[str, Any]]:
    """Takes the words for sbatch out of the command line, if it names a script."""
    from muster.launcher.scripts.command_words import split_words  # a job.toml does not need it

    return split_words(words, own)


async def _run(options: argparse.Namespace) -> int:
    if options.call is not None:
        from muster.launcher.scripts.queueing import submit_script

        return await submit_script(options, options.call)
    try:
        site = load_site(options)
    except SiteFault:
        from muster.launcher.spec import spec

        spec.load(options.job, options)  # what the user can mend is said first
        raise
    if options.dry_run:
        await _show_script(await prepared(options, site), options)
        return 0
    sbatch = Sbatch()
    async with Registration(site) as registration:
        ready = asyncio.ensure_future(sbatch.get_ready())
        try:
            submission = await prepared(options, site)
        finally:
            await ready  # asyncio loses a process whose start is cancelled
        await _check_paths(submission.spec, options.job)
        submission = await _shaped(submission, options)
        if shutil.which("sbatch") is None:
            raise _no_sbatch()
        async with RunRecord(submission, os.environ) as record:
            record.keep(await submit(submission, options, sbatch, registration))
    return 0


COMMAND = Command(_arguments, _run, split=_split)


async def prepared(options: argparse.Namespace, site: Site, deadline_s: float = LOOK_S) -> Submission:
    """`prepare`, with a deadline for the storage of job.toml. Meanwhile the coordinator answers.

    To import the classes of job.toml takes 60 ms.
    """
    return await look(str(options.job), partial(prepare, options, site), deadline_s)


async def _show_script(submission: Submission, options: argparse.Namespace) -> None:
    """Prints the script of a dry run. This may be another host than the one on which the job is submitted, so that a
    path which it can't see refuses nothing."""
    try:
        await _check_paths(submission.spec, options.job)
    except WrongInput as error:
        print_note(f"muster: on this host the job would be refused: {error.message}")
    print(render(await _shaped(submission, options)), end="")


async def _check_paths(spec: JobSpec, job_toml: Path) -> None:
    mounts, search_path = path_checks.MOUNTS.read_text(), os.environ.get("PATH", os.defpath)
    paths = "a path of the job (run_dir, work_dir, command)"
    check = partial(path_checks.check_paths, spec, mounts, search_path, Path(os.path.abspath(job_toml)).parent)
    for doubt in await look(paths, check):
        print_note(f"muster: {doubt}")


def prepare(options: argparse.Namespace, site: Site) -> Submission:
    """Reads job.toml and creates a new gang id.

    Raises:
        WrongInput: job.toml is not valid.
    """
    from muster.launcher.spec import spec  # not before the coordinator is asked

    job = spec.load(options.job, options)
    more = _more_options(job, options.options, os.environ)
    # `localhost` would be a different host on each node. Then the nodes use the address in their own settings.
    address = "" if site.coordinator_hosts() & _LOOPBACK else site.coordinator
    return Submission(
        job=job,
        spec=job_message(job, more),
        gang=gang_ids.new_gang_id(job.name, os.geteuid()),
        coordinator=address,
        options=more,
        agent=_agent_command(),
    )


def _more_options(job: Job, words: Sequence[str], environ: Mapping[str, str]) -> tuple[SbatchOption, ...]:
    """The options of the command line, and those that the shell's variables ask for.

    Raises:
        WrongInput: a word is no option, or a variable sends jobs to another cluster.
    """
    from muster.launcher.spec.job_options import all_options

    for name in submit_environment.OTHER_CLUSTER:
        if environ.get(name):
            raise WrongInput(
                f"{name} = {environ[name]!r} sends jobs to another cluster, where this coordinator supervises none",
                f"unset {name}, or submit on a login node of that cluster. Nothing was queued",
            )
    try:
        given = read_words(words)
    except WrongOption as error:
        raise WrongInput(str(error), "arguments of the script belong into command of job.toml") from None
    taken = submit_environment.site_options(environ, all_options(job, given))
    if ignored := submit_environment.ignored(environ, taken):
        print_note(f"muster: the job does not follow {', '.join(ignored)} of this shell: job.toml says what it needs")
    return (*taken, *given)


async def _shaped(submission: Submission, options: argparse.Namespace) -> Submission:
    """The submission with what its groups ask for, if the nodes have the memory that its state needs."""
    if submission.job.model.parameters:
        from muster.launcher.submission.memory_check import check_memory  # few jobs say how large their model is
        from muster.slurm.client.backends.commands import CliSlurm

        await check_memory(submission.job, CliSlurm())
    shaped = await with_shape(submission, reported=partial(_reported, options))
    if lacks_peak(shaped.spec, shaped.job):
        shaped.spec.peak_flops = await _peak_on_nodes(shaped.job)
    return shaped


async def _peak_on_nodes(job: Job) -> float:
    from muster.launcher.plan.arithmetic import peak_on_nodes  # most jobs don't say what a step computes
    from muster.slurm.client.backends.commands import CliSlurm
    from muster.slurm.client.types import Node, Unknown

    try:
        found = await CliSlurm().nodes(timeout_s=_PEAK_TIMEOUT_S)
    except SlurmError:  # sbatch will say it
        return 0.0
    return 0.0 if isinstance(found, Unknown) else peak_on_nodes(job, [n for n in found.values() if isinstance(n, Node)])


async def _reported(options: argparse.Namespace) -> ReportedDomains | None:
    from muster.launcher.fabric import ask_domains  # few jobs need it

    return await ask_domains(options)


async def with_shape(
    submission: Submission,
    slurm: Slurm | None = None,
    reported: Callable[[], Awaitable[ReportedDomains | None]] | None = None,
) -> Submission:
    """The submission with the options that give the job the nodes that its groups ask for. It says which.

    Args:
        slurm: the client; None: Slurm's commands.
        reported: asks for the NVLink domains that nodes report. None: they are not asked.

    Raises:
        WrongInput: Slurm's network has no such place.
    """
    if submission.job.nodes + submission.job.spares == 1:
        return submission
    # A job of one node in all does not need them.
    from muster.launcher.allocation import ask
    from muster.slurm.client.backends.commands import CliSlurm

    job, clusters = submission.job, ask.asking(submission.job)
    shrinks, own_shape = job.placement.if_not_available == "shrink", ask.has_own_shape(job, submission.options)
    found = ask.Allocation(job, job.spares, strict=True)
    if shrinks or not own_shape:
        wanted = () if own_shape else clusters
        found = await ask.allocate(job, wanted, submission.options, render(submission), slurm or CliSlurm(), reported)
    if found.reason:
        print_note(f"muster: {found.reason}")
    for warning in found.warnings:
        print_note(f"muster: {warning}")
    message = job_message(found.job, submission.options)
    message.spares = found.spares
    add_choice(message, found.job, ask.if_worse(found, clusters, own_shape=own_shape))
    return replace(
        submission, job=found.job, spec=message, shape=found.options, shape_notes=tuple(map(plain, found.notes))
    )


def _agent_command() -> str:
    """ "muster-agent" if it is on PATH, because sbatch passes PATH to the job. Else its absolute path beside this
    program.
    """
    beside = Path(sysconfig.get_path("scripts")) / _AGENT
    return _AGENT if shutil.which(_AGENT) or not beside.exists() else str(beside)


async def submit(
    submission: Submission, options: argparse.Namespace, slurm: Slurm | Sbatch, registration: Registration
) -> int:
    """Queues the job, registers the gang and prints the result. Returns the Slurm job id.

    Raises:
        LauncherError: nothing was queued.
    """
    render(submission)  # what is wrong with it is said before anybody is asked
    coordinator = await registration.wait_for_answer(force=options.force)
    durable_dir = submission.spec.durable_dir
    await look(f"durable_dir = {durable_dir!r}", partial(_check_durable, durable_dir))
    asked = Asked(options.resume, options.fresh)
    submission.spec.resume_from = await choose_origin(submission.spec, asked, coordinator)
    text = render(submission)
    path = _write(submission, text)
    try:
        job = await _sbatch(slurm, path, submission)
    except LauncherError:
        path.unlink(missing_ok=True)
        raise
    registered, doubts = await asyncio.gather(
        registration.register(submission.gang, job, submission.spec),
        doubts_of(job, submission.spec.nodes, submission.spec.spares),
    )
    _report(submission, job, path, registered, as_json=options.json)
    of_script = list(sbatch_options(submission))
    time, *named = (value_of(of_script, name) or "" for name in ("time", "nodelist", "reservation"))
    for note in (*doubts, *notes(submission.spec, time_limit_s(time), *named)):
        print_note(f"muster: {note}")
    return job


def _write(submission: Submission, text: str) -> Path:
    folder = Path(submission.spec.run_dir)
    path = folder / f"{submission.gang}.sbatch"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        private_file.create(path, text)  # it holds [env]
        doubt = path_checks.doubt_of_output(folder)
    except OSError as error:
        raise WrongInput(
            f"run_dir = {str(folder)!r}: {error.filename or path} can't be written: {error.strerror}",
            "it must be a writable folder on shared storage with free space. Nothing was queued",
        ) from None
    if doubt:
        print_note(f"muster: {doubt}")
    return path


def _check_durable(durable_dir: str) -> None:
    """Checks what this host can see of the durable folder. Storage that only compute nodes see is checked by the
    agents.
    """
    if "://" in durable_dir:
        _check_durable_store(durable_dir)
        return
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
    space = shutil.disk_usage(nearest)
    if space.total and space.free < 2**20:  # it may be free again when the job starts
        print_note(f"muster: durable_dir = {durable_dir!r} is full: no checkpoint is written until space is free there")
    if not folder.exists():
        return
    from muster.checkpoint.durable import trusted_folder  # few jobs need it

    if unsafe := trusted_folder.why_not_restored(folder):
        raise WrongInput(f"durable_dir = {durable_dir!r}: {unsafe}", "Nothing was queued")


def _check_durable_store(url: str) -> None:
    from muster.checkpoint.durable import locations, object_store  # few jobs need it

    try:
        problem = locations.find_problem(url)
    except object_store.PackageMissing as error:
        print_note(f"muster: durable_dir is not checked on this host: {error}")
        return
    if problem:
        raise WrongInput(problem, "Nothing was queued")


async def _sbatch(slurm: Slurm | Sbatch, path: Path, submission: Submission) -> int:
    environ = submit_environment.for_sbatch(os.environ, submission.options)
    try:
        return await slurm.submit(path, cwd=Path.cwd(), env=environ, timeout_s=SBATCH_TIMEOUT_S)
    except SlurmTimeout as error:
        raise Unavailable(
            f"{error}", "the job may have been queued: check with squeue --me before you submit again"
        ) from None
    except SlurmUnavailable as error:
        raise _no_slurm(error) from None
    except SlurmRefused as error:
        hint = hint_for(error.message, submission.job, submission.options)
        way_out = f"{hint}. Nothing was queued" if hint else "Nothing was queued"
        if isinstance(error, NotPermitted):
            raise NotAllowed(str(error), way_out) from None
        raise WrongInput(f"sbatch refused the job: {error.message}", way_out) from None
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


def _report(submission: Submission, job: int, path: Path, registered: bool, *, as_json: bool) -> None:
    if as_json:
        summary = {"slurm_job_id": job, "gang_id": submission.gang, "script": str(path), "registered": registered}
        print(json.dumps(summary), flush=True)
        return
    print(job, flush=True)
    spares = f" and {counted(submission.spec.spares, 'spare')}" if submission.spec.spares else ""
    count = counted(submission.spec.nodes, "node") + spares
    print_note(f"{submission.spec.name} is job {job} ({count}). Watch it: muster status -f {job}")
