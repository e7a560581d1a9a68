"""Ends a job explicitly with its true exit code, through libslurm's `slurm_complete_job`.

A job whose batch host died stays RUNNING for ever, since its slurmd was the one to report the end; scancel would make
it CANCELLED and break `afterok`. No command of Slurm does this, so the library is called, in a process of its own: a
crash or hang in C ends that process, not the caller.
"""

from __future__ import annotations

import sys
from typing import Final

from muster.slurm.client.backends import run_command
from muster.slurm.client.errors import SlurmRefused, SlurmUnavailable
from muster.slurm.client.parsing import refusals

_WORKER: Final = (sys.executable, "-m", "muster.slurm.client.backends.complete_worker")
_NO_LIBRARY: Final = "could not load libslurmfull"
"""What complete_worker says where libslurm is not installed."""


async def complete(job: int, exit_code: int, *, deadline: float, within: float) -> None:
    """Ends `job` with `exit_code` (0 to 255). A job that has ended already is no error. `within`: see `command.run`."""
    if not 0 <= exit_code <= 255:
        raise ValueError(f"exit code {exit_code}: a job's exit code is 0 to 255")
    argv = [*_WORKER, str(job), str(exit_code)]
    done = await run_command.run(argv, deadline=deadline, within=within)
    if done.status == 0:
        return
    if _NO_LIBRARY in done.err:
        raise SlurmUnavailable(f"complete job {job}: {done.words}")
    error = refusals.failure(f"complete job {job}", done.words)
    if not (isinstance(error, SlurmRefused) and refusals.has_ended(error)):
        raise error
