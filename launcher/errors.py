"""What can go wrong in a command, sorted by who has to mend it; each carries its exit status and the next step.

    LauncherError
        WrongInput          64  the caller: command line, job.toml, an unknown job
        Unavailable         69  something that should answer does not: the coordinator, Slurm
        NotAllowed          77  the caller may not do that
        SiteFault           78  the site: settings, munge, Slurm's commands missing

The same numbers as sysexits.h; docs/OPERATIONS.md lists them for users.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_FAILED = 1
EXIT_BUG = 70
EXIT_INTERRUPTED = 130


class LauncherError(Exception):
    """`message` says what is wrong, `hint` what to do next (may be empty)."""

    status: ClassVar[int] = EXIT_FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class WrongInput(LauncherError):
    """The caller's fault; nothing was done."""

    status = 64


class Unavailable(LauncherError):
    """Something that should answer does not; it may, later."""

    status = 69


class NotAllowed(LauncherError):
    """The caller has not the right."""

    status = 77


class SiteFault(LauncherError):
    """The site has to mend its settings first."""

    status = 78
