"""Reads the resource request from a batch script and from sbatch's options. It reads only what the in-memory cluster
uses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from muster.slurm.client import sbatch_options
from muster.slurm.client.parsing.hostlist import expand


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A request to sbatch, as far as the in-memory cluster supports it."""

    nodes: int = 1
    name: str = "job"
    no_kill: bool = False
    requeue: bool = True
    exclude: tuple[str, ...] = ()
    required_nodes: tuple[str, ...] = ()
    dependency: str = ""
    comment: str = ""
    time_limit_s: int | None = None
    begin_delay_s: int = 0
    """From `--begin=now+SECONDS`. Other forms of --begin are ignored."""
    work_dir: str = ""
    switches: int | None = None
    """The most leaf switches. The in-memory cluster heeds it in estimates of the start alone."""


def read_request(script: str, options: Sequence[str], work_dir: str) -> JobRequest:
    """Reads the `#SBATCH` lines of `script`, then `options`. Unknown options are ignored.

    Raises:
        ValueError: a line, or an option, is none of sbatch.
    """
    given = [*sbatch_options.read_script(script), *sbatch_options.read_words(options)]
    found = {option.name: option.value or "" for option in given}
    days, hours, minutes, seconds = _time_limit(found.get("time", ""))
    limit = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return JobRequest(
        nodes=int(found.get("nodes", "1").split("-")[0]),
        name=found.get("job-name", "sbatch"),
        no_kill="no-kill" in found,
        requeue="no-requeue" not in found,
        exclude=expand(found.get("exclude", "")),
        required_nodes=expand(found.get("nodelist", "")),
        dependency=found.get("dependency", ""),
        comment=found.get("comment", ""),
        time_limit_s=limit or None,
        begin_delay_s=int(found.get("begin", "now+0").partition("now+")[2] or 0),
        work_dir=work_dir,
        switches=int(found["switches"].partition("@")[0]) if "switches" in found else None,
    )


def _time_limit(text: str) -> tuple[int, int, int, int]:
    """Reads sbatch's time forms: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s. Words such as UNLIMITED are no limit."""
    if not re.fullmatch(r"[\d:-]*", text):
        return 0, 0, 0, 0
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":") if part]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0, 0)[:3]
        return int(days), hours, minutes, seconds
    if len(parts) == 3:
        return 0, parts[0], parts[1], parts[2]
    minutes, seconds = (*parts, 0, 0)[:2]
    return 0, 0, minutes, seconds
