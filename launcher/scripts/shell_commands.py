"""The simple commands of a bash script, each with its line, found without running anything. Pure.

This is no shell: it knows words, quotes, comments, here-documents, continued lines and where a command ends, and that
is all. Commands of functions and loops count once, as they stand. What stands in `$(...)` is a part of its word. Where
the text is not bash, the answer is only poor: nothing is raised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_RESERVED = frozenset({"if", "then", "elif", "else", "while", "until", "do", "!", "{", "}", "fi", "done", "esac"})
# Blanks of Unicode, as a no-break space, are letters to bash.
_PLAIN = re.compile(r"[^\s\\'\"$`;&|()<>#]+", re.ASCII)
_OPERATOR = re.compile(r"&&|\|\||;;&|;&|;;|\|&|&>>?|<<<|<<-?|[<>]&|>>|>\||<>|[;&|()<>\n]")
_HERE_WORD = re.compile(r"[ \t]*((?:\\.|'[^'\n]*'|\"[^\"\n]*\"|[^\s;&|()<>'\"\\])+)", re.ASCII)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(\[[^]]*\])?\+?=")
_CLOSING = {"(": ")", "{": "}"}
MOST_CHARS = 1 << 16
"""Of a variable's text that is put together."""
_MOST_BRACKETS = 100
"""Within each other. Behind more of them the text is no bash, and is one word."""


@dataclass(slots=True)
class ShellCommand:
    """One simple command. `words` are as the script has them, with their quotes, but for redirections and for
    assignments before them."""

    line: int
    """Of its first word or of the assignments before it, counted from 1."""
    last_line: int
    words: list[str] = field(default_factory=list)
    in_loop: bool = False
    in_background: bool = False
    """It ends with &, or its pipeline does."""

    @property
    def text(self) -> str:
        """All words in one line."""
        return " ".join(self.words)


@dataclass(slots=True)
class Script:
    """What was found."""

    commands: list[ShellCommand] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    """The last text that each variable is given, quotes included."""
    sure: dict[str, str] = field(default_factory=dict)
    """The same, without what is given under a condition only."""
    functions: set[str] = field(default_factory=set)


def scan(text: str) -> Script:
    """Finds the commands of a script."""
    found = Script()
    scanner = _Scanner(text)
    pipeline: list[ShellCommand] = []
    words: list[tuple[str, int]] = []
    loops = conditions = 0
    before = ""
    for token, line in scanner.tokens():
        if not _is_end(token):
            words.append((token, line))
            continue
        for word, _ in words:  # `done` may stand behind `}` or `)`
            loops += (word == "do") - (word == "done")
        conditions += _conditions(words)
        if token == ")" and before == "(" and not words and found.commands:
            found.functions.add(found.commands[-1].words[-1])
        elif words and words[0][0] == "function":
            found.functions.add(words[-1 if len(words) < 2 else 1][0])
            words = words[2:] or words  # `function run { srun "$@"; }`
        if command := _command(words, line, found, sure=not conditions and before not in ("&&", "||")):
            command.in_loop = loops > 0
            found.commands.append(command)
            pipeline.append(command)
        words, before = [], token
        if token == "&":
            for command in pipeline:
                command.in_background = True
        if token not in ("|", "|&", "&&", "||"):
            pipeline = []
    return found


def _is_end(token: str) -> bool:
    return token in ("\n", ";", ";;", ";&", ";;&", "&", "&&", "|", "||", "|&", "(", ")")


def _conditions(words: list[tuple[str, int]]) -> int:
    """How many conditions the command opens, less those that it closes."""
    opened = 0
    for word, _ in words:
        if word not in _RESERVED and word != "case":
            break
        opened += (word in ("if", "case")) - (word in ("fi", "esac"))
    return opened


def _command(words: list[tuple[str, int]], last_line: int, found: Script, *, sure: bool) -> ShellCommand | None:
    """The command without reserved words and assignments, which are noted. None: nothing is left."""
    rest = [*words]
    while rest and (rest[0][0] in _RESERVED or _note(rest[0][0], found, sure=sure)):
        rest.pop(0)
    if not rest:
        return None
    texts = [word for word, _ in rest]
    if texts[0] in ("export", "declare", "local", "readonly", "typeset"):
        for word in texts[1:]:
            _note(word, found, sure=sure)
    return ShellCommand(words[0][1], last_line, texts)


def _note(word: str, found: Script, *, sure: bool) -> bool:
    """Notes what an assignment says. False: the word is none."""
    if not (assignment := _ASSIGNMENT.match(word)):
        return False
    name, value = re.split(r"\W", assignment[0], maxsplit=1)[0], word[assignment.end() :]
    for values in (found.values, found.sure) if sure else (found.values,):
        before = values.get(name, "")
        if len(before) + len(value) > MOST_CHARS:
            values[name] = value
        elif assignment[0].endswith("+="):
            values[name] = f"{before} {value}"
        else:  # X="$X more"
            own, *rest = re.split(rf"\$(?:{name}\b|\{{{name}\b[^}}]*\}})", value, maxsplit=1)
            values[name] = before.join((own, *rest))
    return True


