"""What would be right when sbatch refuses a job. Slurm's own words say what is wrong, and often not which key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from muster.launcher.spec.job_options import all_options
from muster.launcher.submission.limits import size_words

if TYPE_CHECKING:
    from muster.launcher.spec.spec import Job
    from muster.slurm.client.sbatch_options import SbatchOption

_NO_SUCH_SHAPE = "Requested topology configuration is not available"


def hint_for(message: str, job: Job, options: Sequence[SbatchOption]) -> str:
    """The hint for Slurm's `message`. Empty if its words say it all. `options`: those of the command line."""
    own = {option.name: str(option) for option in all_options(job, options)}
    gres = f"gpus_per_node = {job.gpus_per_node}: " if job.gpus_per_node else _given(own, "gres", "gpus-per-node")
    limits = f"it asks for {size_words(job.nodes, job.spares)}. sacctmgr show qos, sacctmgr show assoc and "
    hints = {
        "accounting/QOS policy": f"{limits}sinfo -o '%P %s %l' show the limits",
        "Node count specification invalid": f"{limits}sinfo -o '%P %s %l' show the limits",
        "Invalid account": f"{_given(own, 'account')}sacctmgr show assoc user=$USER format=account,qos shows yours",
        "Invalid qos": f"{_given(own, 'qos')}sacctmgr show assoc user=$USER format=account,qos shows yours",
        "Requested time limit is invalid": "sinfo -o '%P %l' shows the longest time of each partition",
        _NO_SUCH_SHAPE: "nodes + spares must be the size of a shape that the torus has (scontrol show topoconf, "
        "placements)",
        "generic resource (gres)": f"{gres}no node has such a GRES. sinfo -o '%P %G' shows what partitions have",
        "Invalid partition name": f"{_given(own, 'partition')}sinfo -o %P shows the partitions",
        "Invalid feature": f"{_given(own, 'constraint')}sinfo -o '%P %f' shows the features of nodes",
        "Invalid node name": f"{_given(own, 'exclude', 'nodelist')}Slurm does not have one of the nodes, or a bracket "
        "is missing. sinfo -h -o %N shows the names",
        "Requested reservation is invalid": f"{_given(own, 'reservation')}scontrol show reservation shows those that "
        "exist, and who may use them",
        "Invalid license": f"{_given(own, 'licenses')}scontrol show licenses shows their names, and how many there are",
        "Job dependency problem": f"{_given(own, 'dependency')}Slurm does not know the job any more, or the condition: "
        "afterok:JOB, for example. squeue --me shows jobs",
        "Invalid Trackable RESource": f"{gres}GPUs are written as gpu:COUNT or gpu:TYPE:COUNT",
        "Invalid --time": f"{_given(own, 'time')}times are written as MINUTES, H:MM:SS or D-HH:MM:SS",
        "Unable to contact slurm controller": "check slurmctld with: scontrol ping",
        "unrecognized option": "sbatch does not have this option. An argument of the script belongs into command of "
        "job.toml",
        "Requested node configuration is not available": "too few nodes of the partition have all that is asked of "
        f"{size_words(job.nodes, job.spares)}: sinfo -o '%P %D %c %m %G %f' shows nodes, CPUs, memory, GRES, features",
    }
    return next((hint for words, hint in hints.items() if words in message), "")


def _given(own: Mapping[str, str], *names: str) -> str:
    """Those of the options that were given, before a hint; empty: none, a variable or a default of the site says it."""
    given = " ".join(own[name] for name in names if name in own)
    return f"{given}: " if given else ""
