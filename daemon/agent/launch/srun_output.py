"""What srun's --output, --error and --label mean where ranks take the place of tasks.

srun knows one task a node, the agent. So whatever differs from task to task is done here: labels, and files whose names
hold the number of the task (%t) or the node (%n, %N). All else is srun's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from muster.v1.common_pb2 import ScriptOutput

OF_TASK = re.compile(r"%\d*[tnN]")
"""In a name: each task, or each node, has a file of its own."""
_PATTERN = re.compile(r"%(\d*)([A-Za-z%])")
_MOST_ZEROS = 10
_NEW_FILE = 0o666
"""The umask takes away from it, as from a file of srun."""


def expand(name: str, values: Mapping[str, str]) -> str:
    """`name` with `values` in place of srun's patterns, as far as they are known: %j, and %4t with zeros in front."""

    def value_of(found: re.Match[str]) -> str:
        width, letter = int(found[1] or 0), found[2]
        value = values.get(letter, found[0])
        return value.zfill(min(width, _MOST_ZEROS)) if value.isdecimal() else value

    return _PATTERN.sub(value_of, name)


def of_step(environ: Mapping[str, str]) -> dict[str, str]:
    """The patterns that are known where the step runs, and the end of all patterns, %%."""
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    return {"s": step, "J": f"{job}.{step}", "%": "%"}


def label(output: ScriptOutput, rank: int) -> bytes:
    """What stands in front of each line of a rank; empty: nothing."""
    return f"{rank:>{output.label_width}}: ".encode() if output.label_width else b""


def labelled(front: bytes, lines: bytes) -> bytes:
    """Whole lines, each with its label. srun ends no line at \\r."""
    return b"".join(front + line + b"\n" for line in lines.split(b"\n")[:-1]) if front else lines


class RankFiles:
    """The files of the ranks of one node, if each has one of its own.

    Args:
        ranks_per_node: tells the number of a rank's node, %n.
    """

    def __init__(self, output: ScriptOutput, node: str, ranks_per_node: int, environ: Mapping[str, str]) -> None:
        self._output, self._node, self._ranks_per_node = output, node.partition(".")[0], max(ranks_per_node, 1)
        self._of_step = of_step(environ)
        self._open: dict[str, int] = {}

    def write(self, name: str, generation: int, rank: int, lines: bytes) -> None:
        """Append to the file of a rank. The first generation begins it anew, unless --open-mode=append.

        Raises:
            OSError: it can't be written.
        """
        number = str(rank // self._ranks_per_node)
        path = expand(name, {**self._of_step, "t": str(rank), "n": number, "N": self._node})
        if path not in self._open:
            anew = 0 if self._output.append or generation > 1 else os.O_TRUNC
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | anew
            self._open[path] = os.open(path, flags, _NEW_FILE)
        while lines:
            lines = lines[os.write(self._open[path], lines) :]
