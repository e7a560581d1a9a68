"""What Slurm's own words about a failure mean: nobody there, not allowed, or no.

Slurm's commands say everything in words and exit with 1; libslurm has numbers, but its strerror gives the
same words. So both backends are read here, and only here, by the words.
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
CANCELLED: Final = "Job is cancelled"
"""Our own words: Slurm does requeue a job that was cancelled."""
NO_TRANSITION: Final = "Invalid node state transition"
_ENDED: Final = ("Job has already finished", "already completing or completed")

_SPEAKER = re.compile(r"^(\w+: |\w+ )*(error|fatal): ")
"""The command's own name before what it says: `scancel: error: `, `slurm_update error: `."""

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


def failure(what: str, words: str) -> SlurmError:
    """The exception for `words` that Slurm said when told to `what` ("drain n3"); for the caller to raise."""
    words = _SPEAKER.sub("", words)
    if _any(words, _UNAVAILABLE):
        return SlurmUnavailable(f"{what}: {words}")
    if _any(words, _TIMED_OUT):
        return SlurmTimeout(f"{what}: {words}")
    if _any(words, _BATCH_HOST):
        return BatchHostRefused(what, words)
    if _any(words, _NOT_PERMITTED):
        return NotPermitted(what, words)
    return SlurmRefused(what, words)


def has_ended(error: SlurmRefused) -> bool:
    """True if Slurm refused because the job has ended, or ended so long ago that it has no record of it."""
    return _any(error.words, (*_ENDED, NO_SUCH_JOB))


def _any(words: str, needles: tuple[str, ...]) -> bool:
    lower = words.lower()
    return any(needle.lower() in lower for needle in needles)
