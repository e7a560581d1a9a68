"""Whether the nodes have the memory that a job's memory checkpoints need: looked at before the job is queued."""

from __future__ import annotations

from muster.launcher.errors import WrongInput
from muster.launcher.spec.spec import Job
from muster.slurm.client.errors import SlurmError
from muster.slurm.client.states import NodeState
from muster.slurm.client.types import Node, Slurm, Unknown

_TIMEOUT_S = 10.0
_OUT_OF_SERVICE = frozenset({NodeState.DOWN, NodeState.DRAIN, NodeState.FAIL})


async def check_memory(job: Job, slurm: Slurm) -> None:
    """Check what [model] says of the job's state against --mem, or else against Slurm's nodes.

    A Slurm that does not answer is asked nothing: sbatch will say it.

    Raises:
        WrongInput: too few nodes have the memory. The message has the numbers.
    """
    if not job.model.parameters:
        return
    from muster.launcher.plan.node_memory import asked_bytes, why_too_little  # few jobs need the model of costs

    usable: list[Node] | None = None
    if asked_bytes(job.slurm.mem) is None:
        try:
            nodes = await slurm.nodes(timeout_s=_TIMEOUT_S)
        except SlurmError:
            return
        if isinstance(nodes, Unknown):
            return
        usable = [
            node
            for node in nodes.values()
            if isinstance(node, Node)
            and not node.states & _OUT_OF_SERVICE
            and (job.slurm.partition is None or job.slurm.partition in node.partitions)
        ]
    if words := why_too_little(job, usable):
        raise WrongInput(
            words,
            "take more nodes, shard the state (parallelism.sharding), ask for more with slurm.mem, or set "
            "checkpoint.memory = false. Nothing was queued",
        )
