"""Lines of a batch script that hold options, as sbatch reads them: `#SBATCH` lines, and lines of another mark. Pure.

They end before the first command, which is the first line that is neither empty nor a comment. A mark counts at the
beginning of a line alone, so `##SBATCH` is a comment. Outside quotes a # begins a comment, also within a word. A
backslash takes the next character as it is, also within quotes. An empty word ends its line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SBATCH = "#SBATCH"
_BLANKS = " \t\n\v\f\r"


class WrongLine(ValueError):
    """A line that sbatch refuses. The message says what is wrong."""

    def __init__(self, line: int, words: str) -> None:
        super().__init__(f"line {line}: {words}")
        self.line = line


@dataclass(frozen=True, slots=True)
class LineWord:
    """A word of an option line. `line` counts from 1."""

    text: str
    line: int


def words_of_lines(script: str, mark: str = SBATCH) -> list[LineWord]:
    """All words behind `mark`, in order.

    Raises:
        WrongLine: a quote is not closed.
    """
    return [
        LineWord(word, number)
        for number, line in _head(script)
        if line.startswith(mark)
        for word in _words(line.removeprefix(mark), number)
    ]


def late_line(script: str, mark: str) -> int:
    """The first line with options behind the first command, where nobody reads them; 0: there is none."""
    head = max((number for number, _ in _head(script)), default=0)
    lines = enumerate(script.split("\n"), 1)
    return next((number for number, line in lines if number > head and line.startswith(f"{mark} --")), 0)


def _head(script: str) -> Iterator[tuple[int, str]]:
    """The lines before the first command."""
    begin, number = 0, 1
    while begin < len(script):
        end = script.find("\n", begin)
        line = script[begin : end if end >= 0 else len(script)]
        if line.strip(_BLANKS) and not line.lstrip(_BLANKS).startswith("#"):
            return
        yield number, line
        begin, number = (end + 1 if end >= 0 else len(script)), number + 1


def _words(text: str, line: int) -> Iterator[str]:
    rest = text.lstrip(_BLANKS)
    while rest:
        word, rest = _first_word(rest, line)
        if not word:
            return
        yield word
        rest = rest.lstrip(_BLANKS)


def _first_word(text: str, line: int) -> tuple[str, str]:
    """The first word without its quotes, and what follows it."""
    word, quote, escaped = "", "", False
    for place, char in enumerate(text):
        if escaped:
            word, escaped = word + char, False
        elif char == "\\":
            escaped = True
        elif quote:
            word, quote = (word, "") if char == quote else (word + char, quote)
        elif char in "\"'":
            quote = char
        elif char == "#" or char in _BLANKS:
            return word, text[place:]
        else:
            word += char
    if quote:
        raise WrongLine(line, f"the quote {quote} is not closed in {text.strip()!r}")
    return word, ""
