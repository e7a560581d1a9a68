"""Leaves secrets out of what is kept of a run: variables by name and by value, and words of a command. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

LEFT_OUT = "(left out)"
_NAME = re.compile(
    r"(?i)(^|[_-])(pass|passwd|password|passphrase|secret|secrets|token|tokens|key|keys|apikey|credential|credentials|"
    r"auth|authorization|cookie|session|jwt|pat|pin|private|signature|sas|dsn)([_-]|$)|password|secret|token|apikey|"
    r"credential"
)
_VALUE = re.compile(
    r"[a-z][a-z0-9+.-]*://[^/\s@]+:[^/\s@]+@"  # a URL with a password
    r"|-----BEGIN "
    r"|\b(hf|ghp|gho|ghs|github_pat|glpat|sk|pk|xox[abp])[_-][A-Za-z0-9_-]{16,}"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\."  # a JSON web token
)
_OPTION = re.compile(r"(--?[\w-]+)(=)?(.*)", re.DOTALL)


def is_secret(name: str, value: str, named: Collection[str] = ()) -> bool:
    """Whether a variable's name, or its value, looks like a secret, or the user has named it."""
    return name in named or bool(_NAME.search(name) or _VALUE.search(value))


def environment(variables: Mapping[str, str], named: Collection[str] = ()) -> dict[str, str]:
    """The variables, with a word in place of each secret. `named`: those that the user calls secret."""
    return {name: LEFT_OUT if is_secret(name, value, named) else value for name, value in sorted(variables.items())}


def command(words: Sequence[str]) -> list[str]:
    """The words of a command, with a word in place of each secret: `--api-key X`, `--api-key=X`, a URL with a password.

    A positional word that is a secret of an unknown form stays: nothing tells it from a path.
    """
    kept: list[str] = []
    next_is_secret = False
    for word in words:
        option = _OPTION.fullmatch(word)
        if next_is_secret and not option:
            kept.append(LEFT_OUT)
        elif option and option[2] and is_secret(option[1].lstrip("-"), option[3]):
            kept.append(f"{option[1]}={LEFT_OUT}")
        else:
            kept.append(LEFT_OUT if _VALUE.search(word) else word)
        next_is_secret = bool(option and not option[2] and _NAME.search(option[1].lstrip("-")))
    return kept


def text(value: str) -> str:
    """A text with a word in place of each value that looks like a secret: a diff, the address of a repository."""
    return _VALUE.sub(LEFT_OUT, value)
