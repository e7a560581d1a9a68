"""The errors of commands, sorted by who must fix the cause. Each error has its exit status and the next step.

    LauncherError
        WrongInput          64  the caller: command line, job.toml, an unknown job
        Unavailable         69  the coordinator or Slurm does not answer
        NotNow              75  the state of the job does not allow it now
        NotAllowed          77  the caller may not do that
        SiteFault           78  the site: settings, munge, Slurm's commands missing

The numbers are those of sysexits.h. docs/operations/something-is-down.md lists them for users.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_FAILED = 1
EXIT_BUG = 70
EXIT_INTERRUPTED = 130


class LauncherError(Exception):
    """`message` says what is wrong. `hint` says what to do next; it may be empty."""

    status: ClassVar[int] = EXIT_FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class WrongInput(LauncherError):
    """The caller's input is wrong. Nothing was done."""

    status = 64


class Unavailable(LauncherError):
    """A service does not answer. It may answer later."""

    status = 69


class Busy(Unavailable):
    """The coordinator has too much to do for those who watch. It may have time later."""


class NotNow(LauncherError):
    """The state of the job does not allow it now. Nothing was done. It may be allowed later."""

    status = 75


class NotAllowed(LauncherError):
    """The caller may not do that."""

    status = 77


class SiteFault(LauncherError):
    """The site must fix its settings first."""

    status = 78


class NoCredential(SiteFault):
    """This host has no credential for its user. Slurm's commands can't do anything without munge, either."""
