"""Reads the resource request from a batch script and from sbatch's options. It reads only what the in-memory cluster
uses.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

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
    """Reads the `#SBATCH` lines of `script`, then `options`. Unknown options are ignored."""
    directives = re.findall(r"^#SBATCH\s+(.*)$", script, re.MULTILINE)
    words = [word for line in directives for word in shlex.split(line, comments=True)] + list(options)
    found = _read_options(words)
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


_SHORT = {
    "N": "nodes",
    "J": "job-name",
    "k": "no-kill",
    "x": "exclude",
    "w": "nodelist",
    "d": "dependency",
    "t": "time",
}
_FLAGS = frozenset({"no-kill", "requeue", "no-requeue", "exclusive", "parsable", "hold"})


def _read_options(words: Sequence[str]) -> dict[str, str]:
    """Reads `--key=value`, `--key value`, `-kvalue` and `-k value`. The keys of the result are long names."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
        elif word.startswith("-") and word[1:2] in _SHORT:
            key, value = _SHORT[word[1]], word[2:]
            equals = value
        else:
            continue
        if not equals and key not in _FLAGS and rest:
            value = rest.pop(0)
        found[key] = value
    return found


def _time_limit(text: str) -> tuple[int, int, int, int]:
    """Reads sbatch's time forms: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s."""
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":") if part]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0, 0)[:3]
        return int(days), hours, minutes, seconds
    if len(parts) == 3:
        return 0, parts[0], parts[1], parts[2]
    minutes, seconds = (*parts, 0, 0)[:2]
    return 0, 0, minutes, seconds
