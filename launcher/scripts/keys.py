"""Keys of job.toml beside a user's own script: `#MUSTER --spares=1` lines, and options of the command line. Pure.

A key of a table may be named without its table: --tensor is --parallelism.tensor. What the script and sbatch say
already is no key here.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache

from muster.launcher.errors import WrongInput
from muster.launcher.scripts.asked import NOTHING
from muster.launcher.scripts.call import Kind
from muster.launcher.spec.flags import Flag, flags
from muster.slurm.client.sbatch_options import is_known
from muster.slurm.client.script_lines import LineWord

MARK = "#MUSTER"
LAUNCH_LINE = "--launch-line"
_TABLES = ("parallelism", "checkpoint", "placement", "record", "model")
"""Whose keys may stand without the table, the first table first."""
_INSTEAD = {
    "--name": "--job-name",
    "--nodes": "--nodes on an #SBATCH line",
    "--gpus": "--gpus on an #SBATCH line",
    "--gpus-per-node": "--gpus-per-node on an #SBATCH line",
    "--command": "the line of the script that launches",
    "--work-dir": "--chdir",
}


@cache
def kinds() -> dict[str, Kind]:
    """Every key by the options that name it."""
    return {name: Kind(True, flag.metavar == "true|false") for name, flag in _by_name().items()}


@cache
def _by_name() -> dict[str, Flag]:
    named = {flag.option: flag for flag in flags()}
    for table in reversed(_TABLES):
        named |= {
            f"--{option.split('.')[1]}": flag for option, flag in named.items() if option.startswith(f"--{table}.")
        }
    return named | {flag.option: flag for flag in flags()}


def full_name(option: str) -> str:
    """The name with its table."""
    return _by_name()[option].option


def read_lines(words: Iterable[LineWord]) -> dict[str, LineWord]:
    """The keys of `#MUSTER` lines, each with its text and the line of that.

    Raises:
        WrongInput: a line names no key, or one that a script has in another way.
    """
    rest, found = [*words], dict[str, LineWord]()
    while rest:
        word = rest.pop(0)
        name, equals, value = word.text.partition("=")
        if why := why_not(name):
            raise WrongInput(f"line {word.line}: {why}", NOTHING)
        kind = Kind(True) if name == LAUNCH_LINE else kinds().get(name)
        if kind is None:
            raise WrongInput(
                f"line {word.line}: there is no key {word.text!r} of Muster{_meant(name)}",
                f"a {MARK} line takes the keys of docs/JOBTOML.md that have one value. {NOTHING}",
            )
        if not equals:
            value = _next_value(rest, kind, word)
        found[name if name == LAUNCH_LINE else full_name(name)] = LineWord(value, word.line)
    return found


def _meant(name: str) -> str:
    """What may be meant by a word that is no key; empty: nobody knows."""
    if name.startswith("-") and is_known(name):
        return ": it is an option of sbatch, for an #SBATCH line"
    near = get_close_matches(f"--{name.lstrip('-')}", [*kinds(), LAUNCH_LINE], n=1, cutoff=0.8)
    return f": did you mean {near[0]}?" if near else ""


def _next_value(rest: list[LineWord], kind: Kind, word: LineWord) -> str:
    if kind.is_truth and not (rest and rest[0].text in ("true", "false")):
        return "true"
    if not rest or rest[0].text.startswith("--"):
        raise WrongInput(f"line {word.line}: {word.text} needs a value, as in {word.text}=1", NOTHING)
    return rest.pop(0).text


def why_not(option: str) -> str:
    """Why a key can't be given for a script; empty: it can, or is none."""
    name = full_name(option) if option in _by_name() else option
    instead = "the option of sbatch" if name.startswith("--slurm.") else _INSTEAD.get(name)
    return f"{option} is for job.toml: with a script, write {instead}" if instead else ""
