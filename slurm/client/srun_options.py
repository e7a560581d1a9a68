"""Options of srun: reads a command line up to the command that srun starts. Pure.

They are read as srun reads them: `--name=value`, `--name value`, `-nvalue`, `-n value`, flags in one word (`-lu`), long
names that are cut off. The first word that is no option begins the command. A plug-in of the site may add options:
`described` reads them from `srun --help`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_SHORT = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "E": "preserve-env", "F": "nodefile",
    "G": "gpus", "H": "hold", "I": "immediate", "J": "job-name", "K": "kill-on-bad-exit", "L": "licenses",
    "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet", "S": "core-spec", "T": "threads", "V": "version",
    "W": "wait", "X": "disable-status", "Z": "no-allocate", "b": "begin", "c": "cpus-per-task", "d": "dependency",
    "e": "error", "h": "help", "i": "input", "k": "no-kill", "l": "label", "m": "distribution",
    "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "r": "relative", "s": "oversubscribe", "t": "time",
    "u": "unbuffered", "v": "verbose", "w": "nodelist", "x": "exclude",
}  # fmt: skip


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FLAGS = _names(
    "contiguous disable-status exact external help hold interactive label multi-prog no-allocate overcommit "
    "overlap oversubscribe preserve-env quiet quit-on-interrupt reboot spread-job stepmgr test-only unbuffered "
    "usage use-min-nodes verbose version wait-for-children whole consolidate-segments spread-segments bell "
    "no-bell"
)
"""Options that take no value."""
_MAY_HAVE_VALUE = _names(
    "bcast compress exclusive immediate kill-on-bad-exit nice no-kill oom-kill-step propagate pty resv-ports send-libs "
    "x11"
)
"""Options that take a value only after =, or in the same word."""
_WITH_VALUE = _names(
    "account acctg-freq bcast-exclude bb bbf begin chdir cluster-constraint clusters comment constraint "
    "container container-id core-spec cores-per-socket cpu-bind cpu-freq cpus-per-gpu cpus-per-task deadline "
    "delay-boot dependency distribution epilog error exclude export extra extra-node-info gid gpu-bind gpu-freq "
    "gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags het-group hint input job-name jobid "
    "licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus mpi msg-timeout network "
    "nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode "
    "output pack-group partition power prefer priority profile prolog qos relative reservation "
    "segment signal slurmd-debug sockets-per-node switches task-epilog task-prolog tasks-per-node thread-spec "
    "threads threads-per-core time time-min tmp tres-bind tres-per-task treewidth uid umask wait wckey"
)
NAMES = _FLAGS | _MAY_HAVE_VALUE | _WITH_VALUE
"""The long names of srun's own options."""
_SAME = {"tasks-per-node": "ntasks-per-node"}
"""Two names of one option."""
_HELP_LINE = re.compile(r"^\s+(?:-\w,?\s+)?--(\w[\w-]*)(\[?=)?", re.MULTILINE)


class UnknownOption(ValueError):
    """srun has no such option; the text is the word."""


@dataclass(frozen=True, slots=True)
class SrunOption:
    """One option with its long name, the words that it was given as, and its value; None: it has none."""

    name: str
    words: tuple[str, ...]
    value: str | None = None


@dataclass(frozen=True, slots=True)
class SrunWords:
    """A command line of srun, without its first word."""

    options: tuple[SrunOption, ...]
    command: tuple[str, ...]

    def value(self, name: str) -> str | None:
        """The value of the last option of this name, which overrides the others. None: it is not there."""
        return next((option.value or "" for option in reversed(self.options) if option.name == name), None)

    def value_or(self, name: str, variables: Iterable[str], environ: Mapping[str, str]) -> str:
        """The value, or that of the first of `variables` that is set, from which srun takes it, too; empty: neither."""
        given = self.value(name)
        return given if given is not None else next((environ[one] for one in variables if environ.get(one)), "")

    def has(self, *names: str) -> bool:
        """Whether one of these options is there."""
        return any(option.name in names for option in self.options)


def described(text: str) -> dict[str, bool]:
    """The long options that `srun --help` or `sbatch --help` names, and whether each has the next word as its value."""
    return {name: mark == "=" for name, mark in _HELP_LINE.findall(text)}


def read_srun(words: Sequence[str], of_plugins: Mapping[str, bool] | None = None) -> SrunWords:
    """Reads the words after the name of srun.

    Args:
        of_plugins: further options, and whether they take a value as the next word.

    Raises:
        UnknownOption: a word is none of srun's options.
    """
    rest, options, plugins = list(words), list[SrunOption](), of_plugins or {}
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        options += [_long(word, rest, plugins)] if word.startswith("--") else _short(word, rest)
    return SrunWords(tuple(options), tuple(rest))


def _long(word: str, rest: list[str], plugins: Mapping[str, bool]) -> SrunOption:
    given, equals, value = word[2:].partition("=")
    name = _full_name(given, plugins)
    if not name:
        raise UnknownOption(word)
    known, name = name, _SAME.get(name, name)
    if equals:
        return SrunOption(name, (word,), value)
    if (known in _WITH_VALUE or plugins.get(known)) and rest:
        value = rest.pop(0)
        return SrunOption(name, (word, value), value)
    return SrunOption(name, (word,))


def _full_name(given: str, plugins: Mapping[str, bool]) -> str:
    """The name that `given` begins, if it is the only one; empty: there is none, or several."""
    known = NAMES | plugins.keys()
    if given in known:
        return given
    found = [name for name in known if given and name.startswith(given)]
    return found[0] if len(found) == 1 else ""


def _short(word: str, rest: list[str]) -> list[SrunOption]:
    """The options of one word. `-lN2` is `-l -N2`."""
    options, letters = list[SrunOption](), word[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        name = _SHORT.get(letter)
        if name is None:
            raise UnknownOption(word)
        if name in _FLAGS:
            options.append(SrunOption(name, (f"-{letter}",)))
            continue
        if letters or name in _MAY_HAVE_VALUE or not rest:
            options.append(SrunOption(name, (f"-{letter}{letters}",), letters or None))
        else:
            value = rest.pop(0)
            options.append(SrunOption(name, (f"-{letter}", value), value))
        break
    return options
