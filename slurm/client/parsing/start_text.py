"""Reads what `sbatch --test-only` and `scontrol show config` say of starts and of waiting."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

from muster.slurm.client.parsing.hostlist import expand
from muster.slurm.client.types import StartEstimate

_START: Final = re.compile(r"Job \d+ to start at (\S+) (?:a )?using \d+ processors on nodes (\S+) in partition")
"""Slurm 26.05 writes "a using", Slurm 24.11 "using"."""
_SWITCH_WAIT: Final = re.compile(r"^SchedulerParameters\s*=(?:.*,|\s*)max_switch_wait=(\d{1,9})\b", re.MULTILINE)
_USUAL_SWITCH_WAIT_S: Final = 300


def read(text: str) -> StartEstimate:
    """The start that `sbatch --test-only` prints, in the local time zone.

    Raises:
        ValueError: the text has another form.
    """
    found = _START.search(text)
    if not found:
        raise ValueError(f"sbatch --test-only printed {text[:200]!r}")
    try:
        start = datetime.fromisoformat(found[1]).timestamp()
    except OverflowError:
        raise ValueError(f"sbatch --test-only printed the time {found[1][:40]!r}") from None
    return StartEstimate(start, expand(found[2]))


def max_switch_wait_s(config: str) -> int:
    """Seconds that a job may wait for its switches, from `scontrol show config`."""
    found = _SWITCH_WAIT.search(config)
    return int(found[1]) if found else _USUAL_SWITCH_WAIT_S
