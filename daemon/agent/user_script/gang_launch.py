"""The launch of a user's batch script, carried out: it becomes what `muster-agent batch` is, and ends with the gang."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from muster import exit_codes
from muster.daemon.agent.batch.batch_process import (
    LAUNCH_OF_SCRIPT,
    RemoteCoordinator,
    ViewFailure,
    pass_signals_on,
    run_batch,
    wait_for_gang,
)
from muster.daemon.agent.batch.run_hooks import Hooked
from muster.daemon.agent.batch.run_summary import Summarised
from muster.daemon.agent.batch.srun import Allocation, Step
from muster.daemon.agent.ranks import rank_environment
from muster.daemon.agent.start_checks import meeting_address, node_problems
from muster.daemon.agent.user_script import launch, output_options, own_nodes, rank_binding, script_job
from muster.daemon.agent.user_script.launch_rule import Decision, Kind
from muster.daemon.agent.user_script.script_job import ScriptJob
from muster.daemon.host import private_file, rank_log_files
from muster.daemon.transport.identity import IdentityError
from muster.daemon.transport.site_config import Site, SiteError, start_logging
from muster.exit_codes import EXIT_FAILED_AGAIN
from muster.slurm.client import launch_settings
from muster.slurm.client.batch_script import MAX_SPEC_BYTES, RANK_ENVIRONMENT, spec_text
from muster.slurm.client.srun_options import SrunWords
from muster.v1.api_pb2 import BatchRef, GangView
from muster.v1.common_pb2 import JobSpec
from muster.wording import counted

EXIT_CANNOT_LAUNCH = 64
"""EX_USAGE: the launch needs something that Muster can't give."""
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
"""Signals that srun passes on to its tasks."""
_OF_SIGNALS = {exit_codes.of_shell(-number) for number in (signal.SIGINT, signal.SIGTERM)}


def run(
    job: ScriptJob, decision: Decision, words: SrunWords, site: Collection[str], srun: str, environ: Mapping[str, str]
) -> int:
    """Launches the gang and returns its exit code.

    Raises:
        SiteError, IdentityError: the message says what would be right.
    """
    nodes, spares = job.nodes, len(job.nodes.spares)
    try:
        spec = launch.launch_spec(job.settings.spec, decision, words, nodes, os.getcwd())
        tasks, stdout = spec.nodes * spec.ranks_per_node, script_job.output_file(job.shell)
        output = output_options.script_output(words, environ, decision, tasks, os.getcwd(), stdout)
        spec.script_output.CopyFrom(output)
    except FileNotFoundError:
        return _refuse("the working folder of the script has been removed")
    except UnicodeEncodeError as error:
        return _refuse(f"{error.object!r} is no UTF-8")
    spec.array_task = script_job.array_task(environ)
    known = job.line or (job.settings.launch.line if job.settings.launch else 0)
    spec.script_goes_on = script_job.goes_on(script_job.script_text(job.shell), known)
    if (size := len(spec_text(spec))) > MAX_SPEC_BYTES:
        return _refuse(f"it has {size} bytes of words, and {MAX_SPEC_BYTES} are possible")
    try:
        file = _keep(job, spec.run_dir, launch.launch_environment(environ, words.value("export")))
        binding = launch_settings.binding_file(spec.run_dir, job.gang)
        rank_binding.keep(binding, words, environ, decision, nodes, srun)
    except OSError as error:
        return _refuse(f"{error.filename or spec.run_dir} can't be written: {error.strerror}")
    spare = f" and {counted(spares, 'spare')}" if spares else ""
    print(
        f"muster: supervised: {script_job.describe(job, words)} on {counted(spec.nodes, 'node')}{spare}",
        file=sys.stderr,
    )
    meeting_address.tell_if_fixed(spec, nodes.own[0])
    _become_agents_parent(job, spec, file, environ)
    site_settings = Site.load()
    start_logging("warning", "text", "muster")
    remote = _remote(job, site_settings)
    kept = output_options.srun_words(words, environ, output, decision.kind)
    gpus = own_nodes.gpus_option(environ, nodes)
    argv = launch.agents_srun(srun, job.settings.agent, decision, words, len(nodes.all), sorted(site), kept, gpus)
    allocation = Allocation.of(spec, job.job_id, job.restarts, own_nodes.on_nodes(environ, nodes.all))
    sys.stdout.flush()
    code = asyncio.run(run_batch(argv, _seen(job, remote), allocation, LAUNCH_OF_SCRIPT, _FORWARDED, ends_step=True))
    tell_if_nothing_started(job, words, remote, code)
    return _exit_code(job, code, decision.kind)


def wait_for_end(job: ScriptJob, decision: Decision, words: SrunWords, code: int) -> int:
    """Waits for the end of a gang whose launch was killed, and returns its exit code. `code`: that of the launch, if
    the gang is over.

    Raises:
        SiteError, IdentityError: the message says what would be right.
    """
    site = Site.load(coordinator=job.settings.coordinator or None)
    start_logging("warning", "text", "muster")
    killed = _after_kill(job, _remote(job, site), script_job.describe(job, words), code)
    return _exit_code(job, asyncio.run(killed), decision.kind)


