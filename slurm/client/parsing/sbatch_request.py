"""Reads the resource request from a batch script and from sbatch's options. It reads only what the in-memory cluster
uses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from muster.slurm.client import sbatch_options
from muster.slurm.client.parsing.hostlist import expand

_TIME_LIMIT = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
_UNIT_S = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
_DELAY = re.compile(rf"now\+(\d+)(?:({'|'.join(_UNIT_S)})s?)?")


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
    return JobRequest(
        nodes=int(found.get("nodes", "1").split("-")[0]),
        name=found.get("job-name", "sbatch"),
        no_kill="no-kill" in found,
        requeue="no-requeue" not in found,
        exclude=expand(found.get("exclude", "")),
        required_nodes=expand(found.get("nodelist", "")),
        dependency=found.get("dependency", ""),
        comment=found.get("comment", ""),
        time_limit_s=time_limit_s(found.get("time", "")),
        begin_delay_s=_delay_s(found.get("begin", "")),
        work_dir=work_dir,
        switches=int(found["switches"].partition("@")[0]) if "switches" in found else None,
    )


def time_limit_s(text: str) -> int | None:
    """The seconds of a time limit: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s. None for any other text, such as
    UNLIMITED."""
    if not _TIME_LIMIT.fullmatch(text):
        return None
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = 0, *(*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or None


def _delay_s(begin: str) -> int:
    """The seconds of `now+90` and `now+2hours`; 0 for any other text."""
    found = _DELAY.fullmatch(begin)
    return int(found[1]) * _UNIT_S[found[2] or "second"] if found else 0
