"""Reads what `sbatch --test-only` and `scontrol show config` say of starts, of waiting, and of what is private."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

from muster.slurm.client.parsing.hostlist import expand
from muster.slurm.client.types import StartEstimate

_START: Final = re.compile(r"Job \d+ to start at (\S+) (?:a )?using \d+ processors on nodes (\S+) in partition")
"""Slurm 26.05 writes "a using", Slurm 24.11 "using"."""
_SWITCH_WAIT: Final = re.compile(r"^SchedulerParameters\s*=(?:.*,|\s*)max_switch_wait=(\d{1,9})\b", re.MULTILINE)
_PRIVATE: Final = re.compile(r"^PrivateData\s*=\s*([a-zA-Z,]*)\s*$", re.MULTILINE)
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


def private_data(config: str) -> frozenset[str]:
    """The words of PrivateData, in lower case, from `scontrol show config`.

    Raises:
        ValueError: the text has another form. It must not be read as "nothing is private".
    """
    found = _PRIVATE.search(config)
    if not found:
        raise ValueError(f"scontrol show config has no PrivateData: {config[:200]!r}")
    return frozenset(found[1].lower().split(",")) - {"", "none"}
