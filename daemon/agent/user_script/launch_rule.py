"""The rule by which a call of srun in a user's batch script becomes the gang, or stays a call of srun. Pure.

A call is the launch if it has a task on every node of the script, and
- starts one task a node whose words, or the text of a shell or of a script that it names, start one of LAUNCHERS; or
- starts a Python program, directly or in a shell, and `muster submit` has found it to be the line that launches, or
  starts the same program as this line, whose tasks are ranks.
A line that the user has named is the launch, whatever it starts, and no other call is. Everything else is a helper, and
runs as it is written. docs/SCRIPTS.md says the same to users.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from string import Template

from muster.slurm.client.known_programs import (
    CONTAINER_OPTIONS,
    LAUNCHERS,
    MOST_PREFIX_WORDS,
    PREFIXES,
    PYTHON,
    SHELLS,
    container,
    python_program,
)
from muster.slurm.client.launch_settings import BY_LAUNCHER, KNOWN_WHEN_IT_RUNS, NAMED_BY_USER, LaunchLine
from muster.slurm.client.parsing import hostlist
from muster.slurm.client.srun_options import SrunWords

_NO_LAUNCH = ("help", "usage", "version", "test-only", "pty", "multi-prog", "het-group", "no-allocate", "pack-group")
"""Options of calls that train nothing, or that no gang can stand for."""
_NEXT_PROGRAM = ":"
"""A word of srun alone, behind which another program with options of its own begins."""


class Kind(Enum):
    """What becomes of a call of srun."""

    HELPER = "helper"
    LAUNCHER = "launcher"
    RANKS = "ranks"


@dataclass(frozen=True, slots=True)
class Script:
    """What the rule needs to know of the script.

    nodes: its own nodes.
    tasks: what SLURM_NTASKS says; 0: nothing.
    tasks_per_node: what SLURM_NTASKS_PER_NODE says; 0: nothing.
    launch: the line that `muster submit` has found.
    environ: the variables of the call.
    """

    nodes: int
    tasks: int = 0
    tasks_per_node: int = 0
    launch: LaunchLine | None = None
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a call. `warning`: why something that looks like a launch is none; empty: it does not."""

    kind: Kind
    tasks_per_node: int = 0
    everywhere: bool = False
    """A helper with a task on every node of the script."""
    warning: str = ""


def decide(words: SrunWords, script: Script, lines: Sequence[int], text_of: Callable[[str], str]) -> Decision:
    """Decides what a call is.

    Args:
        lines: the line of the script that calls, and those that call the functions around it; empty: not known.
        text_of: reads a program; "" if it is no text.
    """
    if words.has(*_NO_LAUNCH) or not words.command:
        return Decision(Kind.HELPER)
    each = _tasks_per_node(words, script)
    text = _text(words.command, script.environ, text_of)
    launcher, python = bool(LAUNCHERS.search(text)), bool(PYTHON.search(text))
    named = script.launch is not None and is_named(script.launch, words, lines)
    by_user = script.launch is not None and script.launch.why == NAMED_BY_USER
    # The user's line may start another script, and what that calls has no line of this one.
    known = named or bool(lines)
    if not (
        named if by_user and known else launcher or (python and (named or by_user or is_alike(words, text, script)))
    ):
        chooses = words.has("nodelist", "exclude", "relative") or (script.nodes == 1 and words.has("nodes", "ntasks"))
        hidden = named and lines and script.launch and script.launch.why == KNOWN_WHEN_IT_RUNS
        warning = "no launcher and no Python can be seen in what it starts" if hidden else ""
        return Decision(Kind.HELPER, each, everywhere=bool(each) and not chooses, warning=warning)
    if words.has(*CONTAINER_OPTIONS) or container(text):
        return Decision(Kind.HELPER, warning="it runs in a container")
    if _NEXT_PROGRAM in words.command:
        return Decision(Kind.HELPER, warning="it starts several programs (:)")
    if not each:
        return Decision(Kind.HELPER, warning=f"it has not as many tasks on each of the {script.nodes} nodes")
    if launcher and each > 1:
        return Decision(Kind.HELPER, warning=f"it starts a launcher {each} times on a node: use --ntasks=$SLURM_NNODES")
    return Decision(Kind.LAUNCHER if launcher else Kind.RANKS, each)


