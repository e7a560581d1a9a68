"""What a user would have otherwise, as data: the site's Slurm settings and the user's sbatch script for each.

"Defaults" are those of Slurm and of torchrun's documentation; "tuned" is what a careful site and user can set without
writing a program of their own. All have 8 ranks (torchrun's documented elastic way: 8 to 10), one a node, a
checkpoint file on shared disk every 10 steps, and a scheduler that looks every second (a plain site's: every 60 s).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TRAIN = "train_plain.py"


@dataclass(frozen=True)
class Peer:
    """One way to train through a node's loss.

    `settings` are fields of `ClusterSpec`. A run that has not recovered after `deadline_s` seconds has not recovered.
    `notes` say, by fault, what happens there and why, in words.
    """

    name: str
    about: str
    settings: Mapping[str, Any]
    script: str
    deadline_s: float
    notes: Mapping[str, str] = field(default_factory=dict)


def under_srun(requeue: str, srun: str = "", train: str = "") -> str:
    """A batch script of 8 ranks that srun starts; `requeue`, `srun` and `train` are options of each."""
    return f"""#!/bin/bash
#SBATCH --job-name=train --nodes=8 --ntasks-per-node=1 --exclusive {requeue}
#SBATCH --output=slurm.out --open-mode=append
export OMP_NUM_THREADS=1 MASTER_PORT=29500
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun {srun} python3 {TRAIN} {train}
"""


def under_torchrun(agents: int, torchrun: str, train: str = "", environment: str = "OMP_NUM_THREADS=1") -> str:
    """A batch script of elastic agents, one a node, that meet at the first; agents and job outlive a node."""
    return f"""#!/bin/bash
#SBATCH --job-name=train --nodes={agents} --ntasks-per-node=1 --exclusive --no-kill
#SBATCH --output=slurm.out --open-mode=append
export {environment}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --no-kill --label python3 no_libuv.py --nproc-per-node=1 \\
    --rdzv-backend=c10d --rdzv-endpoint=$head:29500 --rdzv-id=$SLURM_JOB_ID {torchrun} {TRAIN} {train}
"""


DEFAULT_SITE = {"slurmd_timeout": 300, "requeue_delay": None, "expedited_requeue": False}
TUNED_SITE = {"slurmd_timeout": 10, "requeue_delay": 1, "expedited_requeue": False}
EXPEDITED_SITE = {"slurmd_timeout": 10, "requeue_delay": 1, "expedited_requeue": True}
