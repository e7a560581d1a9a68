"""The signals that Slurm passes to every process of a step, and that are meant for ranks: `sbatch --signal=USR1@60`,
`scancel --signal=ALRM JOB`. Each of them ends a process that does not expect it.

Muster's own processes ignore them. A rank gets their default action back, as under srun, except that of SIGUSR2.
SIGTERM and SIGINT are not among them: they end an agent. Uses the standard library only, because zygotes do.
"""

import signal

FOR_RANKS = (
    *(signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM),
    *(signal.SIGPROF, signal.SIGPOLL, signal.SIGPWR, 16),  # SIGSTKFLT, which has a name since Python 3.11
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)


def ignore() -> None:
    """Ignore all of them in this process, and in its children until they decide otherwise."""
    for number in FOR_RANKS:
        signal.signal(number, signal.SIG_IGN)
