"""Options of sbatch: the only module that reads them, and that writes them into a script. Pure.

They come from three places: words of a command line, texts of job.toml and of the site (one option each), and `#SBATCH`
lines. All are read as sbatch reads them: `--name=value`, `--name value`, `-nvalue`, `-n value`, flags in one word
(`-Hk`), and long names that are cut off. In a text, blanks may stand between name and value. An option is written with
its long name, so `--partition=big` has one form everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from muster.slurm.client import names
from muster.slurm.client.script_lines import WrongLine, words_of_lines

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_SHORT = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus", "H": "hold",
    "I": "immediate", "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet",
    "S": "core-spec", "V": "version", "W": "wait", "a": "array", "b": "begin", "c": "cpus-per-task", "d": "dependency",
    "e": "error", "h": "help", "i": "input", "k": "no-kill", "m": "distribution", "n": "ntasks", "o": "output",
    "p": "partition", "q": "qos", "s": "oversubscribe", "t": "time", "v": "verbose", "w": "nodelist", "x": "exclude",
}  # fmt: skip


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FLAGS = _names(
    "consolidate-segments contiguous help hold ignore-pbs no-requeue overcommit oversubscribe parsable quiet reboot "
    "spread-job spread-segments stepmgr test-only usage use-min-nodes verbose version wait"
)
"""Options that take no value."""
_MAY_HAVE_VALUE = _names("exclusive get-user-env immediate nice no-kill oom-kill-step propagate requeue resv-ports")
"""Options that take a value only after =, or in the same word."""
_WITH_VALUE = _names(
    "account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container "
    "container-id container-type core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot "
    "dependency distribution error exclude export export-file extra extra-node-info gid gpu-bind gpu-freq gpus "
    "gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input job-name kill-on-invalid-dep licenses "
    "mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile nodelist nodes ntasks "
    "ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output partition power prefer priority "
    "profile qos reservation segment signal sockets-per-node switches thread-spec threads-per-core time time-min tmp "
    "tres-bind tres-per-task uid umask wait-all-nodes wckey wrap"
)
_OTHER_NAMES = {"tasks-per-node": "ntasks-per-node"}
"""Names that sbatch takes and does not show."""
_KNOWN = _FLAGS | _MAY_HAVE_VALUE | _WITH_VALUE


class WrongOption(ValueError):
    """A text that is no option of sbatch. The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class SbatchOption:
    """One option with its long name, without dashes. `value`: None if it has none."""

    name: str
    value: str | None = None

    def __str__(self) -> str:
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"

    @property
    def directive(self) -> str:
        """The line of a script."""
        return f"#SBATCH --{self.name}" + ("" if self.value is None else f"={quote(self.value)}")


def read_words(words: Sequence[str]) -> list[SbatchOption]:
    """Reads the words of a command line.

    Raises:
        WrongOption: a word is neither an option nor the value of one, or is not one line.
    """
    for word in words:
        if not names.is_one_line(word):
            raise WrongOption(f"the sbatch option {word!r} must be one line without control characters")
    return [option for _, option in read_numbered(words)]


def read_numbered(words: Sequence[str]) -> list[tuple[int, SbatchOption]]:
    """Reads words, each option with the index of its first word.

    Raises:
        WrongOption: a word is neither an option nor the value of one.
    """
    rest, found = list(words), []
    while rest:
        index, word = len(words) - len(rest), rest.pop(0)
        found += [(index, option) for option in read_option(word, rest)]
    return found


def read_option(word: str, rest: list[str]) -> list[SbatchOption]:
    """The options that the word holds. Takes the value of the last one out of `rest`, if it stands there.

    Raises:
        WrongOption: the word is no option.
    """
    if word.startswith("--") and len(word) > 2:
        return [_long(word, rest)]
    if word.startswith("-") and len(word) > 1:
        return [*_short(word, rest)]
    raise WrongOption(f"{word!r} is no option of sbatch")


