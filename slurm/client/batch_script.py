"""The parts that all batch scripts of Muster share, and the whole script of a pool job. Pure.

A pool job is a small Slurm job that adds one node of the site's shared pool to a gang. `muster submit` renders the
script of a gang's own job (launcher/submission/script.py). An agent renders the script of a pool job. Both scripts
export the same settings and start the same srun.

`--no-kill`, of sbatch and of srun, has Slurm keep the job when it loses a node. It does not protect srun itself: a node
that dies while the step is launched takes srun down, and `muster-agent batch` launches the step again.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from google.protobuf import json_format

from muster.slurm.client import names
from muster.slurm.client.sbatch_options import SbatchOption, joined, read_texts
from muster.v1.common_pb2 import JobSpec

# The step must survive the loss of a node: srun ends no task because another task ended. Where a site has OOMKillStep,
# a rank that the kernel kills would take the agents of all nodes with it. srun binds agents to no core.
# Agents get the environment of the script, also if the job was submitted with --export=NONE.
SRUN = (
    "srun",
    "--ntasks-per-node=1",
    "--no-kill",
    "--kill-on-bad-exit=0",
    "--wait=0",
    "--oom-kill-step=0",
    "--cpu-bind=none",
    "--mpi=none",
    "--input=none",
    "--export=ALL",
)
RANK_ENVIRONMENT = "MUSTER_RANK_ENVIRONMENT"
"""Names the file with the environment that a user's own batch script has where it launches: NAME=VALUE each, separated
by NUL. Ranks get it in place of the environment of their agent."""
_END = "END_OF_SPEC"
MAX_SPEC_BYTES = 128 * 1024 - len("MUSTER_SPEC=") - 1
"""Bytes of a spec as JSON. Linux starts no program with a variable of 128 KiB or more (MAX_ARG_STRLEN)."""
# If one of these options is given several times, Slurm needs one value with all parts, joined by this character.
_JOINED = {"constraint": "&", "exclude": ","}


class NotOneLine(ValueError):
    """A text that would be more than a part of one line of a script."""


@dataclass(frozen=True, slots=True)
class PoolJob:
    """The settings of a gang's pool jobs.

    `restarts` is the restart count of the gang's own job. `coordinator` is host:port; if empty, the nodes use the
    address in their own muster.toml. `agent` is the command muster-agent as the nodes find it.
    """

    gang: str
    spec: JobSpec
    restarts: int
    coordinator: str = ""
    agent: str = "muster-agent"
    rank_environment: str = ""
    """The file that RANK_ENVIRONMENT names; empty: there is none."""


def render_pool_script(job: PoolJob, serial: int, site: Sequence[str], minutes: int | None) -> str:
    """Returns the script of a pool job: one node of the shared pool, whose agent joins the gang.

    Args:
        serial: the number of the pool request.
        site: the site's sbatch options that select the pool, one text each.
        minutes: the time that is left for the gang's own job. None: no limit.

    Raises:
        NotOneLine: a text would be more than a part of one line.
        WrongOption: an option is none of sbatch.
    """
    spec = job.spec
    options = [
        SbatchOption("job-name", spec.name),
        SbatchOption("nodes", "1"),
        SbatchOption("ntasks-per-node", "1"),
        SbatchOption("exclusive"),
        SbatchOption("no-requeue"),
        SbatchOption("output", f"{spec.run_dir}/slurm-%j.out"),
        *([SbatchOption("time", str(minutes))] if minutes else []),
        *joined(read_texts((*spec.node_options, *site)), _JOINED),
    ]
    lines = [
        "#!/bin/bash",
        f"# One node of the shared pool for {one_line(job.gang)}, request {serial}. Rendered by muster-agent.",
        *(option.directive for option in options),
        "",
        *environment_lines(job.gang, job.coordinator, spec),
        f"export MUSTER_POOL={serial} MUSTER_RESTARTS={job.restarts}",
        *([f"export {RANK_ENVIRONMENT}={shlex.quote(one_line(job.rank_environment))}"] if job.rank_environment else []),
        "",
        f"exec {srun_command(job.agent)}",
    ]
    return "\n".join(lines) + "\n"


def environment_lines(gang: str, coordinator: str, spec: JobSpec) -> Iterator[str]:
    """The shell lines that export an agent's settings. Raises NotOneLine."""
    yield f"export MUSTER_GANG={shlex.quote(one_line(gang))}"
    if coordinator:
        yield f"export MUSTER_COORDINATOR={shlex.quote(one_line(coordinator))}"
    yield f"MUSTER_SPEC=$(cat <<'{_END}'"
    yield spec_text(spec)
    yield _END
    yield ")"
    yield "export MUSTER_SPEC"


def spec_text(spec: JobSpec) -> str:
    """The spec as JSON."""
    return json_format.MessageToJson(spec, preserving_proto_field_name=True, sort_keys=True, ensure_ascii=True)


def srun_command(agent: str) -> str:
    """The srun command that starts one agent on each node."""
    return f"{' '.join(SRUN)} \\\n    {shlex.quote(one_line(agent))} run"


def one_line(text: str) -> str:
    """Returns `text`, which becomes a part of one line.

    Raises:
        NotOneLine: a newline would begin a line of its own, for example another #SBATCH option.
    """
    if not names.is_one_line(text):
        raise NotOneLine(f"{text[:80]!r} must be one line without control characters: it is a part of a batch script")
    return text
