"""The tables of job.toml that estimates need, as JSON on the wire: a job that runs can then be compared with its plan.

Nothing else of job.toml goes there. Commands, folders and the environment are nobody's business but the job's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from muster.v1.common_pb2 import JobSpec

if TYPE_CHECKING:
    from muster.launcher.spec.spec import Job

_KEPT: Mapping[str, set[str] | bool] = {
    "model": True,
    "parallelism": True,
    "placement": True,
    "slurm": {"partition", "gres"},
    "gpus_per_node": True,
}


def write_tables(job: Job) -> str:
    """The tables, without what has its default; empty if nothing is left."""
    found = job.model_dump(mode="json", include=_KEPT, exclude_defaults=True)
    kept = {name: table for name, table in found.items() if table}
    return json.dumps(kept, sort_keys=True) if kept else ""


def read_job(spec: JobSpec) -> dict[str, Any]:
    """What is known of job.toml, as `Job` takes it. Without tables, the degrees that each JobSpec has.

    Raises:
        ValueError: the tables are no JSON object.
    """
    tables = json.loads(spec.estimate_tables or "{}")
    if not isinstance(tables, dict):
        raise ValueError("the tables for estimates are no JSON object")
    if not spec.estimate_tables:
        degrees = {
            "tensor": spec.tensor_parallel,
            "pipeline": spec.pipeline_parallel,
            "context": spec.context_parallel,
            "expert": spec.expert_parallel,
        }
        tables["parallelism"] = {name: degree for name, degree in degrees.items() if degree}
        if spec.parallel_order:
            tables["parallelism"]["order"] = spec.parallel_order
        packed = {one.kind: f"{'require' if one.required else 'prefer'} {one.packed_in}" for one in spec.traffic}
        tables["placement"] = {kind: words for kind, words in packed.items() if " " not in kind and " " in words}
    size = {"name": spec.name, "nodes": spec.nodes, "spares": spec.spares, "ranks_per_node": spec.ranks_per_node}
    # A job needs a command and a folder. Estimates don't.
    return {**tables, **size, "command": ["-"], "run_dir": "/-"}
