"""`muster-agent srun WORDS`: what runs where a user's batch script calls srun.

A helper is replaced by the real srun. The launch becomes the gang (gang_launch). Nothing is half supervised: a call
that looks like a launch and can't become the gang runs as it is written, and the reason is said on stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from muster.daemon.agent.user_script import helper_call, launch_rule, own_nodes, script_job
from muster.daemon.agent.user_script.launch_rule import Decision, Kind
from muster.daemon.agent.user_script.script_job import ScriptJob
from muster.daemon.host.process import step_signals
from muster.slurm.client import launch_settings, srun_options
from muster.slurm.client.srun_options import SrunWords, UnknownOption, read_srun

_MOST_TEXT = 1 << 20
"""Bytes of a program that are searched for a launcher."""

_PAST_MUSTER = "its srun was called by a path, or without the PATH and function of Muster: write srun"


def run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Becomes the real srun, or runs the gang and returns its exit code. In the place of a call that was killed: waits
    for the end of the gang, if that was the launch.

    Raises:
        NoScriptJob: this is no call in a script that `muster submit` has queued.
        SiteError, IdentityError: the message says what would be right.
    """
    given = script_job.as_sbatch_gives(environ)
    program = helper_call.real_srun(given.get("PATH", os.defpath))
    if not program:
        print("muster: srun is not on PATH", file=sys.stderr)
        return helper_call.EXIT_NOT_FOUND
    if script_job.is_of_another(environ):
        helper_call.become(program, words, given)
    job = script_job.script_job(environ)
    if environ.get(script_job.ENDED):
        return _after(int(environ[script_job.ENDED]), job, words, program, environ)
    try:
        read, of_plugins = _read(words, program)
    except UnknownOption:
        helper_call.become(program, words, given)  # srun says it, with the option's name
    if read.value("jobid") not in (None, str(job.job_id), script_job.array_task(environ)):
        helper_call.become(program, words, given)
    decision = _decide(job, read, environ)
    warning = decision.warning
    if decision.kind is not Kind.HELPER and script_job.was_launched(job):
        warning = f"the gang {job.gang} was launched before in this run of the script"
    elif decision.kind is not Kind.HELPER:
        from muster.daemon.agent.user_script import gang_launch  # gRPC takes longer than all the rest

        return gang_launch.run(job, decision, read, of_plugins, program, given)
    if warning:
        _say_unsupervised(job, read, warning)
    helper_call.become(program, *_of_helper(job, decision, read, given))


def _decide(job: ScriptJob, words: SrunWords, environ: Mapping[str, str]) -> Decision:
    script = launch_rule.script_of(environ, len(job.nodes.own), job.settings.launch)
    return launch_rule.decide(words, script, job.lines, _text_of)


def _after(code: int, job: ScriptJob, words: Sequence[str], program: str, environ: Mapping[str, str]) -> int:
    """The exit code of a call whose process has ended with `code`. If it was the launch: when its gang has ended."""
    step_signals.ignore()  # one that the ranks are to get must not end what waits for them
    try:
        read, _ = _read(words, program)
    except UnknownOption:
        return code
    decision = _decide(job, read, environ)
    if decision.kind is Kind.HELPER or not script_job.was_launched(job):
        return code
    from muster.daemon.agent.user_script import gang_launch

    return gang_launch.wait_for_end(job, decision, read, code)


def say_unseen(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Says of a step that comes past Muster that it is not supervised, if it starts ranks. Its srun waits meanwhile.

    Args:
        command: of the step.
        environ: of the step's srun, which says there how many tasks the step has.

    Raises:
        NoScriptJob, SiteError, IdentityError: as `run`.
    """
    if launch_settings.SETTINGS not in environ or script_job.is_of_another(environ):
        return
    job, tasks = script_job.script_job(environ), environ.get("SLURM_NTASKS", "")
    is_small = tasks.isdecimal() and int(tasks) < len(job.nodes.own)
    if not is_small and launch_rule.starts_ranks(command, environ, _text_of):
        _say_unsupervised(job, SrunWords((), tuple(command)), _PAST_MUSTER)


def _say_unsupervised(job: ScriptJob, words: SrunWords, why: str) -> None:
    from muster.daemon.agent.user_script import gang_launch

    text = f"{script_job.describe(job, words)}: {why}. It runs as it is written"
    print(f"muster: not supervised: {text}", file=sys.stderr, flush=True)
    gang_launch.tell(job, text)


def _of_helper(
    job: ScriptJob, decision: Decision, words: SrunWords, environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The words and the environment of the real srun."""
    nodes = job.nodes
    if script_job.was_launched(job):
        from muster.daemon.agent.user_script import gang_launch

        seats = gang_launch.seats(job)
    elif decision.everywhere and nodes.spares and not script_job.output_is_read(os.environ):
        return helper_call.spread_words(words, nodes, decision.tasks_per_node), own_nodes.on_nodes(environ, nodes.all)
    else:
        seats = nodes.own
    return helper_call.helper_words(words, nodes, seats), own_nodes.on_nodes(environ, seats)


def _read(words: Sequence[str], program: str) -> tuple[SrunWords, frozenset[str]]:
    """The words, and the names of plug-ins' options.

    Raises:
        UnknownOption: the installed srun has no such option.
    """
    try:
        return read_srun(words), frozenset()
    except UnknownOption:
        of_plugins = srun_options.described(helper_call.help_text(program))
        return read_srun(words, of_plugins), frozenset(of_plugins) - srun_options.NAMES


def _text_of(name: str) -> str:
    """The text of a program; "" if it is none. A pipe is left alone: who reads it takes its text away."""
    try:
        if not Path(name).is_file():
            return ""
        with Path(name).open("rb") as file:
            found = file.read(_MOST_TEXT)
    except OSError:
        return ""
    return "" if b"\0" in found else found.decode(errors="replace")
