"""`muster submit [options of sbatch] SCRIPT [arguments]`: the user's own script is queued, supervised if that can be.

Standard output is sbatch's, and so are its words and its exit status if it refuses. Muster's notes go to standard
error. sbatch gets the user's file and the user's words, and behind them what is added.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from muster.daemon.host import process_tree
from muster.launcher.command import load_site, print_note
from muster.launcher.errors import LauncherError, SiteFault, WrongInput
from muster.launcher.scripts import bash_env, user_script
from muster.launcher.scripts.asked import NOTHING
from muster.launcher.scripts.call import ScriptCall
from muster.launcher.scripts.plan import Looked, Supervised, Unsupervised, look_over, settle
from muster.launcher.submission.storage_look import look
from muster.slurm.client.backends import run_command
from muster.slurm.client.errors import SlurmUnavailable
from muster.slurm.client.sbatch_options import SbatchOption, value_of
from muster.wording import counted

if TYPE_CHECKING:
    from muster.launcher.scripts.asked import Asked
    from muster.launcher.scripts.job_files import JobFiles
    from muster.launcher.scripts.user_script import UserScript
    from muster.launcher.submission.registration import Registration
    from muster.v1.common_pb2 import JobSpec

_SUBMITTED = re.compile(r"(?:Submitted batch job )?(\d+)")
"""How sbatch says the job's id."""
_STANDARD_INPUT = "/dev/stdin"
"""A script by this name may have arguments."""
_BEFORE_SCRIPT = ("--dry-run", "--spares")
"""Options that some type where the arguments of the script stand."""
_LEFT_OUT = frozenset({"wrap", "quiet"})
"""bash gets the text of --wrap on standard input. With --quiet sbatch would not say the job's id."""
_WHY_ADDED = {
    "no-kill": "the job outlives a lost node",
    "exclusive": "a node that fails is set DOWN, which ends every job on it",
}
_MOST_SHOWN = 100
"""Characters of the launch line in a note."""


async def submit_script(options: argparse.Namespace, call: ScriptCall) -> int:
    """Queues the script. Returns the exit status of sbatch.

    Raises:
        LauncherError: nothing was queued.
    """
    if call.script == ":":
        raise WrongInput(
            "the command line: a heterogeneous job is not supervised", f"write one job of equal nodes. {NOTHING}"
        )
    try:
        os.getcwd()
    except FileNotFoundError:
        raise WrongInput("the folder of this shell has been removed", "submit in another folder") from None
    script = await look(call.script or "the script", partial(user_script.read, call))
    if script is None:  # sbatch says what is wrong with it
        return await _run(_argv(replace(call, words=(*call.words, "--test-only")) if options.dry_run else call), None)
    if call.script and script.given is not None and not script.is_wrapped:
        call = replace(call, script=_STANDARD_INPUT)
    looked = await look(call.script or "the script", partial(_look_over, script, call, options))
    if isinstance(looked, Unsupervised):
        return await _queue_as_it_is(looked, script, call, options)
    for word in call.arguments:
        if word.partition("=")[0] in _BEFORE_SCRIPT:
            print_note(f"muster: {word} stands behind {call.script}, so the script gets it: options stand before it")
    if options.dry_run or looked.asked.last("test-only"):
        return await _try(_settled(looked, call, options), call, options)
    return await _queue(looked, call, options)


def _look_over(script: UserScript, call: ScriptCall, options: argparse.Namespace) -> Looked | Unsupervised:
    wrapper = partial(user_script.wrapper_text, folder=value_of(call.options, "chdir") or os.getcwd())
    return look_over(script, call, options.launch_line, os.environ, wrapper)


async def _queue_as_it_is(
    found: Unsupervised, script: UserScript, call: ScriptCall, options: argparse.Namespace
) -> int:
    instead = f". To have it supervised, {found.instead}" if found.instead else ""
    print_note(f"muster: this job is not supervised, and has no spares: {found.reason}{instead}")
    if options.dry_run:
        print(shlex.join(_argv(call)))
        return 0
    given = None if script.is_wrapped else script.given
    if found.asked.last("test-only"):
        return await _run(_argv(call), given)
    try:
        site = load_site(options)
    except SiteFault as error:
        print_note(f"muster: muster status will not show this job: {error.message}")
        return await _run(_argv(call), given)

    from muster.launcher.scripts.job_files import unsupervised_job
    from muster.launcher.submission.registration import Registration

    async with Registration(site) as registration:
        queued = _Registering(registration, *unsupervised_job(found, script), found.asked)

        def take(line: str) -> None:
            print(line, end="", flush=True)
            if answer := _SUBMITTED.match(line):
                queued.begin(int(answer[1]))

        status = await _run(_argv(call), given, os.environ, take)
        await queued.finish()
    return status


