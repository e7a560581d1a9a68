"""What becomes of a script before anybody is asked: supervised or as under sbatch, and with which options. Pure."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muster.launcher.errors import WrongInput
from muster.launcher.scripts import keys, size
from muster.launcher.scripts.asked import NOTHING, Asked, ask, refuse
from muster.launcher.scripts.bash_env import Exported, exported
from muster.launcher.scripts.call import ScriptCall
from muster.launcher.scripts.launch_choice import Choice, choose, forgets_nodes
from muster.launcher.scripts.user_script import UserScript, why_not_bash
from muster.launcher.spec.job_options import SHARED
from muster.slurm.client.launch_settings import LaunchLine
from muster.slurm.client.sbatch_options import SbatchOption
from muster.slurm.client.script_lines import SBATCH, LineWord, WrongLine, late_line, words_of_lines

if TYPE_CHECKING:
    from muster.launcher.spec.spec import Job
    from muster.v1.common_pb2 import JobSpec

_CONTAINER_OPTIONS = ("container", "container-image", "container-id")


@dataclass(frozen=True, slots=True)
class Unsupervised:
    """The script runs as under sbatch. `reason` and `instead`: one sentence each."""

    asked: Asked
    reason: str
    instead: str = ""


@dataclass(frozen=True, slots=True)
class Looked:
    """A script that can be supervised."""

    script: UserScript
    asked: Asked
    texts: Mapping[str, LineWord]
    """The keys of `#MUSTER` lines."""
    launch: LaunchLine
    alone: str
    """As of `Choice`."""
    beside: int = 0
    """As of `Choice`."""


@dataclass(frozen=True, slots=True)
class Supervised:
    """What is asked of Slurm beside what the user asks."""

    looked: Looked
    nodes: size.Size
    job: Job
    spec: JobSpec
    added: tuple[SbatchOption, ...]
    """Options behind the user's own, which these override."""
    exported: Exported
    notes: tuple[str, ...]


def look_over(
    script: UserScript,
    call: ScriptCall,
    launch_line: int | None,
    environ: Mapping[str, str],
    wrapper: Callable[[str], str],
) -> Looked | Unsupervised:
    """Whether the script can be supervised.

    Args:
        launch_line: the line that the command line names.
        wrapper: the text of a shell script that a command names.

    Raises:
        WrongInput: a line is wrong. The message names it.
    """
    try:
        lines, own = words_of_lines(script.text, SBATCH), words_of_lines(script.text, keys.MARK)
    except WrongLine as error:
        raise WrongInput(str(error), NOTHING) from None
    asked, texts = ask(lines, environ, call.options), keys.read_lines(own)
    of_script = texts.pop(keys.LAUNCH_LINE, None)
    named = launch_line if launch_line is not None else _line_number(of_script) if of_script else 0
    choice = choose(script.text, size.likely_nodes(asked), named, wrapper, size.tasks_per_node(asked))
    if named and choice.launch is None:
        raise WrongInput(choice.problem, f"{choice.instead}. {NOTHING}")
    if why := _why_unsupervised(script, asked, choice):
        return why
    assert choice.launch
    return Looked(script, asked, texts, choice.launch, choice.alone, choice.beside)


def settle(looked: Looked, options: argparse.Namespace, environ: Mapping[str, str], here: str) -> Supervised:
    """What is asked of Slurm and of Muster. `here`: the folder of the shell.

    Raises:
        WrongInput: that can't be had. The message says why, and what to write.
    """
    from muster.launcher.scripts.template import job_of, message_of  # 60 ms, while the coordinator answers

    asked = looked.asked
    refuse(asked)
    folder = os.path.normpath(os.path.join(here, asked.value("chdir") or ""))
    job = job_of(looked, folder, options)
    nodes = size.size_of(asked, elastic=job.elastic)
    sent = exported(asked.value("export"), environ)
    listed = size.note_of_nodelist(asked, (nodes.most or 0) + job.spares) if job.spares else ""
    return Supervised(
        looked=looked,
        nodes=nodes,
        job=job,
        spec=message_of(job, asked),
        added=(*size.grown(asked, nodes, job.spares), *_always(looked.script, asked), *sent.options),
        exported=sent,
        notes=tuple(filter(None, (listed, _override(asked), _late(looked.script), _forgotten(looked, nodes)))),
    )


def _line_number(word: LineWord) -> int:
    if not re.fullmatch(r"\d{1,9}", word.text, re.ASCII):
        raise WrongInput(f"line {word.line}: {keys.LAUNCH_LINE}={word.text} must be the number of a line", NOTHING)
    return int(word.text)


def _why_unsupervised(script: UserScript, asked: Asked, choice: Choice) -> Unsupervised | None:
    if why := why_not_bash(script.text):
        return Unsupervised(asked, f"line 1: {why}", "begin the script with #!/bin/bash")
    if one := asked.last(*_CONTAINER_OPTIONS):
        return Unsupervised(asked, f"{one} puts the script into a container, which is not supervised yet")
    try:
        exported(asked.value("export"), {})
    except ValueError as error:
        return Unsupervised(asked, str(error), "write --export=NONE")
    if choice.launch is None:
        where = f"line {choice.line}: " if choice.line else ""
        return Unsupervised(asked, f"{where}{choice.problem}", choice.instead)
    return None


def _always(script: UserScript, asked: Asked) -> list[SbatchOption]:
    """What each supervised job needs: it outlives a lost node, and shares none."""
    exclusive = asked.last("exclusive")
    own = bool(exclusive and exclusive.option.value not in SHARED)
    name = script.is_wrapped and not asked.last("job-name")
    return [
        *([SbatchOption("job-name", script.name)] if name else []),
        SbatchOption("no-kill"),
        *([] if own else [SbatchOption("exclusive")]),
    ]


def _late(script: UserScript) -> str:
    line = late_line(script.text, keys.MARK)
    return f"line {line}: {keys.MARK} is read before the first command only, as {SBATCH} is" if line else ""


def _forgotten(looked: Looked, nodes: size.Size) -> str:
    is_short = nodes.fewest not in (None, 1) and forgets_nodes(looked.launch)
    where = f"line {looked.launch.line}"
    return f"{where}: torchrun without --nnodes is for one node: write --nnodes=$SLURM_NNODES" if is_short else ""


def _override(asked: Asked) -> str:
    one = asked.last("exclusive")
    return f"{one} is overridden: no other job may share the nodes" if one and one.option.value in SHARED else ""
