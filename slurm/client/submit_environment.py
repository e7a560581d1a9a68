"""The environment in which Slurm's commands are called, so that the shell of whoever calls changes nothing. Pure.

They take options from variables, and for sbatch a variable overrides the line of a script. A shell may have any of
them: a site's defaults, those of the job that the shell is a part of, those of a user. Therefore:

- Of `SBATCH_*`, those remain that say where a job may run and who pays, unless the job says it itself. They become
  options of the script, so that the script shows all that is asked. The others are dropped.
- All other variables of Slurm are dropped, but for those that say how Slurm is reached. Slurm sets those of the new
  job.
- What asks or changes something (squeue, scontrol, scancel) sees none but those: a variable may hide jobs, cut lines,
  change the form of times, or let scancel leave a job alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from muster.slurm.client.sbatch_options import SbatchOption

OF_SLURM = ("SBATCH_", "SLURM", "SRUN_", "_SLURM_")
"""Prefixes of variables that Slurm reads or sets. The last one is that of plug-ins' options in a job."""
_OF_OTHER_COMMANDS = ("SQUEUE_", "SCONTROL_", "SCANCEL_", "SINFO_")
REACH_SLURM = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_SOCKET"})
"""Variables that say how Slurm is reached."""
_SITE = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_ACCTG_FREQ": "acctg-freq",
    "SBATCH_CLUSTER_CONSTRAINT": "cluster-constraint",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_NETWORK": "network",
    "SBATCH_PARTITION": "partition",
    "SBATCH_PROFILE": "profile",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_WCKEY": "wckey",
}
"""Where a job may run, for how long, who pays, and what is accounted."""
OTHER_CLUSTER = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
"""Variables that send jobs to another cluster, where nobody would supervise them."""
_OF_STEP = frozenset({"SLURM_ACCOUNT", "SLURM_PARTITION", "SLURM_QOS", "SLURM_RESERVATION", "SLURM_WCKEY"})
"""The same for an srun with an allocation of its own. Slurm sets none of them in a job."""


def site_options(environ: Mapping[str, str], given: Iterable[SbatchOption]) -> list[SbatchOption]:
    """The options that variables ask for, without those that are `given`."""
    names = {option.name for option in given}
    return [
        SbatchOption(option, value)
        for variable, option in _SITE.items()
        if option not in names and (value := environ.get(variable))
    ]


def ignored(environ: Mapping[str, str], taken: Iterable[SbatchOption]) -> list[str]:
    """Variables of sbatch that a person, or a site, has set and that the job does not follow. `taken`: site_options."""
    names = {option.name for option in taken}
    return sorted(
        name for name, value in environ.items() if name.startswith("SBATCH_") and value and _SITE.get(name) not in names
    )


def for_sbatch(environ: Mapping[str, str], taken: Iterable[SbatchOption] = ()) -> dict[str, str]:
    """The environment of sbatch, which the job inherits. `taken`: the site_options of the job. Their variables stay for
    jobs that this job submits.
    """
    names = {option.name for option in taken}
    return _without_slurm(environ, REACH_SLURM | {name for name, option in _SITE.items() if option in names})


def for_own_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of an srun that gets an allocation of its own, also inside another job."""
    return _without_slurm(environ, REACH_SLURM | _OF_STEP)


def for_commands(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of squeue, scontrol and scancel, and of an sbatch that queues nothing."""
    kept = _without_slurm(environ, REACH_SLURM)
    return {name: value for name, value in kept.items() if not name.startswith(_OF_OTHER_COMMANDS)}


def _without_slurm(environ: Mapping[str, str], kept: Collection[str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name in kept or not name.startswith(OF_SLURM)}
