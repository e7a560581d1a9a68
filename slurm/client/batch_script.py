"""The parts that all batch scripts of Muster share, and the whole script of a pool job. Pure.

A pool job is a small Slurm job that adds one node of the site's shared pool to a gang. `muster submit` renders the
script of a gang's own job (launcher/submission/script.py). An agent renders the script of a pool job. Both scripts
export the same settings and start the same srun.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from google.protobuf import json_format

from muster.slurm.client import names
from muster.v1.common_pb2 import JobSpec

# The step must survive the loss of a node: srun ends no task because another task ended. srun binds agents to no core.
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
# If one of these options is given several times, Slurm needs one value with all parts, joined by this character.
_JOINED = {"--constraint": "&", "--exclude": ","}


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


def render_pool_script(job: PoolJob, serial: int, options: Sequence[str], minutes: int | None) -> str:
    """Returns the script of a pool job: one node of the shared pool, whose agent joins the gang. Raises NotOneLine.

    Args:
        serial: the number of the pool request.
        options: the site's sbatch options that select the pool.
        minutes: the time that is left for the gang's own job. None: no limit.
    """
    spec = job.spec
    lines = [
        "#!/bin/bash",
        f"# One node of the shared pool for {one_line(job.gang)}, request {serial}. Rendered by muster-agent.",
        f"#SBATCH --job-name={one_line(spec.name)}",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        "#SBATCH --no-requeue",
        f"#SBATCH --output={quote_directive(spec.run_dir)}/slurm-%j.out",
        *([f"#SBATCH --time={minutes}"] if minutes else []),
        *(f"#SBATCH {quote_directive(option)}" for option in _joined((*spec.node_options, *options))),
        "",
        *environment_lines(job.gang, job.coordinator, spec),
        f"export MUSTER_POOL={serial} MUSTER_RESTARTS={job.restarts}",
        "",
        f"exec {srun_command(job.agent)}",
    ]
    return "\n".join(lines) + "\n"


def _joined(options: Sequence[str]) -> list[str]:
    """Keeps one option of each name: the last one, or all values joined if Slurm applies all of them."""
    found: dict[str, str] = {}
    for option in options:
        key, _, value = option.partition("=")
        mark = _JOINED.get(key, "")
        found[key] = f"{found[key]}{mark}{value}" if mark and key in found else value
    return [f"{key}={value}" for key, value in found.items()]


def environment_lines(gang: str, coordinator: str, spec: JobSpec) -> Iterator[str]:
    """The shell lines that export an agent's settings. Raises NotOneLine."""
    yield f"export MUSTER_GANG={shlex.quote(one_line(gang))}"
    if coordinator:
        yield f"export MUSTER_COORDINATOR={shlex.quote(one_line(coordinator))}"
    yield f"MUSTER_SPEC=$(cat <<'{_END}'"
    yield json_format.MessageToJson(spec, preserving_proto_field_name=True, sort_keys=True, ensure_ascii=True)
    yield _END
    yield ")"
    yield "export MUSTER_SPEC"


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


def quote_directive(word: str) -> str:
    """Quotes a word for a #SBATCH line: in double quotes if the word holds blanks or a #. Raises NotOneLine."""
    one_line(word)
    if word and not set(word) & set(" \t#'\"\\"):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
