"""Leaves secrets out of what is kept of a run: variables by name and by value, and words of a command. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

LEFT_OUT = "(left out)"
_NAME = re.compile(
    r"(?i)(^|[._-])(pass|passwd|password|passphrase|secret|secrets|token|tokens|key|keys|apikey|credential|credentials|"
    r"auth|authorization|cookie|session|jwt|pat|pin|private|signature|sas|dsn|webhook)([._-]|$)|password|secret|token|"
    r"apikey|credential|[._-]pwd$|pass$"
)
_VALUE = re.compile(
    r"[a-z][a-z0-9+.-]*://[^/\s@:]*:[^/\s@]+@"  # a URL with a password
    r"|https?://[^/\s@]+@"  # with a token
    r"|https://hooks\.slack\.com/\S+"
    r"|-----BEGIN (?s:.*?)(?:-----END [^\n]*|\Z)"
    r"|\b(Bearer|Basic) +[A-Za-z0-9._~+/=-]{16,}"
    r"|\b(hf|gh[oprsu]|github_pat|glpat|gsk|npm|nvapi|r8|sk|pk|xox[abeoprs])[_-][A-Za-z0-9_-]{16,}"
    r"|\b(AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[A-Za-z0-9_-]{30,}|\bdapi[0-9a-f]{32}"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\."  # a JSON web token
)
_QUOTED = re.compile(r"([\w.-]+)([\"']?\s*[:=]\s*)([\"'])[^\"'\n]+\3")


def is_secret(name: str, value: str, named: Collection[str] = ()) -> bool:
    """Whether a variable's name, or its value, looks like a secret, or the user has named it."""
    return name in named or bool(_NAME.search(name) or _VALUE.search(value))


def environment(variables: Mapping[str, str], named: Collection[str] = ()) -> dict[str, str]:
    """The variables, with a word in place of each secret. `named`: those that the user calls secret."""
    return {name: LEFT_OUT if is_secret(name, value, named) else value for name, value in sorted(variables.items())}


def command(words: Sequence[str]) -> list[str]:
    """The words of a command, with a word in place of each secret: `--api-key X`, `--api-key=X`, `api_key=X`, a URL
    with a password.

    A positional word that is a secret of an unknown form stays: nothing tells it from a path.
    """
    kept: list[str] = []
    next_is_secret = False
    for word in words:
        is_option = word.startswith("-")
        name, equals, value = word.partition("=")
        if (next_is_secret and not is_option) or _VALUE.search(name):
            kept.append(LEFT_OUT)
        elif equals and is_secret(name, value):
            kept.append(f"{name}={LEFT_OUT}")
        else:
            kept.append(word)
        next_is_secret = is_option and not equals and bool(_NAME.search(name))
    return kept


def text(value: str) -> str:
    """A text with a word in place of each value that looks like a secret: a diff, the address of a repository."""
    return _QUOTED.sub(_of_secret_name, _VALUE.sub(LEFT_OUT, value))


def _of_secret_name(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}{found[3]}{LEFT_OUT}{found[3]}" if _NAME.search(found[1]) else found[0]
