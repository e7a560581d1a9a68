"""`muster run train.py` in a job of Slurm: it launches what `srun torchrun train.py` would, on the job's nodes.

Where `muster submit` has queued the script, that srun is Muster's, and knows what to do. In a job of sbatch or salloc,
the settings that it needs are written here. An srun may have started this program itself: then it is a launcher as
torchrun is, and either Muster or the first task of the srun launches.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from muster.daemon.host import private_file
from muster.daemon.transport import gang_ids
from muster.daemon.transport.site_config import Site, SiteError
from muster.launcher.errors import SiteFault, WrongInput
from muster.launcher.scripts import job_files
from muster.launcher.scripts.torchrun_call import TorchrunCall
from muster.slurm.client import launch_settings
from muster.slurm.client.errors import SlurmUnavailable
from muster.slurm.client.launch_settings import LaunchSettings
from muster.slurm.client.parsing import hostlist
from muster.slurm.client.parsing.queued_job import how_shared
from muster.slurm.client.submit_environment import for_commands

if TYPE_CHECKING:
    from muster.v1.common_pb2 import JobSpec

_TASK = "MUSTER_TASK_SOCKET"
"""An agent of Muster has started this process, and takes over what torchrun launches."""
_SHOW_S = 30.0
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""From this number on, steps are no steps of srun: the shell of sbatch, that of salloc. Slurm 26.05 writes -5, too."""
_ALONE = ("--nodes={0}", "--ntasks={0}", "--ntasks-per-node=1")


def is_here(environ: Mapping[str, str]) -> bool:
    """Whether this process runs in a job of Slurm."""
    return "SLURM_JOB_ID" in environ


def is_known(environ: Mapping[str, str]) -> bool:
    """Whether `muster submit` has queued the job: then it knows the spares, and all else that is Muster's."""
    of_script = environ.get(launch_settings.JOB) == environ.get("SLURM_JOB_ID")
    return _TASK in environ or (launch_settings.SETTINGS in environ and of_script)


def launch_of_script(call: TorchrunCall, environ: Mapping[str, str]) -> NoReturn:
    """Becomes torchrun, or the srun of it, in a job that `muster submit` has queued."""
    nodes = int(environ.get("SLURM_NNODES") or 1)
    words = call.command(nodes, environ)
    if _TASK not in environ:
        srun = Path(launch_settings.program_folder(environ[launch_settings.SETTINGS]), "srun")
        words = [str(srun), *(word.format(nodes) for word in _ALONE), *words]
    _become(words, environ)


def _is_task_of_srun(environ: Mapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def own_nodes(environ: Mapping[str, str], spares: int) -> int:
    """The number of nodes that carry ranks.

    Raises:
        WrongInput: all nodes are spares.
    """
    count = len(hostlist.expand(environ.get("SLURM_JOB_NODELIST", "")))
    if not 0 <= spares < count:
        raise WrongInput(f"--spares {spares}: the job has {count} nodes, and one at least must carry ranks")
    return count - spares


async def launch(call: TorchrunCall, spec: JobSpec, environ: Mapping[str, str]) -> int:
    """Launches in a job of sbatch or salloc. `spec` names its nodes and spares. Returns the exit status of the gang, if
    this process does not become the launch.

    Raises:
        LauncherError: nothing is launched.
    """
    if environ.get("SLURM_PROCID", "0") != "0":
        return _wait_for_first_task()
    await _check_shared(environ["SLURM_JOB_ID"])
    words = call.command(spec.nodes, environ)
    settings = _settings(spec)
    path = launch_settings.settings_file(spec.run_dir, settings.gang)
    try:
        Path(spec.run_dir).mkdir(parents=True, exist_ok=True)
        private_file.create(Path(path), settings.to_json())
    except OSError as error:
        raise WrongInput(
            f"{error.filename or spec.run_dir} can't be written: {error.strerror}",
            "name a writable folder on shared storage with --run-dir",
        ) from None
    own = {
        launch_settings.SETTINGS: path,
        launch_settings.ALLOCATION: ",".join(hostlist.expand(environ["SLURM_JOB_NODELIST"])),
        launch_settings.JOB: environ["SLURM_JOB_ID"],
    }
    argv = [settings.agent, "srun", *(word.format(spec.nodes) for word in _ALONE), *words]
    if _is_task_of_srun(environ):
        return launch_for_all(argv, {**environ, **own}, f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}")
    _become(argv, {**environ, **own})


def _settings(spec: JobSpec) -> LaunchSettings:
    try:
        site = Site.load()
    except SiteError as error:
        raise SiteFault(str(error)) from None
    of_launch = type(spec)()
    of_launch.CopyFrom(spec)
    for field in ("command", "nodes", "ranks_per_node", "min_nodes"):
        of_launch.ClearField(field)
    return LaunchSettings(
        gang=gang_ids.new_gang_id(spec.name, os.geteuid()),
        coordinator=job_files.coordinator_for_nodes(site),
        agent=job_files.agent(),
        spares=spec.spares,
        spec=of_launch,
    )


async def _check_shared(job: str) -> None:
    """Raises WrongInput if other jobs may run on the nodes: a node that fails is set DOWN, which ends them all."""
    from muster.slurm.client.backends import run_command

    try:
        done = await run_command.run(
            ["scontrol", "--oneliner", "show", "job", job], timeout_s=_SHOW_S, env=for_commands(os.environ)
        )
    except SlurmUnavailable as error:
        raise SiteFault(str(error)) from None
    how = "" if done.exit_status else how_shared(done.stdout)
    if not done.exit_status and not how:
        return
    raise WrongInput(
        f"job {job} may share its nodes with other jobs{how and f' ({how})'}, and Muster sets a node DOWN that fails",
        "ask for the nodes with --exclusive, and with --no-kill, so that the job outlives a lost node",
    )


def launch_for_all(argv: list[str], environ: Mapping[str, str], step: str) -> int:
    """Launches for all tasks of an srun, which wait. Signals reach the whole step."""
    print("muster: start muster run without srun: a lost node ends this srun, and the launch with it", file=sys.stderr)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    status = subprocess.call(argv, env=dict(environ))
    with suppress(OSError):
        subprocess.call(["scancel", "--signal=TERM", step])
    return status


def _wait_for_first_task() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.sigwait({signal.SIGTERM})
    return 0


def _become(argv: list[str], environ: Mapping[str, str]) -> NoReturn:
    try:
        os.execve(argv[0], argv, dict(environ))
    except OSError as error:
        raise SiteFault(f"{argv[0]} can't be started: {error.strerror}") from None
