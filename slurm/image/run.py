"""Runs a command in a temporary container of the tests' image, with this checkout mounted read-only.

This is for commands that need PyTorch, which the host does not have. Muster is imported from the checkout, not from the
image.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from muster.slurm.image.build import LABEL, ensure_tests
from muster.slurm.image.engine import find_engine
from muster.slurm.image.recipe import ROOT

SOURCE = "/source"  # the checkout's folder in the container


def run_in_image(command: Sequence[str], user: str) -> int:
    """Runs `command` in the folder /source. Its output goes to the caller's output. Returns its exit status.

    The container has only a loopback interface, and is removed afterwards, also after Ctrl-C.
    """
    engine = find_engine()
    image = ensure_tests(engine)
    name = f"muster-run-{os.getpid()}-{secrets.token_hex(3)}"
    try:
        return engine.interactive(
            *("run", "--rm", "--pull=never", "--network=none", "--name", name, "--label", f"{LABEL}=run"),
            *("--volume", f"{ROOT}:{SOURCE}:ro"),
            *("--workdir", SOURCE, "--user", user, "--shm-size=1g", "--cap-add=SYS_PTRACE", *engine.ulimits),
            *("--env", f"PYTHONPATH={SOURCE}/src", "--env", "PYTHONDONTWRITEBYTECODE=1", "--env", "HOME=/tmp"),
            *(image, *command),
        )
    finally:
        engine.call("rm", "--force", name)
