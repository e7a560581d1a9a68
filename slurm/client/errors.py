"""The errors of commands to Slurm, sorted by who must fix the cause.

    SlurmError
        SlurmUnavailable     the site: slurmctld cannot be reached, no slurm.conf, commands not installed
            SlurmTimeout     no answer before the deadline: the command may have been executed
        SlurmRefused         Slurm refused; `message` is Slurm's own error message
            BatchHostRefused Slurm does not resize a job without its batch host
            NotPermitted     this user may not do that

A query returns `Unknown` instead of raising SlurmUnavailable.
"""

from __future__ import annotations


class SlurmError(Exception):
    """Slurm did not execute a command."""


class SlurmUnavailable(SlurmError):
    """Slurm cannot be reached, is not installed on this host, or has not answered.

    Only after a SlurmTimeout may it have done anything.
    """


class SlurmTimeout(SlurmUnavailable):
    """No answer before the deadline. Slurm may have executed the command. Query the state, or repeat the command: every
    command is idempotent.
    """


class SlurmRefused(SlurmError):
    """Slurm refused. `operation` is what the caller requested; `message` is Slurm's error message."""

    def __init__(self, what: str, words: str) -> None:
        super().__init__(f"Slurm refused to {what}: {words}")
        self.operation = what
        self.message = words


class BatchHostRefused(SlurmRefused):
    """Slurm does not resize a job without its batch host, even if the batch host is dead."""


class NotPermitted(SlurmRefused):
    """The calling user may not do that: another user's job, or a node as an ordinary user."""
