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
from muster.slurm.client import names
from muster.slurm.client.batch_script import environment_lines, quote_directive, srun_command
from muster.v1.common_pb2 import JobSpec

if TYPE_CHECKING:
    from muster.launcher.spec.spec import Job

# Users may not pass these options: they would contradict job.toml or the options that Muster always sets. The value
# says what to use instead.
_RESERVED_OPTIONS = {
    "--nodes": "nodes and spares in job.toml",
    "-N": "nodes and spares in job.toml",
    "--ntasks": "ranks_per_node in job.toml",
    "-n": "ranks_per_node in job.toml",
    "--ntasks-per-node": "ranks_per_node in job.toml",
    "--job-name": "name in job.toml",
    "-J": "name in job.toml",
    "--requeue": "requeue in job.toml",
    "--no-requeue": "requeue in job.toml",
    "--no-kill": "always set",
    "-k": "always set",
    "--array": "several submissions, one for each gang",
    "-a": "several submissions, one for each gang",
    "--wrap": "command in job.toml",
}
# Options that apply to a single node (long name, short name). A node of the shared pool gets the same values.
_PER_NODE_OPTIONS = {
    "--account": "-A",
    "--qos": "-q",
    "--wckey": "",
    "--mem": "",
    "--mem-per-cpu": "",
    "--mem-per-gpu": "",
    "--cpus-per-task": "-c",
    "--gres": "",
    "--gpus-per-node": "",
    "--gpus-per-task": "",
    "--tres-per-node": "",
    "--tmp": "",
    "--mincpus": "",
    "--constraint": "-C",
    "--exclude": "-x",
}


@dataclass(frozen=True, slots=True)
class Submission:
    """All input of a script. `agent` is the command muster-agent as the nodes find it."""

    job: Job
    spec: JobSpec
    gang: str
    coordinator: str
    """host:port. If empty, the nodes use the address in their own /etc/muster/muster.toml."""
    options: tuple[str, ...] = ()
    """Additional sbatch options from the command line."""
    shape: tuple[str, ...] = ()
    """Options that give the job the nodes that its groups ask for."""
    shape_notes: tuple[str, ...] = ()
    """Why, one line each, without control characters."""
    agent: str = "muster-agent"


def render(submission: Submission) -> str:
    """Returns the script, which ends with a newline.

    Raises:
        WrongInput: an option contradicts job.toml.
    """
    job, spec = submission.job, submission.spec
    reject_reserved_options((*job.slurm.options, *submission.options))
    spares = f" and {spec.spares} spare{'s' * (spec.spares != 1)}" if spec.spares else ""
    ranks = f"{spec.ranks_per_node} rank{'s' * (spec.ranks_per_node != 1)} each"
    lines = [
        "#!/bin/bash",
        f"# {spec.name}: {spec.nodes} node{'s' * (spec.nodes != 1)}{spares}, {ranks}. Rendered by muster submit.",
        *(f"# {note}" for note in submission.shape_notes),
        *(f"#SBATCH {option}" for option in sbatch_options(submission)),
        "",
        "unset MUSTER_POOL MUSTER_RESTARTS",  # set if another Muster job submits this one
        *environment_lines(submission.gang, submission.coordinator, spec),
        "",
        f"exec {shlex.quote(submission.agent)} batch -- \\\n    {srun_command(submission.agent)}",
    ]
    return "\n".join(lines) + "\n"


def node_options(job: Job, options: Sequence[str]) -> list[str]:
    """The sbatch options that apply to a single node, one string each."""
    found = []
    words = [*(f"--{key}={value}" for key, value in _slurm_options(job).items()), *job.slurm.options, *options]
    for at, word in enumerate(words):
        key, equals, value = word.partition("=")
        for name, short in _PER_NODE_OPTIONS.items():
            if key == name or (short and word == short):
                found.append(f"{name}={value if equals else ''.join(words[at + 1 : at + 2])}")
            elif short and not word.startswith("--") and word.startswith(short):
                found.append(f"{name}={word.removeprefix(short)}")
    return found


def sbatch_options(submission: Submission) -> Iterator[str]:
    """The options in the script's order. Later options override earlier ones, so the user's own options come last."""
    job, spec = submission.job, submission.spec
    yield f"--job-name={spec.name}"
    yield f"--nodes={spec.nodes + spec.spares}"
    yield "--ntasks-per-node=1"
    yield "--exclusive"
    yield "--no-kill"
    # Only the coordinator requeues the job: with --no-kill, Slurm does not requeue on its own.
    yield "--requeue" if spec.requeue else "--no-requeue"
    yield "--open-mode=append"
    yield f"--output={quote_directive(spec.run_dir)}/slurm-%j.out"
    yield from submission.shape
    yield from (f"--{key}={quote_directive(value)}" for key, value in _slurm_options(job).items())
    yield from map(quote_directive, job.slurm.options)
    if submission.options:
        yield " ".join(map(quote_directive, submission.options))


def _slurm_options(job: Job) -> dict[str, str]:
    """The Slurm requests of job.toml, by sbatch's long option names."""
    slurm = job.slurm
    wanted = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "constraint": slurm.constraint,
        "time": slurm.time,
        "mem": slurm.mem,
        "cpus-per-task": slurm.cpus_per_task,
        "gres": job.gres,
        "exclude": slurm.exclude,
        "switches": slurm.switches,
        "dependency": slurm.dependency,
        "comment": slurm.comment,
    }
    return {key: str(value) for key, value in wanted.items() if value is not None}


def reject_reserved_options(options: Sequence[str]) -> None:
    """Raises WrongInput for an sbatch option that Muster sets itself."""
    for option in options:
        if not names.is_one_line(option):
            raise WrongInput(f"the sbatch option {option!r} must be one line without control characters")
        key = option.partition("=")[0] if option.startswith("--") else option[:2]
        if key in _RESERVED_OPTIONS:
            raise WrongInput(f"the sbatch option {option} is not allowed", f"use instead: {_RESERVED_OPTIONS[key]}")
