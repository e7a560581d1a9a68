"""A line that a task of a Slurm step prints for `muster check`. The tasks of a step print beside each other.

A line is one write. `print` makes two of them where Python does not buffer (PYTHONUNBUFFERED), and the line of another
task may come between.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping


def say(fields: Mapping[str, object]) -> None:
    """Print the fields as one line of JSON, whole and at once."""
    sys.stdout.write(f"{json.dumps(fields)}\n")
    sys.stdout.flush()
