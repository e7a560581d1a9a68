"""The job spec of a script: the keys that were given, and what the script says. The launch says the rest."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from muster.launcher.errors import WrongInput
from muster.launcher.scripts.asked import NOTHING, Asked
from muster.launcher.scripts.size import size_of
from muster.launcher.spec.explain import explain_errors
from muster.launcher.spec.flags import chosen, with_texts
from muster.launcher.spec.spec import Job
from muster.launcher.submission.job_message import job_message
from muster.slurm.client import names
from muster.slurm.client.script_lines import LineWord

if TYPE_CHECKING:
    from muster.v1.common_pb2 import JobSpec

RUN_FOLDER = "muster-runs"
"""Of the job's folder, if no run_dir is named."""
_NO_COMMAND = "-"
_LETTERS = re.compile(r"[^A-Za-z0-9._-]+")


def job_of(asked: Asked, name: str, folder: str, lines: Mapping[str, LineWord], options: argparse.Namespace) -> Job:
    """The job, as job.toml would describe it.

    Args:
        name: of the script; the job's, if no option names it.
        folder: the job's working folder.
        lines: the keys of `#MUSTER` lines.
        options: of the command line. They override lines.

    Raises:
        WrongInput: a key is wrong.
    """
    size = size_of(asked, elastic=True)  # a range is refused once it is known whether the job is elastic
    tables: dict[str, Any] = {
        "name": job_name(asked.value("job-name") or name),
        "nodes": size.most or 1,
        "command": [_NO_COMMAND],
        "run_dir": f"{folder}/{RUN_FOLDER}",
        "work_dir": folder,
        **_from_sbatch(asked),
    }
    typed = chosen(options)
    try:
        job = Job.model_validate(with_texts(tables, {name: word.text for name, word in lines.items()} | typed))
    except ValidationError as error:
        of_lines = {name: word.line for name, word in lines.items() if name not in typed}
        problems = "\n".join(f"  {_place(line, of_lines)}{line}" for line in explain_errors(error, Job))
        raise WrongInput(
            f"what is asked of Muster is not valid:\n{problems}", f"docs/JOBTOML.md lists every key. {NOTHING}"
        ) from None
    more: dict[str, Any] = {}
    if job.elastic and job.min_nodes is None and size.fewest != size.most:  # --nodes=2-8
        more["min_nodes"] = size.fewest
    if _trains_to_the_limit(asked, job):
        more["stop_before"] = 0.0
    return job.model_copy(update=more)


def _place(problem: str, of_lines: Mapping[str, int]) -> str:
    """Where the key stands that an error begins with; empty: in no line of the script."""
    line = of_lines.get(f"--{problem.partition(' = ')[0].replace('_', '-')}")
    return f"line {line}: " if line else ""


def message_of(job: Job, asked: Asked) -> JobSpec:
    """The message without what the launch says.

    Raises:
        WrongInput: a word of it is no UTF-8.
    """
    try:
        spec = job_message(job, [one.option for one in asked.given])
    except UnicodeEncodeError as error:
        raise WrongInput(f"{error.object!r} is no UTF-8", NOTHING) from None
    spec.ClearField("command")
    spec.ClearField("nodes")
    spec.ClearField("ranks_per_node")
    if not job.elastic:  # it trains on all nodes, however many they are
        spec.ClearField("min_nodes")
    return spec


def job_name(name: str) -> str:
    """A name of Muster that resembles the one of Slurm."""
    plain = _LETTERS.sub("-", name).lstrip("._-")[:64]
    return plain if names.JOB.fullmatch(plain) else "job"


def _from_sbatch(asked: Asked) -> dict[str, Any]:
    """The keys that options of sbatch say."""
    found: dict[str, Any] = {}
    if asked.last("requeue", "no-requeue"):
        found["requeue"] = asked.last("requeue", "no-requeue") == asked.last("requeue")
    per_node = (asked.value("ntasks-per-node"), asked.value("gpus-per-node"))
    found |= next(
        ({"ranks_per_node": int(count)} for count in per_node if count and count.isdecimal() and count > "1"), {}
    )
    return found


def _trains_to_the_limit(asked: Asked, job: Job) -> bool:
    """Whether an early stop would only cost time: it saves nothing, or the script has asked Slurm for a signal before
    its end."""
    is_of_use = job.durable_dir or job.stop_signal or job.requeue_at_limit
    return "stop_before" not in job.model_fields_set and bool(asked.value("signal") or not is_of_use)
