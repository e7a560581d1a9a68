"""What every batch script of Muster shares, and the whole script of a small job for a node of the shared pool. Pure.

`muster submit` renders the script of a gang's own job (launcher/submission/script.py). An agent renders the script of a
pool job. Both export the same settings and start the same srun.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from google.protobuf import json_format

from muster.v1.common_pb2 import JobSpec

# A job whose step loses a node trains on: srun ends no task because of another, and binds the agent to no core.
SRUN = (
    "srun",
    "--ntasks-per-node=1",
    "--no-kill",
    "--kill-on-bad-exit=0",
    "--wait=0",
    "--cpu-bind=none",
    "--mpi=none",
    "--input=none",
)
_END = "END_OF_SPEC"
# Given more than once, all of them hold.
_JOINED = {"--constraint": "&", "--exclude": ","}


@dataclass(frozen=True, slots=True)
class PoolJob:
    """What the small jobs of a gang are made from. `restarts`: how often Slurm has restarted the gang's own job;
    `coordinator`: host:port, empty where the nodes' own
    muster.toml says it; `agent`: the command muster-agent as the nodes find it."""

    gang: str
    spec: JobSpec
    restarts: int
    coordinator: str = ""
    agent: str = "muster-agent"


def render_pool(job: PoolJob, serial: int, options: Sequence[str], minutes: int | None) -> str:
    """The script of a small job: one node of the shared pool, whose agent joins the gang.

    Args:
        serial: of the request.
        options: the site's options of sbatch that lead to the pool.
        minutes: how long the gang's own job may still run; None: for ever.
    """
    spec = job.spec
    lines = [
        "#!/bin/bash",
        f"# One node of the shared pool for {job.gang}, request {serial}. Rendered by muster-agent.",
        f"#SBATCH --job-name={spec.name}",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        "#SBATCH --no-requeue",
        f"#SBATCH --output={quoted(spec.run_dir)}/slurm-%j.out",
        *([f"#SBATCH --time={minutes}"] if minutes else []),
        *(f"#SBATCH {quoted(option)}" for option in _joined((*spec.node_options, *options))),
        "",
        *exports(job.gang, job.coordinator, spec),
        f"export MUSTER_POOL={serial} MUSTER_RESTARTS={job.restarts}",
        "",
        f"exec {srun_line(job.agent)}",
    ]
    return "\n".join(lines) + "\n"


def _joined(options: Sequence[str]) -> list[str]:
    """One option of each name, the last one, or several joined where all of them hold."""
    found: dict[str, str] = {}
    for option in options:
        key, _, value = option.partition("=")
        mark = _JOINED.get(key, "")
        found[key] = f"{found[key]}{mark}{value}" if mark and key in found else value
    return [f"{key}={value}" for key, value in found.items()]


def exports(gang: str, coordinator: str, spec: JobSpec) -> Iterator[str]:
    """What agents need to know."""
    yield f"export MUSTER_GANG={shlex.quote(gang)}"
    if coordinator:
        yield f"export MUSTER_COORDINATOR={shlex.quote(coordinator)}"
    yield f"MUSTER_SPEC=$(cat <<'{_END}'"
    yield json_format.MessageToJson(spec, preserving_proto_field_name=True, sort_keys=True, ensure_ascii=True)
    yield _END
    yield ")"
    yield "export MUSTER_SPEC"


def srun_line(agent: str) -> str:
    return f"{' '.join(SRUN)} \\\n    {shlex.quote(agent)} run"


def quoted(word: str) -> str:
    """As sbatch reads words in #SBATCH lines: in double quotes where they hold blanks or a #."""
    if word and not set(word) & set(" \t#'\"\\"):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
