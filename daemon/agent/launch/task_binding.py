"""The processors and GPUs that srun would give to each task of the launch, and what a rank in its place gets.

`muster-agent srun` asks srun itself, with tasks that say what they have (user_script/rank_binding.py), and writes a
line for each task. A GPU is named by its device file: CUDA's number of it depends on what a process may open.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_LINE = re.compile(r"muster-binding (\S+) (\d+) (\S+) (\S*) (\S*)")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_UNSET = "unset"
_DEVICE = re.compile(r"nvidia(\d+)")

# `read`, `:` and `echo` are the shell's own: each task says what it has itself.
TASK = """cpus=; gpus=
while read -r name value; do
  case $name in Cpus_allowed_list:) cpus=$value;; esac
done < /proc/self/status
for file in /dev/nvidia[0-9]*; do
  (: < "$file") 2> /dev/null && gpus="$gpus${gpus:+,}${file#/dev/nvidia}"
done
echo "muster-binding $SLURMD_NODENAME $SLURM_LOCALID $cpus ${CUDA_VISIBLE_DEVICES-unset} $gpus"
"""
"""What a task runs, in sh."""


@dataclass(frozen=True, slots=True)
class TaskBinding:
    """What one task has. `variables`: those that tell it its GPUs."""

    processors: frozenset[int]
    variables: Mapping[str, str] = field(default_factory=dict)


def said_by_tasks(text: str) -> list[str]:
    """The lines of tasks among all that srun has printed."""
    return [line for line in text.splitlines() if _LINE.fullmatch(line)]


def nodes_of(lines: Iterable[str]) -> dict[str, int]:
    """How many tasks of each node have said what they have."""
    counts: dict[str, int] = {}
    for found in filter(None, map(_LINE.fullmatch, lines)):
        counts[found[1]] = counts.get(found[1], 0) + 1
    return counts


def read(path: str, node: str, own_gpus: Sequence[int]) -> dict[int, TaskBinding]:
    """The bindings of the ranks of `node`, by local rank.

    Args:
        path: the file with the lines; if it is not there, no rank is bound.
        own_gpus: the device files that this process may open, and so its ranks.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    return {
        int(found[2]): TaskBinding(_processors(found[3]), _gpus(found[4], found[5], own_gpus))
        for found in filter(None, map(_LINE.fullmatch, lines))
        if found[1] == node
    }


def open_gpus(folder: str = "/dev") -> list[int]:
    """The numbers of the GPUs that this process may open. A cgroup may refuse some."""
    found = []
    for number in sorted(int(match[1]) for match in map(_DEVICE.fullmatch, os.listdir(folder)) if match):
        with suppress(OSError):
            os.close(os.open(f"{folder}/nvidia{number}", os.O_RDONLY | os.O_CLOEXEC))
            found.append(number)
    return found


def _processors(text: str) -> frozenset[int]:
    """Numbers as Linux lists them: 0-3,8."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _gpus(visible: str, opened: str, own: Sequence[int]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of a rank whose task had `visible`, and could open the device files `opened`."""
    if visible == _UNSET:
        return {}
    files = sorted(int(number) for number in opened.split(",") if number)
    try:
        wanted = [files[int(number)] for number in visible.split(",")]
        return {_VISIBLE: ",".join(str(own.index(file)) for file in wanted)}
    except (ValueError, IndexError):  # named by UUID, or no such files
        return {_VISIBLE: visible}
