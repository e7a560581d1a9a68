"""Muster's programs import their own packages, whatever PYTHONPATH holds: importing this module sees to it.

A site's modules, and users, set PYTHONPATH to packages for other interpreters. One of them in the place of gRPC or
protobuf would end `muster`, or the agents of a job, before their first line. Only sys.path changes: ranks inherit the
variable as it is. It is the first import of a program, and imports nothing that the variable could replace.
"""

import os
import sys

import muster


def without_python_path(path: list[str], python_path: str, own: tuple[str, ...]) -> list[str]:
    """`path` without the folders that `python_path` names, but for those at or below one of the folders `own`."""
    named = {os.path.abspath(folder) for folder in python_path.split(os.pathsep)}
    kept = tuple(os.path.join(os.path.abspath(folder), "") for folder in own)
    return [
        entry
        for entry in path
        if os.path.abspath(entry) not in named or os.path.join(os.path.abspath(entry), "").startswith(kept)
    ]


def _own() -> tuple[str, ...]:
    """Where the standard library, Muster, and the packages of its environment are."""
    folders = (os.path.dirname(os.__file__), os.path.dirname(next(iter(muster.__path__))))
    return (*folders, sys.prefix) if sys.prefix != sys.base_prefix else folders


if python_path := os.environ.get("PYTHONPATH"):
    sys.path[:] = without_python_path(sys.path, python_path, _own())
