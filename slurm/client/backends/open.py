"""Chooses the Slurm client: pyslurm if it can be imported, else Slurm's commands."""

from __future__ import annotations

import logging
from typing import Final

from muster.slurm.client.backends.commands import CliSlurm
from muster.slurm.client.backends.pyslurm_backend import PyslurmSlurm
from muster.slurm.client.deadline import LeaseGuard, no_lease
from muster.slurm.client.errors import SlurmUnavailable
from muster.slurm.client.types import Slurm

BACKENDS: Final = ("pyslurm", "cli")
_log = logging.getLogger(__name__)


async def open_slurm(prefer: str = "pyslurm", *, strict: bool = False, lease_guard: LeaseGuard = no_lease) -> Slurm:
    """Returns a client for the cluster of this host. The caller closes it with `aclose`.

    Args:
        prefer: "pyslurm" or "cli".
        strict: if pyslurm does not start, raise instead of using the commands with a warning.
        lease_guard: called before each step that changes something in Slurm.

    Raises:
        SlurmUnavailable: `strict` is set and pyslurm does not start.
    """
    if prefer not in BACKENDS:
        raise ValueError(f"unknown Slurm backend {prefer!r}: choose one of {', '.join(BACKENDS)}")
    if prefer == "cli":
        return CliSlurm(lease_guard=lease_guard)
    backend = PyslurmSlurm(lease_guard)
    try:
        await backend.start()
    except SlurmUnavailable as error:
        await backend.aclose()
        if strict:
            raise
        _log.warning("using Slurm's commands instead of pyslurm: %s", error)
        return CliSlurm(lease_guard=lease_guard)
    return backend