def _settled(looked: Looked, call: ScriptCall, options: argparse.Namespace) -> Supervised:
    found = settle(looked, options, os.environ, os.getcwd())
    words = " ".join(looked.launch.words)
    shown = words if len(words) <= _MOST_SHOWN else f"{words[:_MOST_SHOWN]}..."
    if not _is_quiet(call):
        print_note(f"muster: line {looked.launch.line} becomes the gang: {shown}")
    if looked.beside:
        print_note(
            f"muster: line {looked.beside} starts as many tasks of Python, and is not supervised: "
            f"--launch-line={looked.beside} makes it the gang"
        )
    for note in found.notes:
        print_note(f"muster: {note}")
    return found


async def _try(found: Supervised, call: ScriptCall, options: argparse.Namespace) -> int:
    """Queues nothing: shows what would be added, or lets sbatch say when it could start. This may be another host than
    the one on which the job is submitted, so that a path which it can't see refuses nothing."""
    try:
        await _check_paths(found)
    except WrongInput as error:
        print_note(f"muster: on this host the job would be refused: {error.message}")
    if not options.dry_run:
        return await _run(_argv(call, found), found.looked.script.given)
    for option in found.added:
        before = found.looked.asked.last(option.name)
        why = f"in place of {before}" if before else _WHY_ADDED.get(option.name)
        print(f"+ {option}" + (f"  ({why})" if why else ""))
    print("+ BASH_ENV in the environment: it names what bash reads before the script")
    print(shlex.join(_argv(call, found)))
    return 0


async def _queue(looked: Looked, call: ScriptCall, options: argparse.Namespace) -> int:
    from muster.launcher.runs.kept import RunRecord
    from muster.launcher.scripts.job_files import JobFiles, known_run, waiting_spec
    from muster.launcher.submission.limits import say_doubts, size_words
    from muster.launcher.submission.origin import Asked, choose_origin
    from muster.launcher.submission.refusals import hint_for
    from muster.launcher.submission.registration import Registration

    site = load_site(options)
    async with Registration(site) as registration:
        found = await look("the job's folder", partial(_settled, looked, call, options))
        await _check_paths(found)
        coordinator = await registration.wait_for_answer(force=options.force)
        if options.resume:  # else a script that is queued anew starts at step 0
            found.spec.resume_from = await choose_origin(found.spec, Asked(options.resume), coordinator)
        files = await look("run_dir", partial(JobFiles.write, found, site))
        # Slurm sets the count of a job that it has restarted. What this shell has is that of another job.
        environ = {name: value for name, value in os.environ.items() if name != "SLURM_RESTART_COUNT"}
        environ["BASH_ENV"] = files.bash_env
        run = known_run(found, files.gang, call)
        async with RunRecord(run, os.environ) as record:
            queued = _Registering(registration, files.gang, waiting_spec(run.spec, found.job), looked.asked)
            nodes, spares = found.nodes.nodes or 0, found.job.spares
            doubts = list[asyncio.Future[None]]()

            def ask(job: int) -> None:
                doubts.append(asyncio.ensure_future(say_doubts(job, nodes, spares)))

            answer = _Answer(found, files, call, options, (record.keep, queued.begin, ask))
            status = await _run(_argv(call, found), looked.script.given, environ, answer.take, answer.take_error)
            await queued.finish()
            await asyncio.gather(*doubts)
    if not answer.job and status:
        files.remove()
        hint = hint_for(answer.errors.decode(errors="replace"), found.job, [one.option for one in looked.asked.given])
        if not hint and nodes and spares:
            hint = f"it asks for {size_words(nodes, spares)}"
        print_note("muster: nothing was queued" + (f": {hint}" if hint else ""))
    return status


class _Registering:
    """The registration of a script's job, while sbatch may go on (--wait). Tasks of an array that is supervised
    register themselves."""

    def __init__(self, registration: Registration, gang: str, spec: JobSpec, asked: Asked) -> None:
        self._register = partial(registration.register, gang, spec=spec)
        self._by_task = asked.last("array") is not None and not spec.unsupervised
        self._begun = list[asyncio.Future[bool]]()

    def begin(self, job: int) -> None:
        """sbatch has said the job's id."""
        if not self._by_task:
            self._begun.append(asyncio.ensure_future(self._register(job=job)))

    async def finish(self) -> None:
        """Waits for the answer. What goes wrong is said; the job is queued."""
        try:
            await asyncio.gather(*self._begun)
        except LauncherError as error:
            print_note(f"muster: the job is queued, and muster status will not show it: {error.message}")