def is_known(word: str) -> bool:
    """Whether sbatch itself has the option, and not only a plug-in of the site."""
    return not word.startswith("--") or _whole_name(word[2:].partition("=")[0]) in _KNOWN


def read_texts(texts: Iterable[str]) -> list[SbatchOption]:
    """Reads texts of one option each: "--nice=100", "--partition big", "-p big".

    Raises:
        WrongOption: a text is not an option, or not one line.
    """
    return [option for text in texts for option in read_words(_words_of_text(text))]


def read_script(script: str) -> list[SbatchOption]:
    """Reads the `#SBATCH` lines of a script, which end before its first command.

    Raises:
        ValueError: a quote is not closed, or a line is no option.
    """
    return [option for _, option in read_lines(script)]


def read_lines(script: str) -> list[tuple[int, SbatchOption]]:
    """The same, each option with the number of its line.

    Raises:
        WrongLine: a quote is not closed, or a line is no option.
    """
    words = words_of_lines(script)
    try:
        return [(words[index].line, option) for index, option in read_numbered([word.text for word in words])]
    except WrongOption as error:
        first = next((word.line for word in words if repr(word.text) in str(error)), 0)
        raise WrongLine(first, str(error)) from None


def value_of(options: Sequence[SbatchOption], name: str) -> str | None:
    """The value of the last option of this name, which overrides the others. None: none is there."""
    return next((option.value or "" for option in reversed(options) if option.name == name), None)


def joined(options: Iterable[SbatchOption], marks: Mapping[str, str]) -> list[SbatchOption]:
    """One option of each name: the last one, or all values joined if `marks` has a mark for the name."""
    found: dict[str, SbatchOption] = {}
    for option in options:
        before, mark = found.get(option.name), marks.get(option.name)
        if before is not None and mark:
            option = SbatchOption(option.name, f"{before.value}{mark}{option.value}")
        found[option.name] = option
    return list(found.values())


def quote(value: str) -> str:
    """A value for a `#SBATCH` line: in double quotes if it holds blanks or a #.

    Raises:
        WrongOption: the value would be more than a part of one line.
    """
    if not names.is_one_line(value):
        raise WrongOption(f"{value[:80]!r} must be one line without control characters: it is a part of a batch script")
    if not set(value) & set(" \t#'\"\\"):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _words_of_text(text: str) -> list[str]:
    """A blank ends the name, unless a = has ended it before. Blanks of the value stay."""
    name, *value = text.strip().split(maxsplit=1) or [""]
    return [text.strip()] if "=" in name else [name, *value]


def _long(word: str, rest: list[str]) -> SbatchOption:
    given, equals, value = word[2:].partition("=")
    if not _NAME.fullmatch(given):
        raise WrongOption(f"{word!r} is no option of sbatch")
    name = _whole_name(given)
    if equals:
        return SbatchOption(name, value)
    return SbatchOption(name, _next_value(name, rest))


def _short(word: str, rest: list[str]) -> Iterator[SbatchOption]:
    """A word of one dash: flags, of which the last may be an option with its value."""
    letters = word[1:]
    while letters:
        name, letters = _SHORT.get(letters[0]), letters[1:]
        if name is None:
            raise WrongOption(f"{word!r} is no option of sbatch")
        if name in _FLAGS:
            yield SbatchOption(name)
        else:
            yield SbatchOption(name, letters or _next_value(name, rest))
            return


def _next_value(name: str, rest: list[str]) -> str | None:
    """The next word, if it is the value of this option. An option that only a site knows has what is no option."""
    if name in _FLAGS or name in _MAY_HAVE_VALUE or not rest:
        return None
    if name not in _KNOWN and rest[0].startswith("-"):
        return None
    return rest.pop(0)


def _whole_name(given: str) -> str:
    """The name that `given` is the beginning of, if there is one such name."""
    given = _OTHER_NAMES.get(given, given)
    if given in _KNOWN:
        return given
    found = [name for name in _KNOWN if name.startswith(given)]
    return found[0] if len(found) == 1 else given
