"""Leaves secrets out of what is kept of a run: variables by name and by value, and words of a command. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

LEFT_OUT = "(left out)"
_NAME = re.compile(
    r"(?i)(^|[._-])(pass|secrets?|tokens?|keys?|creds?|auth|authorization|cookie|session|jwt|otp|pat|pin|private|"
    r"signature|sas|dsn|webhook)([._-]|$)|password|passwd|passphrase|secret|token|apikey|credential|"
    r"connection[._-]?string|connstr|pass$|(?<!\bold)(?<=.)pwd$"
)
_KEY = re.compile(r"(?i)([a-z0-9]+)keys?(?![a-z0-9])")
"""AWSKEY, sshKeys: what stands before "key", but for the words below."""
_NO_KEYS = frozenset(["don", "hoc", "joc", "lac", "mon", "tur", "whis"])
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
_LETTERS = re.compile(r"[A-Za-z0-9]{20,}")
_HEX = re.compile(r"[0-9a-fA-F]{32,}")
_CHANGE = re.compile(r"(?<=[a-z])(?=[A-Z0-9])|(?<=[A-Z])(?=[a-z0-9])|(?<=[0-9])(?=[A-Za-z])")
"""Between two characters of different kinds."""
_QUOTED = re.compile(r"([\w.-]+)([\"']?\s*[:=]\s*)([\"'])[^\"'\n]+\3")


def is_secret(name: str, value: str, named: Collection[str] = ()) -> bool:
    """Whether a variable's name, or its value, looks like a secret, or the user has named it."""
    return name in named or _names_secret(name) or bool(_VALUE.search(value))


def _names_secret(name: str) -> bool:
    keys = (found[1].lower() for found in _KEY.finditer(name))
    return bool(_NAME.search(name)) or any(before not in _NO_KEYS for before in keys)


def _looks_random(word: str) -> bool:
    """Letters and digits in no order that people choose: 32 hexadecimal digits, or 20 characters of changing kinds."""
    return any(_HEX.fullmatch(run) or _is_mixed(run) for run in _LETTERS.findall(word))


def _is_mixed(run: str) -> bool:
    has_both = re.search("[0-9]", run) and re.search("[a-z]", run)
    return bool(has_both) and 4 * len(_CHANGE.findall(run)) >= len(run)


def environment(variables: Mapping[str, str], named: Collection[str] = ()) -> dict[str, str]:
    """The variables, with a word in place of each secret. `named`: those that the user calls secret."""
    return {name: LEFT_OUT if is_secret(name, value, named) else value for name, value in sorted(variables.items())}


def command(words: Sequence[str]) -> list[str]:
    """The words of a command, with a word in place of each secret: `--api-key X`, `--api-key=X`, `api_key=X`, a URL
    with a password.

    So is a positional word that looks random, such as a key of an unknown form. The value of an option whose name says
    nothing of a secret stays: it may be a commit.
    """
    kept: list[str] = []
    next_is_secret, after_option = False, False
    for word in words:
        is_option = word.startswith("-")
        name, equals, value = word.partition("=")
        is_random = not (is_option or after_option or equals or "/" in word) and _looks_random(word)
        if (next_is_secret and not is_option) or is_random or _VALUE.search(name):
            kept.append(LEFT_OUT)
        elif equals and is_secret(name, value):
            kept.append(f"{name}={LEFT_OUT}")
        else:
            kept.append(word)
        after_option = is_option and not equals
        next_is_secret = after_option and _names_secret(name)
    return kept


def text(value: str) -> str:
    """A text with a word in place of each value that looks like a secret: a diff, the address of a repository."""
    return _QUOTED.sub(_of_secret_name, _VALUE.sub(LEFT_OUT, value))


def _of_secret_name(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}{found[3]}{LEFT_OUT}{found[3]}" if _names_secret(found[1]) else found[0]