async def _check_paths(found: Supervised) -> None:
    from muster.launcher.submission import path_checks

    spec, folder = found.spec, Path(found.spec.work_dir)
    mounts, path = path_checks.MOUNTS.read_text(), os.environ.get("PATH", os.defpath)
    for doubt in await look("the job's folders", partial(path_checks.check_paths, spec, mounts, path, folder)):
        print_note(f"muster: {doubt}")
    await _say_missing_folders(found)


async def _say_missing_folders(found: Supervised) -> None:
    folder, missing = Path(found.spec.work_dir), dict[str, str]()
    for one in filter(None, map(found.looked.asked.last, ("output", "error"))):
        place = await look(str(one), partial(user_script.missing_folder, one.option.value or "", folder))
        missing |= {place: str(one)} if place and place not in missing else {}
    for place, option in missing.items():
        print_note(f"muster: {option}: the folder {place} does not exist, and Slurm makes none: the job would fail")


class _Answer:
    """What sbatch prints, taken line by line: with --wait it goes on running."""

    def __init__(
        self,
        found: Supervised,
        files: JobFiles,
        call: ScriptCall,
        options: argparse.Namespace,
        tell: Sequence[Callable[[int], None]],
    ) -> None:
        """`tell`: is told the job's id."""
        self._found, self._files, self._call, self._options, self._tell = found, files, call, options, tell
        self.job = 0
        """The job's id; 0: sbatch has not said it."""
        self.errors = b""
        """What sbatch has written to its standard error."""

    def take_error(self, chunk: bytes) -> None:
        """Passes on what sbatch writes to its standard error, and notes it."""
        sys.stderr.buffer.write(chunk)
        sys.stderr.flush()
        self.errors += chunk

    def take(self, line: str) -> None:
        """Takes one line of `sbatch --parsable`, and prints what the user has asked for."""
        number, _, cluster = line.strip().partition(";")
        if self.job or not number.isdecimal():
            print(line, end="", flush=True)
            return
        self.job = int(number)
        for tell in self._tell:
            tell(self.job)
        if self._options.json:
            print(self._as_json(), flush=True)
        elif self._found.looked.asked.last("parsable"):
            print(line, end="", flush=True)
        elif not _is_quiet(self._call):
            print(f"Submitted batch job {number}" + (f" on cluster {cluster}" if cluster else ""), flush=True)
        if not _is_quiet(self._call):
            self._say()

    def _as_json(self) -> str:
        import json

        return json.dumps({"slurm_job_id": self.job, "gang_id": self._files.gang, "script": self._call.script})

    def _say(self) -> None:
        nodes, spares = self._found.nodes.nodes, self._found.job.spares
        words = [counted(nodes, "node")] if nodes else []
        words += [counted(spares, "spare")] if spares else []
        size = f" ({' and '.join(words)})" if words else ""
        # A task of an array is shown once it launches.
        first = re.match(r"\d+", self._found.looked.asked.value("array") or "")
        it, name = (f"task {first[0]}, once it runs", f"{self.job}_{first[0]}") if first else ("it", str(self.job))
        print_note(f"muster: job {self.job}{size}. Watch {it}: muster status -f {name}")


def _is_quiet(call: ScriptCall) -> bool:
    """Whether sbatch would not say the job's id: --quiet in a line of the script does not count for it."""
    return any(option.name == "quiet" for option in call.options)


def _argv(call: ScriptCall, found: Supervised | None = None) -> list[str]:
    """The call of sbatch: the user's words, and what is added. Whoever reads the answer wants the number alone."""
    words = list(call.words)
    if found is not None:
        if _LEFT_OUT & {option.name for option in call.options}:
            words = [str(option) for option in call.options if option.name not in _LEFT_OUT]
        words += map(str, found.added)
        words += [] if found.looked.asked.last("test-only") else [str(SbatchOption("parsable"))]
    return ["sbatch", *words, *filter(None, [call.script]), *call.arguments]


async def _run(
    argv: list[str],
    given: bytes | None,
    environ: Mapping[str, str] = os.environ,
    on_line: Callable[[str], None] | None = None,
    on_error: Callable[[bytes], None] | None = None,
) -> int:
    try:
        own = bash_env.environment(environ, process_tree.environment_at_start())
        return await run_command.run_for_caller(argv, env=own, given=given, on_line=on_line, on_error=on_error)
    except SlurmUnavailable as error:
        raise SiteFault(str(error), "submit on a login node of the cluster. Nothing was queued") from None
