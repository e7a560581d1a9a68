"""Programs that the lines of batch scripts start, as their text names them.

`muster submit` reads a script before it is queued, and `muster-agent srun` decides about each call where it runs. Both
know the same programs.
"""

from __future__ import annotations

import re

BEGIN, END = r"(?:^|[\s/\"'=;&|({])", r"(?=[\s\"';&|)}]|$)"
"""Patterns: what stands before and after a program's name in a line of a shell."""
SHELLS = frozenset(("bash", "sh", "dash", "zsh", "ksh"))
CONTAINERS = frozenset(
    ("apptainer", "singularity", "enroot", "docker", "podman", "podman-hpc", "shifter", "sarus", "ch-run")
)
PREFIXES = frozenset(
    ("builtin", "command", "env", "eval", "exec", "nice", "nohup", "numactl", "stdbuf", "taskset", "time", "timeout")
)
"""Programs that start the program which their arguments name."""
LAUNCHERS = re.compile(
    rf"{BEGIN}(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate-launch|accelerate\s+launch"
    rf"|accelerate\.commands\.launch|muster\s+run){END}"
)
"""What they would start is handed over to the agent, where the gang takes over. `muster run` starts torchrun."""
PYTHON = re.compile(rf"{BEGIN}python[\d.]*{END}")
