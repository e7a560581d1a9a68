"""Chooses how to talk to Slurm: pyslurm where it can be imported, else Slurm's commands."""

from __future__ import annotations

import logging
from typing import Final

from muster.slurm.client.backends.commands import CliSlurm
from muster.slurm.client.backends.pyslurm_backend import PyslurmSlurm
from muster.slurm.client.errors import SlurmUnavailable
from muster.slurm.client.permit import Permit, unopposed
from muster.slurm.client.types import Slurm

BACKENDS: Final = ("pyslurm", "cli")
_log = logging.getLogger(__name__)


async def open_slurm(prefer: str = "pyslurm", *, strict: bool = False, permit: Permit = unopposed) -> Slurm:
    """A client for the cluster that this machine belongs to; end it with `aclose`.

    `prefer` is "pyslurm" or "cli". Where pyslurm does not start, the commands serve and a warning says why;
    with `strict` that is a SlurmUnavailable instead. `permit` is asked before each step that changes something.
    """
    if prefer not in BACKENDS:
        raise ValueError(f"Slurm backend {prefer!r}: it is one of {', '.join(BACKENDS)}")
    if prefer == "cli":
        return CliSlurm(permit=permit)
    backend = PyslurmSlurm(permit)
    try:
        await backend.start()
    except SlurmUnavailable as error:
        await backend.aclose()
        if strict:
            raise
        _log.warning("Slurm is asked through its commands: %s", error)
        return CliSlurm(permit=permit)
    return backend