def starts_ranks(command: Sequence[str], environ: Mapping[str, str], text_of: Callable[[str], str]) -> bool:
    """Whether the command of a step starts a launcher or Python."""
    text = _text(command, environ, text_of)
    return bool(LAUNCHERS.search(text) or PYTHON.search(text))


def is_named(launch: LaunchLine, words: SrunWords, lines: Sequence[int]) -> bool:
    """Whether this call is the line that `muster submit` has found: its number, or its words in their order.

    Words with variables are not compared: the script has their names, and the call has their values.
    """
    if lines:
        return any(launch.line <= line <= (launch.last_line or launch.line) for line in lines)
    given = iter([word for option in words.options for word in option.words] + list(words.command))
    literal = [word for word in launch.words if re.fullmatch(r"[\w./=:,+@%-]+", word)]
    return all(word in given for word in literal if word != "srun")


def is_alike(words: SrunWords, text: str, script: Script) -> bool:
    """Whether this call starts the program of the line that `muster submit` has found, as often as the job asks."""
    if script.launch is None or script.launch.why == BY_LAUNCHER or not (program := python_program(text)):
        return False
    usual = _tasks_per_node(SrunWords((), words.command), script)
    return program == python_program(" ".join(script.launch.words)) and _tasks_per_node(words, script) >= max(usual, 1)


def _tasks_per_node(words: SrunWords, script: Script) -> int:
    """Tasks on each node of the script; 0: not the same number on every node, or not on every node."""
    nodes = _number(words.value("nodes"), script.nodes)
    if words.value("nodelist") is not None:
        nodes = min(nodes, _count(words.value("nodelist") or ""))
    if nodes != script.nodes or words.has("relative"):
        return 0
    each = _number(words.value("ntasks-per-node"), script.tasks_per_node)
    if words.value("ntasks") is None and words.value("ntasks-per-node") is not None:
        return max(each, 0)
    tasks = _number(words.value("ntasks"), script.tasks or nodes * (each or 1))
    return tasks // nodes if tasks > 0 and tasks % nodes == 0 else 0


def _number(text: str | None, default: int) -> int:
    """A number of nodes or tasks: "2", "2-4" (the smallest), and -1 for what is none."""
    if text is None:
        return default
    first = text.partition("-")[0]
    return int(first) if re.fullmatch(r"\d{1,9}", first, re.ASCII) else -1


def _count(text: str) -> int:
    try:
        return len(hostlist.expand(text))
    except ValueError:  # srun says it better
        return 0


def _text(command: Sequence[str], environ: Mapping[str, str], text_of: Callable[[str], str]) -> str:
    """What shows which program starts, with the values of variables: the shell of a task replaces those that stand in
    single quotes."""
    return Template(_written(command, text_of)).safe_substitute(environ)


def _written(command: Sequence[str], text_of: Callable[[str], str]) -> str:
    """The words, and the text of a script that they name."""
    own = " ".join(command)
    for at, word in enumerate(command[:MOST_PREFIX_WORDS]):
        if _name(word) in SHELLS:
            rest = [one for one in command[at + 1 :] if not one.startswith("-")]
            is_text = any(re.fullmatch(r"-\w*c", one) for one in command[at + 1 : at + 4])
            return own if is_text or not rest else f"{own}\n{_code(text_of(rest[0]))}"
        if not word.startswith("-") and "=" not in word and _name(word) not in PREFIXES:
            return f"{own}\n{_program(text_of(word))}"
    return own


def _program(text: str) -> str:
    """What a program of text is: a shell script without its comments, or only the interpreter that it names."""
    if not text.startswith("#!"):
        return ""
    interpreter = text.partition("\n")[0].removeprefix("#!").split()
    return _code(text) if SHELLS & set(map(_name, interpreter)) else " ".join(map(_name, interpreter))


def _code(text: str) -> str:
    """A shell script without its comments."""
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def _name(word: str) -> str:
    return word.rpartition("/")[2]


def script_of(environ: Mapping[str, str], nodes: int, launch: LaunchLine | None) -> Script:
    """The script as its variables describe it."""
    tasks, each = environ.get("SLURM_NTASKS", ""), environ.get("SLURM_NTASKS_PER_NODE", "")
    tasks_per_node = int(each) if each.isdecimal() else 0
    return Script(nodes, int(tasks) if tasks.isdecimal() else 0, tasks_per_node, launch, environ)
