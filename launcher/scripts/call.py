"""The command line of `muster submit` with a batch script: which words are sbatch's, Muster's and the script's. Pure.

Before the script, options of sbatch and of Muster stand side by side. All words behind it are the script's own, as for
sbatch. An option that both have (--nodes, --gpus, --gpus-per-node, --requeue) is sbatch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from muster.slurm.client.sbatch_options import SbatchOption, WrongOption, is_known, read_option

_JOB_FILES = (".toml", ".yaml", ".yml")
_TRUTH = ("true", "false")
_OF_BOTH = frozenset({"--nodes", "--gpus", "--gpus-per-node", "--requeue"})


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """What the command line asks of sbatch. `words`: the options as they were typed."""

    words: tuple[str, ...]
    options: tuple[SbatchOption, ...]
    script: str
    """The file; empty: the script comes from --wrap or from standard input."""
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """What an option of Muster takes."""

    takes_value: bool
    is_truth: bool = False
    """true or false, and true if it has no value."""


def split(
    words: Sequence[str], own: Mapping[str, Kind], is_of_plugin: Callable[[str], bool | None], *, is_piped: bool
) -> tuple[list[str], ScriptCall | None]:
    """Muster's words, and the call of sbatch. None: no batch script is submitted, and the words are all of them.

    Args:
        words: those behind `muster submit`.
        own: the options of Muster.
        is_of_plugin: whether an option that sbatch itself does not have takes a value; None: nobody knows it.
        is_piped: whether a script may come from standard input.

    Raises:
        WrongOption: a word before the script is no option.
    """
    rest, word = [*words], ""
    head = _Head()
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word in ("-h", "--help"):
            return [*words], None
        if word == "--":
            break
        head.take(word, rest, own, is_of_plugin)
    script = rest.pop(0) if rest else ""
    is_wrapped = any(option.name == "wrap" for option in head.options)
    if not (script or is_wrapped or is_piped) and words and words[-1] != word:
        raise WrongOption(f"no script is named: {word} takes {words[-1]} as its value")
    if _is_job_file(script, head, rest) or not (script or is_wrapped or is_piped):
        return [*words], None
    return [*head.muster, script or "-"], ScriptCall(tuple(head.sbatch), tuple(head.options), script, tuple(rest))


def _is_job_file(script: str, head: _Head, rest: Sequence[str]) -> bool:
    """Whether a job.toml is meant, also behind `--requeue WORD`, of which the check of that key says what is wrong."""
    after_requeue = head.sbatch[-1:] == ["--requeue"] and bool(rest) and rest[0].endswith(_JOB_FILES)
    return script.endswith(_JOB_FILES) or after_requeue


@dataclass(slots=True)
class _Head:
    """The words before the script, as far as they are read."""

    muster: list[str] = field(default_factory=list)
    sbatch: list[str] = field(default_factory=list)
    options: list[SbatchOption] = field(default_factory=list)

    def take(
        self, word: str, rest: list[str], own: Mapping[str, Kind], is_of_plugin: Callable[[str], bool | None]
    ) -> None:
        """Takes an option, with its value out of `rest`. Raises WrongOption."""
        if kind := _own_kind(word, rest, own):
            self.muster += _own_words(word, rest, kind)
            return
        _check_name(word, own, is_of_plugin)
        before = [*rest]
        if not is_known(word) and "=" not in word and is_of_plugin(word[2:]) is False:
            self.options.append(SbatchOption(word[2:]))
        else:
            self.options += read_option(word, rest)
        self.sbatch += [word, *before[: len(before) - len(rest)]]


def _check_name(word: str, own: Mapping[str, Kind], is_of_plugin: Callable[[str], bool | None]) -> None:
    """Raises WrongOption: neither sbatch nor a plug-in has the option, and one of Muster has nearly this name."""
    name = word.partition("=")[0]
    if is_known(word) or not (near := get_close_matches(name, own, cutoff=0.85)) or is_of_plugin(name[2:]) is not None:
        return
    raise WrongOption(f"there is no option {name}: did you mean {near[0]}?")


def _own_kind(word: str, rest: Sequence[str], own: Mapping[str, Kind]) -> Kind | None:
    name, equals, value = word.partition("=")
    if name in _OF_BOTH:
        given = value if equals else rest[0] if rest else ""
        if name != "--requeue" or given not in _TRUTH:
            return None
    return own.get(name)


def _own_words(word: str, rest: list[str], kind: Kind) -> list[str]:
    """The option of Muster in one word."""
    if "=" in word or not kind.takes_value:
        return [word]
    if kind.is_truth:
        return [f"{word}={rest.pop(0) if rest and rest[0] in _TRUTH else 'true'}"]
    return [f"{word}={rest.pop(0)}"] if rest else [word]