async def _after_kill(job: ScriptJob, remote: RemoteCoordinator, call: str, code: int) -> int:
    step = Step(Allocation(job.job_id), name=Path(job.settings.agent).name)
    seen = _seen(job, remote)
    pass_signals_on(step, seen, LAUNCH_OF_SCRIPT, _FORWARDED)
    view = await remote.view()
    if view is ViewFailure.UNKNOWN_GANG or (isinstance(view, GangView) and view.final):
        return code
    what = "its ranks, which train on" if isinstance(view, GangView) else "the coordinator"
    print(f"muster: {call}: it was killed, and waits for {what}", file=sys.stderr, flush=True)
    return await wait_for_gang(code, seen, LAUNCH_OF_SCRIPT, step)


def _seen(job: ScriptJob, remote: RemoteCoordinator) -> Hooked:
    """The coordinator, with what follows from each view of the gang."""
    spec = job.settings.spec
    return Hooked(Summarised(remote, spec.run_dir, job.gang), spec.hooks, spec.run_dir)


def _exit_code(job: ScriptJob, code: int, kind: Kind) -> int:
    """What the launch ends with, whose gang has ended with `code`."""
    if code in _OF_SIGNALS and kind is Kind.LAUNCHER:
        return exit_codes.OF_TORCHRUN
    if code != EXIT_FAILED_AGAIN:
        return code
    return exit_code_of_ranks(rank_log_files.failed_codes(job.settings.spec.run_dir, job.gang), kind)


def tell_if_nothing_started(job: ScriptJob, words: SrunWords, remote: RemoteCoordinator, code: int) -> None:
    """Tell the coordinator of a launch that is over, and of which no agent has attached."""
    view = asyncio.run(remote.view())
    if isinstance(view, GangView) and view.awaits_launch:
        how = f"has failed with exit code {code} before its ranks started" if code else "has launched no ranks"
        tell(job, f"{script_job.describe(job, words)}: it {how}")


def exit_code_of_ranks(codes: Sequence[int], kind: Kind) -> int:
    """What srun would end with, whose tasks have failed so; of a launcher: what torchrun ends with."""
    if kind is Kind.LAUNCHER:
        return exit_codes.of_launcher(EXIT_FAILED_AGAIN)
    return max(map(exit_codes.of_shell, codes), default=EXIT_FAILED_AGAIN)


def _refuse(why: str) -> int:
    print(f"muster: the launch can't become a gang: {why}", file=sys.stderr)
    return EXIT_CANNOT_LAUNCH


def _keep(job: ScriptJob, run_dir: str, environ: Mapping[str, str]) -> str:
    """Writes the files of a launch, and returns the path of its environment. Raises OSError."""
    path = launch_settings.environment_file(run_dir, job.gang)
    private_file.replace(Path(path), rank_environment.environment_text(environ))
    private_file.replace(script_job.mark(job), script_job.run_of(job))
    return path


def _become_agents_parent(job: ScriptJob, spec: JobSpec, file: str, environ: Mapping[str, str]) -> None:
    """srun and the agents inherit the environment of this process, in which nothing of the script's may harm them."""
    own = launch.agents_environment(environ)
    own |= {"MUSTER_GANG": job.gang, "MUSTER_SPEC": spec_text(spec), RANK_ENVIRONMENT: file}
    if job.settings.coordinator:
        own["MUSTER_COORDINATOR"] = job.settings.coordinator
    node_problems.write_tokens(spec, own)
    os.environ.clear()
    os.environ.update(own)


def seats(job: ScriptJob) -> tuple[str, ...]:
    """The nodes that carry ranks, or did when the gang ended, in the order of their ranks. The script's own nodes, if
    nobody knows better."""
    site = Site.load(coordinator=job.settings.coordinator or None)
    view = asyncio.run(_remote(job, site).view())
    if isinstance(view, ViewFailure):
        return job.nodes.own
    found = dict.fromkeys(rank.node for rank in view.ranks if rank.node)
    return tuple(found) or job.nodes.own


def tell(job: ScriptJob, unsupervised: str) -> None:
    """Tell the coordinator, if it answers, which launch is not supervised, and why: `muster status` shows it."""
    with suppress(SiteError, IdentityError):  # the launch runs without it, and the output says why
        remote = _remote(job, Site.load(coordinator=job.settings.coordinator or None), unsupervised)
        asyncio.run(remote.view())


def _remote(job: ScriptJob, site: Site, unsupervised: str = "") -> RemoteCoordinator:
    run = BatchRef(
        gang_id=job.gang, slurm_job_id=job.job_id, slurm_restart_count=job.restarts, unsupervised=unsupervised
    )
    return RemoteCoordinator(site.coordinator, site.credentials(), run, site.trust())
