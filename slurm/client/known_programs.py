"""Programs that the lines of batch scripts start, as their text names them.

`muster submit` reads a script before it is queued, and `muster-agent srun` decides about each call where it runs. Both
know the same programs.
"""

from __future__ import annotations

import re

BEGIN, END = r"(?:^|[\s/\"'=;&|({])", r"(?=[\s\"';&|)}]|$)"
"""Patterns: what stands before and after a program's name in a line of a shell."""
SHELLS = frozenset(("bash", "sh", "dash", "zsh", "ksh"))
PREFIXES = frozenset(
    ("builtin", "command", "env", "eval", "exec", "nice", "nohup", "numactl", "stdbuf", "taskset", "time", "timeout")
)
"""Programs that start the program which their arguments name."""
MOST_PREFIX_WORDS = 12
"""Words before the program itself that are looked at: `env A=1 numactl --membind=0 python`."""
LAUNCHERS = re.compile(
    rf"{BEGIN}(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate-launch|accelerate\s+launch"
    rf"|accelerate\.commands\.launch|muster\s+run){END}"
)
"""What they would start is handed over to the agent, where the gang takes over. `muster run` starts torchrun."""
PYTHON = re.compile(rf"{BEGIN}python[\d.]*{END}")
_CONTAINER = re.compile(
    rf"--container(?:-id|-image|-name)?(?==|{END})|{BEGIN}(?:(?:apptainer|singularity|docker|enroot|podman|podman-hpc|sarus)"
    rf"(?:_wrapper)?(?:[ \t]+-\S+)*[ \t]+(?:exec|run|shell|start)|shifter|ch-run){END}"
)
CONTAINER_OPTIONS = ("container", "container-id", "container-image", "container-name", "environment", "image")
"""Of srun and of its plug-ins. A program of the user's may have an --image or an --environment of its own."""
_PROGRAM = re.compile(r"(?<![\w.-])[\w.-]+\.py(?!\w)|(?<=\s-m )[\w.]+")


def python_program(text: str) -> str:
    """The Python file or module that a command names first; empty: none."""
    found = _PROGRAM.search(text)
    return found[0] if found else ""


def before_program(text: str) -> str:
    """What stands before a launcher or Python. What stands behind it are arguments of the user's program."""
    found = [one.start() for pattern in (LAUNCHERS, PYTHON) if (one := pattern.search(text))]
    return text[: min(found, default=len(text))]


def container(text: str) -> str:
    """What starts a container before the user's program; empty: nothing does."""
    found = _CONTAINER.search(before_program(text))
    return found[0].strip(" /\"'=;&|({") if found else ""
