"""`muster cancel JOB`: ends a gang and its Slurm jobs. With the id of an array job, all its tasks."""

from __future__ import annotations

import argparse
import os
import sys

from muster.launcher.command import Command, connect, load_site, print_error, say
from muster.launcher.coordinator_client import CoordinatorClient, gang_ref
from muster.launcher.errors import LauncherError, NoCredential, SiteFault, Unavailable

_SCANCEL_S = 20.0
"""Seconds for scancel, which waits for slurmctld."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="a Slurm job id or a gang id; of an array: all tasks, or 42_1")


async def _run(options: argparse.Namespace) -> int:
    ref = gang_ref(options.job)
    try:
        async with connect(load_site(options)) as coordinator:
            if tasks := await coordinator.tasks(ref, brief=True):
                return await _cancel_array(
                    coordinator, [view.gang_id for view in tasks if not view.final], ref.slurm_job_id
                )
            say(await coordinator.cancel(ref))
    except NoCredential:
        raise  # scancel needs one, too
    except (Unavailable, SiteFault) as error:
        meanwhile = f"scancel {ref.slurm_job_id or 'JOBID'} ends the job without the coordinator"
        raise type(error)(error.message, "\n  ".join(filter(None, (error.hint, meanwhile)))) from None
    return 0


async def _cancel_array(coordinator: CoordinatorClient, gangs: list[str], array: int) -> int:
    """Cancel each gang, so that it says who has cancelled it; then what of the array has launched nothing yet. Returns
    the exit status."""
    from muster.slurm.client.backends import run_command  # to cancel one job nobody needs it
    from muster.slurm.client.errors import SlurmUnavailable
    from muster.slurm.client.submit_environment import for_commands

    status = 0
    for gang in gangs:
        try:
            say(await coordinator.cancel(gang_ref(gang)))
        except LauncherError as error:
            print_error(error)
            status = error.status
    try:
        argv = ["scancel", "--quiet", str(array)]
        done = await run_command.run(argv, timeout_s=_SCANCEL_S, env=for_commands(os.environ))
    except SlurmUnavailable as error:
        failed = Unavailable(f"what of job {array} has launched nothing yet is not cancelled: {error}")
        print_error(failed)
        return failed.status
    sys.stderr.write(done.stderr)
    return status or done.exit_status


COMMAND = Command(_arguments, _run)
