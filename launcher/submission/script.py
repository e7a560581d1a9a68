"""Renders the sbatch script of a job: one readable file. `--dry-run` prints it, submission passes it to sbatch. Pure.

The batch script becomes `muster-agent batch`. This process starts srun and outlives it: the job ends when this process
ends. srun starts one agent on each node, including spares. The agents do everything else.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muster.launcher.errors import WrongInput
from muster.launcher.spec import job_options
from muster.slurm.client.batch_script import MAX_SPEC_BYTES, environment_lines, spec_text, srun_command
from muster.slurm.client.sbatch_options import SbatchOption, read_texts
from muster.v1.common_pb2 import JobSpec
from muster.wording import counted

if TYPE_CHECKING:
    from muster.launcher.spec.spec import Job

# Options that apply to a single node. A node of the shared pool gets the same values.
_PER_NODE_OPTIONS = frozenset(
    {
        "account", "qos", "wckey", "mem", "mem-per-cpu", "mem-per-gpu", "cpus-per-task", "gres", "gpus-per-node",
        "gpus-per-task", "tres-per-node", "tmp", "mincpus", "constraint", "exclude", "mcs-label",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Submission:
    """All input of a script. `agent` is the command muster-agent as the nodes find it."""

    job: Job
    spec: JobSpec
    gang: str
    coordinator: str
    """host:port. If empty, the nodes use the address in their own /etc/muster/muster.toml."""
    options: tuple[SbatchOption, ...] = ()
    """Additional sbatch options from the command line, and those that the environment of the submitting shell asks."""
    shape: tuple[str, ...] = ()
    """Options that give the job the nodes that its groups ask for."""
    shape_notes: tuple[str, ...] = ()
    """Why, one line each, without control characters."""
    agent: str = "muster-agent"


def render(submission: Submission) -> str:
    """Returns the script, which ends with a newline.

    Raises:
        WrongInput: an option contradicts job.toml, or the settings are too large for a variable.
    """
    spec = submission.spec
    if wrong := job_options.problems(submission.options):
        raise WrongInput("; ".join(wrong), "Nothing was queued")
    if (size := len(spec_text(spec))) > MAX_SPEC_BYTES:
        raise WrongInput(
            f"the job's settings have {size} bytes, and Linux starts no program with more than {MAX_SPEC_BYTES} in a "
            "variable: let command and [env] name a file that holds the long values",
            "Nothing was queued",
        )
    spares = f" and {counted(spec.spares, 'spare')}" if spec.spares else ""
    ranks = f"{counted(spec.ranks_per_node, 'rank')} each"
    lines = [
        "#!/bin/bash",
        f"# {spec.name}: {counted(spec.nodes, 'node')}{spares}, {ranks}. Rendered by muster submit.",
        *(f"# {note}" for note in submission.shape_notes),
        *(option.directive for option in sbatch_options(submission)),
        "",
        "unset MUSTER_POOL MUSTER_RESTARTS",  # set if another Muster job submits this one
        *environment_lines(submission.gang, submission.coordinator, spec),
        "",
        f"exec {shlex.quote(submission.agent)} batch -- \\\n    {srun_command(submission.agent)}",
    ]
    return "\n".join(lines) + "\n"


def node_options(job: Job, options: Sequence[SbatchOption]) -> list[str]:
    """The sbatch options that apply to a single node, one string each."""
    return [str(option) for option in job_options.all_options(job, options) if option.name in _PER_NODE_OPTIONS]


def sbatch_options(submission: Submission) -> Iterator[SbatchOption]:
    """The options in the script's order. Later options override earlier ones, so the user's own options come last."""
    job, spec = submission.job, submission.spec
    yield SbatchOption("job-name", spec.name)
    yield SbatchOption("nodes", str(spec.nodes + spec.spares))
    yield SbatchOption("ntasks-per-node", "1")
    yield SbatchOption("exclusive")
    yield SbatchOption("no-kill")
    # Only the coordinator requeues the job: with --no-kill, Slurm does not requeue on its own.
    yield SbatchOption("requeue" if spec.requeue else "no-requeue")
    yield SbatchOption("open-mode", "append")
    yield SbatchOption("output", f"{spec.run_dir}/slurm-%j.out")
    yield from read_texts(submission.shape)
    yield from job_options.all_options(job, submission.options)
