"""Maps Slurm's error messages to exceptions: Slurm unavailable, not permitted, or refused.

Slurm's commands report errors only in words and exit with 1. libslurm has error numbers, but its strerror gives the
same words. So this module reads the words for both backends. No other module does.
"""

from __future__ import annotations

import re
from typing import Final

from muster.slurm.client.errors import (
    BatchHostRefused,
    NotPermitted,
    SlurmError,
    SlurmRefused,
    SlurmTimeout,
    SlurmUnavailable,
)

NO_SUCH_JOB: Final = "Invalid job id"
NO_SUCH_NODE: Final = "Invalid node name"
IS_PENDING: Final = "Job is pending execution"
HAS_STARTED: Final = "Job is no longer pending execution"
CANCELLED: Final = "Job is cancelled"
"""Muster's own message. Slurm itself accepts a requeue of a cancelled job; Muster does not send one."""
_NO_TRANSITION: Final = ("Invalid node state transition", "Invalid node state specified")
"""The second is that of Slurm 24.11 and 25.05, which have no other words for it."""
_ENDED: Final = ("Job has already finished", "already completing or completed")

_COMMAND_PREFIX = re.compile(r"^(\w+: |\w+ )*?(error|fatal): ")
"""The prefix with the command's own name: `scancel: error: `, `slurm_update error: `."""
_NEXT_LINE = re.compile(r" \w+: error: ")
"""Where the next line of a command begins: sbatch names a limit in the line before the one that says what it means."""

_TIMED_OUT = ("Socket timed out", "timed out", "Timeout")
_UNAVAILABLE = (
    "Unable to contact slurm controller",
    "Unable to establish",
    "Connection refused",
    "Communication connection failure",
    "Communication shutdown failure",
    "Slurm controller is shutting down",
    "Slurm backup controller",
    "standby mode",
    "Zero Bytes were transmitted",
    "Message receive failure",
    "Message send failure",
    "Protocol authentication error",
    "Invalid authentication credential",
    "Unspecified communication",
    "Incompatible versions of client and server",
    "getaddrinfo() failed",
    "Could not find slurm.conf",
    "resolve_ctls",
    "fetch_config",
    "could not load configuration",
    "error while loading shared libraries",
)
_NOT_PERMITTED = (
    "Invalid user id",
    "Access/permission denied",
    "Security violation",
    "Access denied",
    "Permission denied",
    "Invalid account or account/partition",
)
_BATCH_HOST = ("cannot remove the batch host",)


def to_error(operation: str, message: str) -> SlurmError:
    """Returns the exception for an error message, for the caller to raise.

    Args:
        operation: what the caller requested, for example "drain n3".
        message: Slurm's error message.
    """
    message = _NEXT_LINE.sub(": ", _COMMAND_PREFIX.sub("", message))
    if _contains_any(message, _UNAVAILABLE):
        return SlurmUnavailable(f"{operation}: {message}")
    if _contains_any(message, _TIMED_OUT):
        return SlurmTimeout(f"{operation}: {message}")
    if _contains_any(message, _BATCH_HOST):
        return BatchHostRefused(operation, message)
    if _contains_any(message, _NOT_PERMITTED):
        return NotPermitted(operation, message)
    return SlurmRefused(operation, message)


def says_job_ended(error: SlurmRefused) -> bool:
    """Whether Slurm refused because the job has ended, or ended so long ago that Slurm has no record of it."""
    return _contains_any(error.message, (*_ENDED, NO_SUCH_JOB))


def says_no_transition(error: SlurmRefused) -> bool:
    """Whether Slurm may have refused because the node is in the wanted state already."""
    return _contains_any(error.message, _NO_TRANSITION)


def _contains_any(message: str, needles: tuple[str, ...]) -> bool:
    lower = message.lower()
    return any(needle.lower() in lower for needle in needles)
