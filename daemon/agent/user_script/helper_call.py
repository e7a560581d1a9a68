"""A call of srun that stays one: on which nodes it runs, and the start of the real srun. The words are pure.

Slurm's allocation has spares, and keeps nodes that a swap has left. A helper knows of neither: it runs on the nodes
that carry ranks at this moment, and before the launch on the script's own. What it stages on every node must be there
when a spare takes over, so such a helper runs on spares, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from muster.daemon.agent.user_script.own_nodes import Nodes
from muster.slurm.client.srun_options import SrunWords

_CHOOSES_NODES = ("nodelist", "relative", "nodefile")
EXIT_NOT_FOUND, _EXIT_CANNOT_START = 127, 126
_HELP_TIMEOUT_S = 10.0


def helper_words(words: SrunWords, nodes: Nodes, seats: Sequence[str]) -> list[str]:
    """The words after the name of srun for a helper on `seats`. How many nodes these are is in its environment."""
    left_out = [node for node in nodes.all if node not in seats]
    if not left_out or words.has(*_CHOOSES_NODES):
        return _with(words, [])
    return _with(words, [f"--exclude={','.join(filter(None, [words.value('exclude'), *left_out]))}"])


def spread_words(words: SrunWords, nodes: Nodes, tasks_per_node: int) -> list[str]:
    """The words after the name of srun for a helper on every node of the job, with as many tasks on spares."""
    count = len(nodes.all)
    return _with(words, [f"--nodes={count}", f"--ntasks={count * tasks_per_node}"])


def _with(words: SrunWords, added: Sequence[str]) -> list[str]:
    given = [word for option in words.options for word in option.words]
    return [*given, *added, *words.command]


def real_srun(search_path: str) -> str:
    """The first srun on PATH; empty: there is none."""
    for folder in search_path.split(os.pathsep):
        program = Path(folder or ".") / "srun"
        if os.access(program, os.X_OK) and program.is_file():
            return str(program)
    return ""


def help_text(program: str) -> str:
    """What srun says of its options, those of the site's plug-ins included."""
    return printed(program, ["--help"], os.environ, _HELP_TIMEOUT_S)


def printed(program: str, words: Sequence[str], environ: Mapping[str, str], within: float) -> str:
    """What the real srun prints; "" if it can't be started, or takes longer than `within` seconds."""
    try:
        return subprocess.run(
            [program, *words],
            env=dict(environ),
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=within,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def become(program: str, words: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replaces this process by the real srun: its signals and its exit code are the caller's."""
    try:
        os.execve(program, ["srun", *words], dict(environ))
    except OSError as error:
        print(f"muster: srun can't be started: {error.strerror}", file=sys.stderr)
        sys.exit(_EXIT_CANNOT_START)
