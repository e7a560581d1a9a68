"""What a user asks of sbatch: the keys of [slurm], options of their own, and which of these are not allowed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from muster.slurm.client.parsing.gres import without_gpus
from muster.slurm.client.sbatch_options import SbatchOption, WrongOption, read_texts

if TYPE_CHECKING:
    from muster.launcher.spec.spec import Job

_INSTEAD = {
    "nodes": "nodes and spares in job.toml",
    "ntasks": "ranks_per_node in job.toml",
    "ntasks-per-node": "ranks_per_node in job.toml",
    "job-name": "name in job.toml",
    "requeue": "requeue in job.toml",
    "no-requeue": "requeue in job.toml",
    "no-kill": "always set",
    "signal": "stop_signal and stop_before in job.toml",
    "array": "several submissions, one for each gang",
    "wrap": "command in job.toml",
    "clusters": "a login node of that cluster",
    "test-only": "muster submit --dry-run, or muster plan",
    "wait": "muster status -f JOB after the submission",
    "gpus": "gpus_per_node in job.toml, or --gpus-per-node=TYPE:N: spares need GPUs, too",
    "gpus-per-task": "gpus_per_node in job.toml, or --gpus-per-node=TYPE:N: Slurm sees one task on each node",
    "ntasks-per-gpu": "ranks_per_node in job.toml",
    "oversubscribe": "--exclusive, which is always set: a node that fails is set DOWN, which ends every job on it",
}
"""Options that would contradict job.toml, or what Muster always sets, and what to use instead."""
SHARED = ("user", "mcs")
"""Values of --exclusive that share nodes."""
_MEMORY = frozenset({"mem", "mem-per-cpu", "mem-per-gpu"})


def problems(options: Iterable[SbatchOption]) -> list[str]:
    """One text for each option that is not allowed."""
    return [
        f"the sbatch option {option} is not allowed; use instead: {instead}"
        for option in options
        if (instead := _INSTEAD.get("oversubscribe" if _shares_nodes(option) else option.name))
    ]


def _shares_nodes(option: SbatchOption) -> bool:
    return option.name == "exclusive" and option.value in SHARED


def problems_of_texts(texts: Iterable[str]) -> list[str]:
    """The same for the texts of job.toml, with those that are no option."""
    wrong = []
    for text in texts:
        try:
            wrong += problems(read_texts([text]))
        except WrongOption as error:
            wrong.append(f'{error}; write each option as one string, for example "--nice=100"')
    return wrong


def all_options(job: Job, options: Iterable[SbatchOption]) -> list[SbatchOption]:
    """What the user asks of Slurm, in any way. Later options override earlier ones."""
    given = [*_slurm_options(job), *read_texts(job.slurm.options), *options]
    return [left for at, one in enumerate(given) if (left := _left_of(one, given[at + 1 :]))]


def _left_of(one: SbatchOption, later: Sequence[SbatchOption]) -> SbatchOption | None:
    """The option without what a later one says in another way: sbatch refuses both. None: nothing is left."""
    others = [option for option in later if option.name != one.name]
    if one.name in _MEMORY:
        return None if any(option.name in _MEMORY for option in others) else one
    if not (_is_of_gpus(one) and any(map(_is_of_gpus, others))):
        return one
    rest = without_gpus(one.value or "") if one.name == "gres" else ""
    return SbatchOption("gres", rest) if rest else None


def _is_of_gpus(option: SbatchOption) -> bool:
    value = option.value or ""
    return option.name == "gpus-per-node" or (option.name == "gres" and without_gpus(value) != value)


def _slurm_options(job: Job) -> Iterator[SbatchOption]:
    """The Slurm requests of job.toml."""
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
    return (SbatchOption(key, str(value)) for key, value in wanted.items() if value is not None)