class _Scanner:
    """Cuts a text into words and operators. `line` is where it stands."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self.line = text, 0, 1
        self._depth = 0
        self._here: list[tuple[str, bool]] = []
        """Words that end here-documents whose first line has not come yet, and whether tabs before them count."""

    def tokens(self) -> Iterator[tuple[str, int]]:
        """Each word or operator with its line. The last one ends a command."""
        text = self._text
        while self._at < len(text):
            char = text[self._at]
            if char in " \t\r\f\v":
                self._at += 1
            elif text.startswith("\\\n", self._at):
                self._take(2)
            elif char == "#":
                self._at = self._find("\n")
            elif text.startswith("((", self._at):
                self._at = min(self._find("))") + 2, len(text))
            elif operator := _OPERATOR.match(text, self._at):
                yield from self._operator(operator[0])
            else:
                line, word = self.line, self._word()
                if not (word.isdecimal() and text[self._at : self._at + 1] in ("<", ">")):  # else: a descriptor
                    yield word, line
        yield "\n", self.line

    def _operator(self, operator: str) -> Iterator[tuple[str, int]]:
        line = self.line
        self._take(len(operator))
        if operator == "\n":
            yield operator, line  # before the documents: the command ends on its own line
            self._skip_documents()
        elif operator in ("<<", "<<-") and (found := _HERE_WORD.match(self._text, self._at)):
            self._here.append((re.sub(r"[\\'\"]", "", found[1]), operator == "<<-"))
            self._at = found.end()
        elif _is_end(operator):
            yield operator, line
        else:
            self._skip_target()

    def _skip_target(self) -> None:
        """Skips the word behind a redirection."""
        while self._text[self._at : self._at + 1] in (" ", "\t"):
            self._at += 1
        if self._text[self._at : self._at + 1] not in ("", "\n", "(", ")"):
            self._word()

    def _skip_documents(self) -> None:
        for end, tabs in self._here:
            while self._at < len(self._text):
                stop = self._find("\n")
                line = self._text[self._at : stop]
                self._at, self.line = min(stop + 1, len(self._text)), self.line + 1
                if (line.lstrip("\t") if tabs else line) == end:
                    break
        self._here = []

    def _word(self) -> str:
        begin, text = self._at, self._text
        while self._at < len(text):
            char = text[self._at]
            if plain := _PLAIN.match(text, self._at):
                self._at = plain.end()
            elif char in "\\'\"`$":
                self._quoted(char)
            elif char == "#":  # within a word it is a part of it
                self._at += 1
            elif char == "(" and text[self._at - 1] == "=" and self._at > begin:
                self._brackets("(")
            else:
                break
        return text[begin : self._at].replace("\\\n", "")

    def _quoted(self, char: str) -> None:
        """Takes what a quote, a backslash or a $ begins."""
        following = self._text[self._at + 1 : self._at + 2]
        if char == "\\":
            self._take(2)
        elif char == "'":
            self._take(self._find("'", self._at + 1) + 1 - self._at)
        elif char == "`":
            self._take(self._find("`", self._at + 1) + 1 - self._at)
        elif char == '"':
            self._double_quoted()
        elif following in _CLOSING:
            self._at += 1
            self._brackets(following)
        else:
            self._take(1)

    def _double_quoted(self) -> None:
        self._take(1)
        while self._at < len(self._text) and self._text[self._at] != '"':
            char = self._text[self._at]
            if char == "\\" or (char == "$" and self._text[self._at + 1 : self._at + 2] in _CLOSING):
                self._quoted(char)
            else:
                self._take(1)
        self._take(1)

    def _brackets(self, opening: str) -> None:
        """Takes all from a bracket to the one that closes it."""
        closing = _CLOSING[opening]
        self._take(1 if self._depth < _MOST_BRACKETS else len(self._text))
        self._depth += 1
        while self._at < len(self._text) and (char := self._text[self._at]) != closing:
            if char == opening:
                self._brackets(opening)
            elif char in "\\'\"`$":
                self._quoted(char)
            elif char == "#" and opening == "(" and self._text[self._at - 1] in " \t\n":
                self._at = self._find("\n")
            else:
                self._take(1)
        self._take(1)
        self._depth -= 1

    def _find(self, what: str, begin: int | None = None) -> int:
        """Where `what` is next; the end of the text if it is nowhere."""
        place = self._text.find(what, self._at if begin is None else begin)
        return place if place >= 0 else len(self._text)

    def _take(self, count: int) -> None:
        self.line += self._text.count("\n", self._at, self._at + count)
        self._at = min(self._at + count, len(self._text))
