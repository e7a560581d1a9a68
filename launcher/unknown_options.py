"""What a word of the command line that is no option was likely meant to be. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence

_OF_OTHERS = {
    "--nproc-per-node": "--ranks-per-node",
    "--ntasks-per-node": "--ranks-per-node",
    "--nnodes": "--nodes",
    "--max-restarts": "--max-failures",
    "--job-name": "--name",
    "--chdir": "--work-dir",
    "-N": "--nodes",
    "-J": "--name",
    "-D": "--work-dir",
    "-t": "--slurm.time",
    "-p": "--slurm.partition",
    "-A": "--slurm.account",
    "-q": "--slurm.qos",
    "-C": "--slurm.constraint",
    "-c": "--slurm.cpus-per-task",
    "-x": "--slurm.exclude",
    "-d": "--slurm.dependency",
}
"""Options of torchrun and sbatch, and what Muster calls them."""
_CLOSE = 0.8
"""How alike a word and an option must be, as difflib measures it: --node and --nodes are, --steps and --spares not."""


def explain(unknown: Sequence[str], known: Collection[str], advice: str) -> str:
    """What is wrong with the words that nobody takes. `advice`: what to do with those that resemble no option."""
    options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    if not options:
        return f"nothing is expected in place of {' '.join(unknown)}"
    return "; ".join(
        _sentence(option, sorted(set(_likely(option, known))), advice) for option in dict.fromkeys(options)
    )


def explain_choice(word: str, action: argparse.Action) -> str:
    """What is wrong with a word that is none of those that may stand here, for example the name of a command."""
    import difflib

    known = [str(choice) for choice in action.choices or ()]
    likely = difflib.get_close_matches(word, known, n=1)
    there_are = f"there are {', '.join(known)}"
    means = f"did you mean {likely[0]}?" if likely else there_are
    if likely and action.option_strings:  # commands are many, and --help lists them
        means += f" T{there_are[1:]}"
    kind = str(action.metavar or action.dest).lower()
    if action.option_strings and (not action.metavar or "|" in kind):
        return f"{action.option_strings[-1]} {word}: {means}"
    return f"there is no {kind} {word}: {means}"


def _sentence(option: str, likely: Sequence[str], advice: str) -> str:
    if likely:
        return f"there is no option {option}: did you mean {' or '.join(likely)}?"
    return f"there is no option {option}" + (f": {advice}" if advice else "")


def _likely(option: str, known: Collection[str]) -> Iterator[str]:
    word = option.replace("_", "-")
    if (same := _OF_OTHERS.get(word, word)) in known:
        yield same
        return
    # The keys of a table: --time is --slurm.time.
    in_tables = [name for name in known if "." in name and name.rpartition(".")[2] == word.lstrip("-")]
    if in_tables or len(word) == len("-x"):
        yield from in_tables
        return
    import difflib  # only here: the help must appear at once

    yield from difflib.get_close_matches(word, known, n=2, cutoff=_CLOSE)
