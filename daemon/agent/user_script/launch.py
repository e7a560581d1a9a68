"""The launch of a user's batch script becomes the gang: its JobSpec, the environments of ranks and agents. Pure.

Ranks get the environment of the launch. Agents get what of it can't harm them: neither a search path of libraries or
modules, nor what srun would take for an option of the agents' own step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from muster.daemon.agent.user_script.launch_rule import Decision, Kind
from muster.daemon.agent.user_script.own_nodes import Nodes
from muster.slurm.client.batch_script import SRUN
from muster.slurm.client.srun_options import SrunWords
from muster.slurm.client.submit_environment import OF_SLURM, REACH_SLURM
from muster.v1.common_pb2 import JobSpec

_NOT_FOR_AGENTS = (*OF_SLURM, "PYTHON", "LD_", "GRPC_", "BASH_ENV", "MUSTER_")
_STILL_FOR_AGENTS = REACH_SLURM | {
    "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_RESTART_COUNT", "SLURM_JOB_END_TIME", "SLURM_JOB_START_TIME",
    "SLURM_SUBMIT_DIR", "MUSTER_CONFIG",
}  # fmt: skip
_KEPT = ("quiet", "verbose", "comment", "acctg-freq", "profile")
"""Options of the launch that the srun of the agents gets, too. --unbuffered would give them terminals."""
_ALL = "ALL"


def launch_spec(template: JobSpec, decision: Decision, words: SrunWords, nodes: Nodes, folder: str) -> JobSpec:
    """The JobSpec of the gang."""
    spec = JobSpec()
    spec.CopyFrom(template)
    spec.nodes, spec.spares = len(nodes.own), len(nodes.spares)
    spec.min_nodes = min(spec.min_nodes or spec.nodes, spec.nodes)
    spec.work_dir = os.path.join(folder, words.value("chdir") or "")
    spec.own_nodes[:] = nodes.own
    if decision.kind is Kind.RANKS:
        spec.command[:] = words.command
        spec.ranks_per_node, spec.ranks_of_srun = decision.tasks_per_node, True
    return spec


def launch_environment(environ: Mapping[str, str], export: str | None) -> dict[str, str]:
    """The environment of a task of the launch, before Slurm adds its own. `export`: the value of srun's --export."""
    if export is None:
        return dict(environ)
    names = export.split(",")
    everything = _ALL in names
    given = dict(word.split("=", 1) for word in names if "=" in word)
    kept = {
        name: value
        for name, value in environ.items()
        if everything or name in names or name.startswith(("SLURM", "SRUN_"))
    }
    return {**kept, **given}


def agents_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the agents and of their srun, before the settings of Muster."""
    return {
        name: value
        for name, value in environ.items()
        if name in _STILL_FOR_AGENTS or not name.startswith(_NOT_FOR_AGENTS)
    }


def agents_srun(
    srun: str,
    agent: str,
    decision: Decision,
    words: SrunWords,
    count: int,
    site: Sequence[str],
    output: Sequence[str] = (),
    gpus: str = "",
) -> list[str]:
    """The command line that starts one agent on each node.

    Args:
        srun: the path of the real srun.
        agent: the path of muster-agent.
        count: all nodes of the job.
        site: options of the site's plug-ins, which are passed on whatever they mean.
        output: those that say where the output goes.
        gpus: the option of own_nodes.gpus_option.
    """
    kept = [word for option in words.options if option.name in (*_KEPT, *site) for word in option.words]
    task = ["--", *words.command] if decision.kind is Kind.LAUNCHER else []
    size = ("--overlap", f"--nodes={count}", f"--ntasks={count}", *filter(None, (gpus,)))
    return [srun, *SRUN[1:], *size, *output, *kept, agent, "run", *task]
