"""The patterns in names of files, as srun knows them: %j, %t, %n, %N. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

OF_TASK = re.compile(r"%\d*[tnN]")
"""In a name: each task, or each node, has a file of its own."""
_PATTERN = re.compile(r"%(\d*)([A-Za-z%])")
_MOST_ZEROS = 10


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
