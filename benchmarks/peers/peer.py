"""The alternatives as data: the site's Slurm settings and the user's sbatch script for each.

"Defaults" are those of Slurm and of torchrun's documentation. "Tuned" is what a careful site and user can set without
writing a program. All alternatives have 8 ranks (torchrun's documented elastic mode: 8 to 10), one on each node, and a
checkpoint file on shared storage every 10 steps. The scheduler runs every second (on a default site: every 60 s).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TRAIN = "train_plain.py"


@dataclass(frozen=True)
class Peer:
    """One way to continue training after the loss of a node.

    `settings` are fields of `ClusterSpec`. A run that has not recovered after `deadline_s` seconds counts as not
    recovered. `notes` explain what happens, by fault. `faults`: those that it is measured with.
    """

    name: str
    about: str
    settings: Mapping[str, Any]
    script: str
    deadline_s: float
    notes: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ("node_crash", "power_loss", "node0_crash")
    submit: str = "sbatch --parsable"
    """The command that queues the script."""

    @property
    def is_supervised(self) -> bool:
        """Whether Muster's coordinator has to run."""
        return self.submit.startswith("muster ")


def under_srun(requeue: str, srun: str = "") -> str:
    """A batch script with 8 ranks under srun. `requeue` and `srun` are options of sbatch and srun."""
    return f"""#!/bin/bash
#SBATCH --job-name=train --nodes=8 --ntasks-per-node=1 --exclusive {requeue}
#SBATCH --output=slurm.out --open-mode=append
export OMP_NUM_THREADS=1 MASTER_PORT=29500
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun {srun} python3 {TRAIN}
"""


def under_torchrun(agents: int, torchrun: str, train: str = "", environment: str = "OMP_NUM_THREADS=1") -> str:
    """A batch script with elastic agents, one on each node, whose rendezvous is on the first node. Job and agents
    survive the loss of a node.
    """
    return f"""#!/bin/bash
#SBATCH --job-name=train --nodes={agents} --ntasks-per-node=1 --exclusive --no-kill
#SBATCH --output=slurm.out --open-mode=append
export {environment}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --no-kill --label python3 no_libuv.py --nproc-per-node=1 \\
    --rdzv-backend=c10d --rdzv-endpoint=$head:29500 --rdzv-id=$SLURM_JOB_ID {torchrun} {TRAIN} {train}
"""


def with_plain_torchrun(nodes: int, train: str, torchrun: str = "./torchrun") -> str:
    """A batch script as users have it: torchrun on each node, and no word of Muster."""
    return f"""#!/bin/bash
#SBATCH --job-name=train --nodes={nodes} --ntasks-per-node=1 --exclusive
#SBATCH --output=slurm.out --open-mode=append
export OMP_NUM_THREADS=1
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun {torchrun} --nnodes={nodes} --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=$head:29500 \\
    --rdzv-id=$SLURM_JOB_ID {train}
"""


def with_plain_python(nodes: int, train: str) -> str:
    """The same, with a task of srun for each rank."""
    return f"""#!/bin/bash
#SBATCH --job-name=train --nodes={nodes} --ntasks-per-node=1 --exclusive
#SBATCH --output=slurm.out --open-mode=append
export OMP_NUM_THREADS=1 MASTER_PORT=29500
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun python3 {train}
"""


DEFAULT_SITE = {"slurmd_timeout": 300, "requeue_delay": None, "expedited_requeue": False}
TUNED_SITE = {"slurmd_timeout": 10, "requeue_delay": 1, "expedited_requeue": False}
EXPEDITED_SITE = {"slurmd_timeout": 10, "requeue_delay": 1, "expedited_requeue": True}
