"""The job spec of a script: the keys that were given, and what the script says. The launch says the rest."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from muster.daemon.transport.job_limits import MAX_STOP_BEFORE_S
from muster.launcher.errors import WrongInput
from muster.launcher.scripts.asked import NOTHING, Asked
from muster.launcher.scripts.launch_choice import srun_words
from muster.launcher.scripts.size import gpus_of_node, size_of, tasks_per_node
from muster.launcher.spec.explain import explain_errors
from muster.launcher.spec.flags import chosen, with_texts
from muster.launcher.spec.spec import Job
from muster.launcher.submission.job_message import job_message
from muster.slurm.client import names
from muster.slurm.client.known_programs import before_program
from muster.slurm.client.launch_settings import BY_SRUN
from muster.slurm.client.sbatch_options import SbatchOption

if TYPE_CHECKING:
    from muster.launcher.scripts.plan import Looked
    from muster.v1.common_pb2 import JobSpec

RUN_FOLDER = "muster-runs"
"""Of the job's folder, if no run_dir is named."""
_NO_COMMAND = "-"
_OF_LAUNCHER = re.compile(r"--nproc[-_]per[-_]node[=\s]\s*(\d{1,9})\b")
_COUNT = re.compile(r"(?:^|:)(\d{1,9})$")
_GPUS = re.compile(r"\bgpu(?::[^:,]+)?:(\d{1,9})\b")
_SIGTERM = re.compile(r"(?:R:)?(?:(?:SIG)?TERM|15)(?:@(\d{1,9}))?$", re.IGNORECASE)
SIGNAL_S, SIGNAL_EARLY_S = 60, 60
"""Seconds before the time limit at which Slurm sends the signal of --signal if it is not told when, and by how much it
may be early (sbatch(1))."""
_LETTERS = re.compile(r"[^A-Za-z0-9._-]+")


def job_of(looked: Looked, folder: str, options: argparse.Namespace) -> Job:
    """The job, as job.toml would describe it.

    Args:
        folder: the job's working folder.
        options: of the command line. They override `#MUSTER` lines.

    Raises:
        WrongInput: a key is wrong.
    """
    asked, lines = looked.asked, looked.texts
    size = size_of(asked, elastic=True)  # a range is refused once it is known whether the job is elastic
    tables: dict[str, Any] = {
        "name": job_name(asked.value("job-name") or looked.script.name),
        "nodes": size.most or 1,
        "command": [_NO_COMMAND],
        "run_dir": f"{folder}/{RUN_FOLDER}",
        "work_dir": folder,
    }
    if asked.last("requeue", "no-requeue"):
        tables["requeue"] = asked.last("requeue", "no-requeue") == asked.last("requeue")
    if ranks := _ranks_per_node(looked):
        tables["ranks_per_node"] = ranks
    typed = chosen(options)
    try:
        job = Job.model_validate(with_texts(tables, {name: word.text for name, word in lines.items()} | typed))
    except ValidationError as error:
        of_lines = {name: word.line for name, word in lines.items() if name not in typed}
        problems = "\n".join(f"  {_place(line, of_lines)}{line}" for line in explain_errors(error, Job))
        hint = "docs/JOBTOML.md lists every key"
        if "ranks_per_node" in problems and "--ranks-per-node" not in (*lines, *typed):
            hint = "say with --ranks-per-node=N how many ranks the launch starts on each node"
        raise WrongInput(f"what is asked of Muster is not valid:\n{problems}", f"{hint}. {NOTHING}") from None
    more: dict[str, Any] = {}
    if job.elastic and job.min_nodes is None and size.fewest != size.most:  # --nodes=2-8
        more["min_nodes"] = size.fewest
    if _trains_to_the_limit(asked, job):
        more |= _stop_before_sigterm(asked, job) or {"stop_before": 0.0}
    return job.model_copy(update=more)


def _stop_before_sigterm(asked: Asked, job: Job) -> dict[str, Any]:
    """An earlier stop in place of the SIGTERM that ranks are to get before the limit; empty: they are to get none.

    At Slurm's SIGTERM the job would be requeued, as at a preemption, and never end at its limit.
    """
    if (found := _SIGTERM.match(asked.value("signal") or "")) is None:
        return {}
    before_s = int(found[1] or SIGNAL_S) + SIGNAL_EARLY_S
    return {"stop_before": min(float(before_s), MAX_STOP_BEFORE_S), "stop_signal": job.stop_signal or "SIGTERM"}


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
        given = [one.option for one in asked.given]
        each = gpus_of_node(asked, size_of(asked, elastic=True))
        spec = job_message(job, [*given, *([SbatchOption("gpus-per-node", each)] if each else [])])
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


def _ranks_per_node(looked: Looked) -> int:
    """How many ranks the launch seems to start on each node; 0: nothing says it. The launch itself knows."""
    words = " ".join(looked.launch.words)
    if said := _OF_LAUNCHER.search(words):
        return int(said[1])
    tasks = tasks_per_node(looked.asked, srun_words(words))
    if tasks > 1 or (tasks and looked.launch.why == BY_SRUN and "$" not in before_program(words)):
        return tasks
    gpus = (
        _COUNT.search(looked.asked.value("gpus-per-node") or ""),
        _GPUS.search(looked.asked.value("gres") or ""),
    )
    return next((int(found[1]) for found in gpus if found), 0)


def _trains_to_the_limit(asked: Asked, job: Job) -> bool:
    """Whether an early stop would only cost time: it saves nothing, or the script has asked Slurm for a signal before
    its end."""
    is_of_use = job.durable_dir or job.stop_signal or job.requeue_at_limit
    return "stop_before" not in job.model_fields_set and bool(asked.value("signal") or not is_of_use)
