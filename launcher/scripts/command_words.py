"""The command line of `muster submit`: `call.split` is told of Muster's own options and of the site's plug-ins."""

from __future__ import annotations

import argparse
import os
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from muster.launcher.scripts import call, keys
from muster.slurm.client.srun_options import described

_HELP_TIMEOUT_S = 10.0


def split_words(words: Sequence[str], own: Mapping[str, argparse.Action]) -> tuple[list[str], dict[str, Any]]:
    """The words for Muster's parser, and the call of sbatch as `call`, if a script is submitted.

    Raises:
        ValueError: a word before the script is no option.
    """
    kinds = {name: call.Kind(action.nargs != 0) for name, action in own.items()} | keys.kinds()
    muster, found = call.split(words, kinds, _takes_value, is_piped=_is_piped())
    if found is None:
        return muster, {}
    named = [word.partition("=") for word in muster]
    full = [
        keys.full_name(name) + equals + value if name in keys.kinds() else name + equals + value
        for name, equals, value in named
    ]
    for name, _, _ in named:
        if name in keys.kinds() and (why := keys.why_not(name)):
            raise ValueError(why)
    return full, {"call": found}


def _is_piped() -> bool:
    """Whether somebody sends a script: through a pipe or from a file."""
    with suppress(OSError, ValueError):
        mode = os.fstat(sys.stdin.fileno()).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)
    return False


def _takes_value(option: str) -> bool | None:
    """Whether an option of a plug-in takes a value, as `sbatch --help` says."""
    return _plugins().get(option)


@cache
def _plugins() -> dict[str, bool]:
    try:
        told = subprocess.run(
            ["sbatch", "--help"], capture_output=True, text=True, timeout=_HELP_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return described(told.stdout)
