"""The site's hooks, as `[hooks]` of the policy names them: what is told to whom, and how. Checked when it is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

Occasion = Literal["swap", "restart", "requeue", "failure", "end", "node", "fleet", "loss"]
"""When a hook is called; docs/operations/hooks.md explains each."""
OCCASIONS: tuple[Occasion, ...] = get_args(Occasion)
MOST_HOOKS = 16
"""Each has a thread."""


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook. `command` is executed without a shell, or the message is posted to `url`.

    `secret_file`: holds the secret with which messages to `url` are signed; None: they are not signed. `timeout_s`:
    seconds that the command, or one attempt to post, may take.
    """

    name: str
    occasions: frozenset[Occasion]
    command: tuple[str, ...] = ()
    url: str = ""
    secret_file: Path | None = None
    timeout_s: float = 30.0


class HookTable(BaseModel):
    """One table `[hooks.NAME]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    on: Annotated[list[Occasion], Field(min_length=1)]
    command: list[Annotated[str, StringConstraints(min_length=1)]] = []
    url: str = ""
    secret_file: Path | None = None
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 30.0

    @model_validator(mode="after")
    def _check_target(self) -> HookTable:
        if bool(self.command) == bool(self.url):
            raise ValueError("a hook needs either command or url")
        if self.command and not self.command[0].startswith("/"):
            raise ValueError(f"command[0] = {self.command[0]!r}: give the whole path of the program")
        if self.command and self.secret_file:
            raise ValueError("secret_file signs what is posted to a url: a command needs none")
        if self.url and not _is_web_address(self.url):
            raise ValueError(f"url = {self.url!r}: an address such as https://HOST/PATH, in plain ASCII letters")
        if self.secret_file and not self.secret_file.is_absolute():
            raise ValueError(f"secret_file = {str(self.secret_file)!r}: give its whole path")
        return self

    def hook(self, name: str) -> Hook:
        """The hook of this table."""
        command = tuple(self.command)
        return Hook(name, frozenset(self.on), command, self.url, self.secret_file, self.timeout_s)


def _is_web_address(url: str) -> bool:
    """Whether Python's library can post to it."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").encode("idna"), parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(host) and port != 0 and url.isascii() and " " not in url


HooksTable = Annotated[dict[str, HookTable], Field(max_length=MOST_HOOKS)]
