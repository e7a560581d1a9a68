"""How many columns the terminal has. A module of its own: the help needs nothing else."""

from __future__ import annotations

import os


def columns() -> int:
    """The width of the terminal, as shutil.get_terminal_size finds it. That module imports all compressors."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    try:
        return os.get_terminal_size().columns or 80
    except OSError:  # no terminal
        return 80
