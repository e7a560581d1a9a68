"""What can go wrong when Slurm is told to do something, sorted by whose fault it is.

    SlurmError
        SlurmUnavailable     the site: slurmctld is not reachable, no slurm.conf, commands not installed
            SlurmTimeout     no answer within the deadline: whether it was done is not known
        SlurmRefused         Slurm answered no; `words` are its own
            BatchHostRefused a job can't be resized without its batch host
            NotPermitted     this user may not do that

Queries turn SlurmUnavailable into `Unknown` and never raise it.
"""

from __future__ import annotations


class SlurmError(Exception):
    """Slurm did not do what it was asked."""


class SlurmUnavailable(SlurmError):
    """Slurm can't be reached or is not installed here; nothing was done."""


class SlurmTimeout(SlurmUnavailable):
    """No answer within the deadline. It may have been done: ask, or give the (idempotent) command again."""


class SlurmRefused(SlurmError):
    """Slurm answered and refused. `what` is the operation, `words` what Slurm said."""

    def __init__(self, what: str, words: str) -> None:
        super().__init__(f"Slurm refused to {what}: {words}")
        self.what = what
        self.words = words


class BatchHostRefused(SlurmRefused):
    """Slurm does not resize a job without its batch host, dead or alive."""


class NotPermitted(SlurmRefused):
    """The calling user has not the right: another's job, or a node as an ordinary user."""
