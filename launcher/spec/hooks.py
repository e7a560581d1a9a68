"""[hooks] of job.toml: programs that are told what happens to the job. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from muster.launcher.spec.table import Table
from muster.v1.common_pb2 import JobHook

MOST_HOOKS = 8
MOST_WORDS, MOST_CHARS = 64, 4096
Occasion = Literal["swap", "restart", "requeue", "failure", "end"]


def _without_nul(word: str) -> str:
    if "\0" in word:
        raise ValueError("must not contain a NUL character")
    return word


def _not_empty(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value:
        raise ValueError("must not be empty")
    return value


def _is_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("the name of a hook is 1 to 32 letters, digits, '-' or '_'")
    return name


_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
Word = Annotated[str, Field(min_length=1, max_length=MOST_CHARS), AfterValidator(_without_nul)]


class Hook(Table):
    """[hooks.NAME]: one program, and when it is called."""

    on: Annotated[tuple[Occasion, ...], Field(max_length=8), AfterValidator(_not_empty)]
    """When it is called: swap, restart, requeue, failure, end."""
    command: Annotated[tuple[Word, ...], Field(max_length=MOST_WORDS), AfterValidator(_not_empty)]
    """The program with its arguments. It gets the message on its standard input."""
    timeout_s: Annotated[float, Field(gt=0, le=300)] = 30.0
    """Seconds after which it is killed."""

    def to_proto(self, name: str) -> JobHook:
        """The hook as the job's spec has it."""
        return JobHook(name=name, on=self.on, command=self.command, timeout_s=self.timeout_s)


HookName = Annotated[str, AfterValidator(_is_name)]
Hooks = Annotated[dict[HookName, Hook], Field(max_length=MOST_HOOKS)]
