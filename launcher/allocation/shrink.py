"""The same job with fewer copies of the model. Pure."""

from __future__ import annotations

from pydantic import ValidationError

from muster.launcher.spec.spec import Job


def smaller_jobs(job: Job) -> list[Job]:
    """The job with fewer whole copies of the model, the smallest first: those that are valid, and not below min_nodes.

    Empty if the job has one copy.
    """
    copy = job.axes.world_size // job.axes.data
    given = job.model_dump(exclude={"gpus"}, exclude_defaults=True)
    found = []
    for nodes in range(job.min_nodes or 1, job.nodes):
        if nodes * job.local_ranks % copy:
            continue
        split = {**given.get("parallelism", {}), "data": nodes * job.local_ranks // copy}
        try:
            found.append(Job.model_validate({**given, "nodes": nodes, "parallelism": split}))
        except ValidationError:
            continue  # for example, the copies would not divide the global batch
    return found
