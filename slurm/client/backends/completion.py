"""Ends a job with its true exit code, through libslurm's `slurm_complete_job`.

A job whose batch host died stays RUNNING for ever, because only slurmd on that host would report the end. scancel would
set the state CANCELLED and break dependencies of type `afterok`. No Slurm command sets another state, so the library is
called. It is called in a separate process: a crash or hang in C code ends only that process.
"""

from __future__ import annotations

import sys
from typing import Final

from muster.slurm.client.backends import run_command
from muster.slurm.client.deadline import DEFAULT_TIMEOUT_S
from muster.slurm.client.errors import SlurmRefused, SlurmUnavailable
from muster.slurm.client.parsing import error_messages

_WORKER: Final = (sys.executable, "-m", "muster.slurm.client.backends.complete_worker")
_NO_LIBRARY: Final = "could not load libslurmfull"
"""The error message of complete_worker on a host without libslurm."""


async def library(timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
    """The path of the library of this host that ends jobs.

    Raises:
        SlurmUnavailable: none can be loaded; the message says where it was looked for.
        SlurmTimeout: nobody knows.
    """
    done = await run_command.run(_WORKER, timeout_s=timeout_s)
    if done.exit_status != 0:
        raise SlurmUnavailable(done.error_text)
    return done.stdout.strip()


async def complete(job: int, exit_code: int, *, timeout_s: float, lease_s: float) -> None:
    """Ends `job` with `exit_code`.

    Args:
        exit_code: 0 to 255.
        timeout_s: seconds for the whole call.
        lease_s: see `run_command.run`.

    Raises:
        SlurmError: Slurm refused or did not answer. A job that has already ended is no error.
        ValueError: `exit_code` is out of range.
    """
    if not 0 <= exit_code <= 255:
        raise ValueError(f"exit code {exit_code}: a job's exit code is 0 to 255")
    argv = [*_WORKER, str(job), str(exit_code)]
    done = await run_command.run(argv, timeout_s=timeout_s, lease_s=lease_s)
    if done.exit_status == 0:
        return
    if _NO_LIBRARY in done.stderr:
        raise SlurmUnavailable(f"complete job {job}: {done.error_text}")
    error = error_messages.to_error(f"complete job {job}", done.error_text)
    if not (isinstance(error, SlurmRefused) and error_messages.says_job_ended(error)):
        raise error
