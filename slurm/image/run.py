"""Runs a command in a temporary container of the tests' image, with this checkout mounted read-only.

This is for commands that need PyTorch, which the host does not have. Muster is imported from the checkout, not from the
image.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence

from muster.slurm.image.build import LABEL, ensure_tests
from muster.slurm.image.engine import Engine, find_engine
from muster.slurm.image.recipe import ROOT

SOURCE = "/source"  # the checkout's folder in the container


def run_in_image(
    command: Sequence[str],
    mounts: Mapping[str, str] | None = None,
    user: str = "root",
    engine: Engine | None = None,
) -> int:
    """Runs `command` in the folder /source. Its output goes to the caller's output. Returns its exit status.

    `mounts` maps folders of the host to ``TARGET`` or ``TARGET:ro``. The container has only a loopback interface, and
    is removed afterwards, also after Ctrl-C.
    """
    engine = engine or find_engine()
    image = ensure_tests(engine)
    name = f"muster-run-{os.getpid()}-{secrets.token_hex(3)}"
    volumes = {str(ROOT): f"{SOURCE}:ro", **(mounts or {})}
    try:
        return engine.interactive(
            *("run", "--rm", "--pull=never", "--network=none", "--name", name, "--label", f"{LABEL}=run"),
            *(part for source, target in volumes.items() for part in ("--volume", f"{source}:{target}")),
            *("--workdir", SOURCE, "--user", user, "--shm-size=1g", "--cap-add=SYS_PTRACE", *engine.ulimits),
            *("--env", f"PYTHONPATH={SOURCE}/src", "--env", "PYTHONDONTWRITEBYTECODE=1", "--env", "HOME=/tmp"),
            *(image, *command),
        )
    finally:
        engine.call("rm", "--force", name)
