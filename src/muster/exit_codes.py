"""The exit codes of gangs and of their jobs, and those that others know them by. Pure.

Every room may import this module: the coordinator ends gangs with them, and agent and launcher tell them apart.
docs/operations/something-is-down.md says what to do about each.
"""

EXIT_OF_SLURM = 1
"""Slurm has ended the job, and nobody has cancelled it."""
EXIT_SCRIPT_LOST = 91
"""Of a job, not of its gang: every rank exited with 0, but the node was lost that would have run the rest of the user's
own script."""
EXIT_NOT_PACKED = 92
"""Slurm gave no nodes on which the groups that [placement] requires are packed."""
EXIT_FAILED_AGAIN = 93
"""The software fails again and again. The job is not requeued, unless a user's own script does it."""
EXIT_NO_NODES = 94
"""Too few nodes are left, and the job may not be requeued."""
EXIT_NEVER_GATHERED = 95
"""Not all nodes attached in time."""
EXIT_AGENT = 96
"""Most agents met an error that another node would not mend."""
EXIT_NOT_DURABLE = 97
"""Every rank exited with 0, but the last checkpoint could not be written."""
EXIT_STOPPED = 98
"""Stopped by plan and saved, not to be requeued. Submit the job again to continue."""
EXIT_OBSERVED = 99
"""In observe mode: a recovery would follow. The job ends, as it does without Muster."""
EXIT_CANCELLED = 130
"""A user cancelled the job."""
OF_TORCHRUN = 1
"""What torchrun ends with when a rank has failed, whatever the exit code of the rank, or when a signal has ended it."""
_SIGNAL_BASE = 128


def of_launcher(code: int) -> int:
    """What a launcher ends with, whose gang has ended with `code`."""
    return OF_TORCHRUN if code == EXIT_FAILED_AGAIN else code


def of_shell(status: int) -> int:
    """The status of a process as a shell reports it: -N (signal N) becomes 128 + N."""
    return status if status >= 0 else _SIGNAL_BASE - status
