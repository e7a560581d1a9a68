"""What is asked of sbatch for a script, from its lines, the shell's variables and the command line, and what of that
can't be together with supervision. Pure.

The last one of a name counts, as for sbatch: the command line overrides variables, and these override lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from muster.launcher.errors import WrongInput
from muster.launcher.spec.job_options import SHARED
from muster.slurm.client.sbatch_options import SbatchOption, WrongOption, read_numbered
from muster.slurm.client.script_lines import LineWord

_VARIABLES = {
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_CLUSTERS": "clusters",
    "SLURM_CLUSTERS": "clusters",
    "SBATCH_CONTAINER": "container",
    "SBATCH_DISTRIBUTION": "distribution",
    "SBATCH_ERROR": "error",
    "SBATCH_EXCLUSIVE": "exclusive",
    "SBATCH_EXPORT": "export",
    "SBATCH_GPUS": "gpus",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node",
    "SBATCH_GPUS_PER_TASK": "gpus-per-task",
    "SBATCH_JOB_NAME": "job-name",
    "SBATCH_NO_REQUEUE": "no-requeue",
    "SBATCH_OUTPUT": "output",
    "SBATCH_REQUEUE": "requeue",
    "SBATCH_SEGMENT_SIZE": "segment",
    "SBATCH_SIGNAL": "signal",
}
"""The variables of sbatch that say something Muster has to know."""
_COUNTS = frozenset({"nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "segment"})
_TOO_MANY = re.compile(r"\d{10}")
_OF_SEVERAL_JOBS = ("hetjob", "packjob")
NOTHING = "Nothing was queued"


@dataclass(frozen=True, slots=True)
class Given:
    """One option, and where it is given, in words."""

    option: SbatchOption
    place: str

    def __str__(self) -> str:
        return f"{self.place}: {self.option}"


@dataclass(frozen=True, slots=True)
class Asked:
    """All options, the weakest first."""

    given: tuple[Given, ...]

    def last(self, *names: str) -> Given | None:
        """The one that counts of these names."""
        return next((one for one in reversed(self.given) if one.option.name in names), None)

    def value(self, name: str) -> str | None:
        """Its value, without blanks around it; None: it is not given, or has none."""
        one = self.last(name)
        return one.option.value.strip() if one and one.option.value is not None else None


def ask(lines: Sequence[LineWord], environ: Mapping[str, str], options: Sequence[SbatchOption]) -> Asked:
    """Puts together what is asked. `lines`: the words of `#SBATCH` lines; `options`: those of the command line.

    Raises:
        WrongInput: a line is no option of sbatch, or makes several jobs of one, or a number is too large.
    """
    for index, word in enumerate(lines):
        if word.text in _OF_SEVERAL_JOBS and (not index or lines[index - 1].line != word.line):
            raise WrongInput(
                f"line {word.line}: {word.text}: a heterogeneous job is not supervised",
                f"write one job of equal nodes. {NOTHING}",
            )
    found = [Given(option, f"line {lines[index].line}") for index, option in _numbered(lines)]
    found += [
        Given(SbatchOption(option, environ[variable]), f"{variable} of this shell")
        for variable, option in _VARIABLES.items()
        if environ.get(variable)
    ]
    found += [Given(option, "the command line") for option in options]
    for one in found:
        if one.option.name in _COUNTS and _TOO_MANY.search(one.option.value or ""):
            raise WrongInput(f"{one.place}: --{one.option.name}: a number of more than nine digits", NOTHING)
    return Asked(tuple(found))


def _numbered(lines: Sequence[LineWord]) -> list[tuple[int, SbatchOption]]:
    try:
        return read_numbered([word.text for word in lines])
    except WrongOption as error:
        place = next((f"line {word.line}: " for word in lines if repr(word.text) in str(error)), "")
        raise WrongInput(f"{place}{error}", NOTHING) from None


def refuse(asked: Asked) -> None:
    """Refuses what can't be together with supervision.

    Raises:
        WrongInput: the message has each place, and what to write instead.
    """
    if wrong := [*_problems(asked)]:
        raise WrongInput("; ".join(wrong), NOTHING)


def _problems(asked: Asked) -> Iterator[str]:
    for name in ("oversubscribe", "exclusive"):
        one = asked.last(name)
        if (
            one
            and one.place != "SBATCH_EXCLUSIVE of this shell"
            and (name != "exclusive" or one.option.value in SHARED)
        ):
            yield (
                f"{one} shares nodes with other jobs, and Muster sets a node DOWN that has failed, which ends every "
                "job on it: write --exclusive"
            )
    if (one := asked.last("clusters")) is not None:
        yield f"{one} sends the job to another cluster, where this coordinator supervises none: submit on that cluster"
    if (one := asked.last("distribution")) is not None and str(one.option.value).startswith("arbitrary"):
        yield f"{one} lists a node for each task, and nodes change while the job runs: remove it"
