"""The private files of a script's job in its run folder, and what the record of the run says of it."""

from __future__ import annotations

import os
import shutil
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from muster.daemon.host import private_file
from muster.daemon.transport import gang_ids
from muster.launcher.errors import SiteFault, WrongInput
from muster.launcher.scripts import bash_env
from muster.launcher.scripts.size import likely_nodes
from muster.launcher.scripts.template import job_name
from muster.launcher.submission.script import Submission
from muster.slurm.client import names
from muster.slurm.client.launch_settings import LaunchSettings, bash_env_file, settings_file
from muster.v1.common_pb2 import JobSpec

if TYPE_CHECKING:
    from muster.daemon.transport.site_config import Site
    from muster.launcher.scripts.call import ScriptCall
    from muster.launcher.scripts.plan import Supervised, Unsupervised
    from muster.launcher.scripts.user_script import UserScript
    from muster.launcher.spec.spec import Job

_AGENT = "muster-agent"
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class JobFiles:
    """The files of one job, and the gang that they are named after."""

    gang: str
    settings: str
    bash_env: str

    @classmethod
    def write(cls, found: Supervised, site: Site) -> Self:
        """Writes the files. Blocks, as storage does.

        Raises:
            WrongInput: the run folder can't be written to.
            SiteFault: muster-agent is not installed.
        """
        gang, folder = gang_ids.new_gang_id(found.job.name, os.geteuid()), found.spec.run_dir
        files = cls(gang, settings_file(folder, gang), bash_env_file(folder, gang))
        settings = _settings(found, gang, site)
        text = bash_env.text(
            settings.agent, files.settings, found.exported, os.environ.get("SLURM_JOB_ID", ""), found.looked.alone
        )
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            private_file.create(Path(files.settings), settings.to_json())
            private_file.create(Path(files.bash_env), text)
        except OSError as error:
            files.remove()
            raise WrongInput(
                f"run_dir = {folder!r}: {error.filename or folder} can't be written: {error.strerror}",
                "it must be a writable folder on shared storage: name one with #MUSTER --run-dir=/shared/... Nothing "
                "was queued",
            ) from None
        return files

    def remove(self) -> None:
        """Removes the files of a job that was not queued, and their folder if nothing else is there."""
        with suppress(OSError):
            for path in (self.settings, self.bash_env):
                Path(path).unlink(missing_ok=True)
            Path(self.settings).parent.rmdir()


def _settings(found: Supervised, gang: str, site: Site) -> LaunchSettings:
    return LaunchSettings(
        gang=gang,
        coordinator=coordinator_for_nodes(site),
        agent=agent(),
        spares=found.job.spares,
        spec=found.spec,
        launch=found.looked.launch,
    )


def coordinator_for_nodes(site: Site) -> str:
    """The address that nodes are told. `localhost` would be a different host on each node. Then it is empty, and nodes
    use the address in their own settings."""
    return "" if site.coordinator_hosts() & _LOOPBACK else site.coordinator


def agent() -> str:
    """The absolute path of muster-agent: the script may change PATH.

    Raises:
        SiteFault: it is not installed.
    """
    beside = Path(sysconfig.get_path("scripts")) / _AGENT
    found = shutil.which(_AGENT) or (str(beside) if beside.exists() else None)
    if found is None:
        raise SiteFault(f"{_AGENT} is not installed beside muster, and not in PATH", "Nothing was queued")
    return os.path.abspath(found)


def known_run(found: Supervised, gang: str, call: ScriptCall) -> Submission:
    """What the record of the run is made of."""
    spec = JobSpec()
    spec.CopyFrom(found.spec)
    spec.nodes = found.nodes.nodes or 0
    words = (call.script or found.looked.script.name, *call.arguments)
    spec.command.extend(os.fsencode(word).decode(errors="replace") for word in words)
    shown = tuple(one for one in (*call.options, *found.added) if names.is_one_line(one.value or ""))
    return Submission(found.job, spec, gang, "", shown)


def waiting_spec(shown: JobSpec, job: Job) -> JobSpec:
    """What is known before the script launches. `shown`: of `known_run`."""
    spec = JobSpec()
    spec.CopyFrom(shown)
    spec.nodes, spec.ranks_per_node, spec.spares = job.nodes, job.ranks_per_node or 1, job.spares
    spec.awaits_launch = True
    return spec


def unsupervised_job(found: Unsupervised, script: UserScript) -> tuple[str, JobSpec]:
    """The gang and the spec of a script that is not supervised: what `muster status` shows of it."""
    name = job_name(found.asked.value("job-name") or script.name)
    spec = JobSpec(name=name, nodes=likely_nodes(found.asked) or 1, ranks_per_node=1, awaits_launch=True)
    of_array = "; of the array, the last task is shown" if found.asked.last("array") else ""  # it has the array's id
    spec.unsupervised = f"{found.reason}{of_array}"
    return gang_ids.new_gang_id(name, os.geteuid()), spec
