"""What `muster policy` does: `check`, `explain`, `replay`. A module of its own, because it imports the policy."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from muster.daemon.coordinator.policy.policy import SITE_POLICY, Change, Policy, PolicyError
from muster.daemon.host.plain_text import plain
from muster.launcher.command import print_note, screen, show
from muster.launcher.errors import SiteFault, WrongInput
from muster.launcher.output.screen import INDENT, Screen
from muster.launcher.policy.explanation import SignalNameError, explain
from muster.launcher.policy.replay import Replay, bounded_lines
from muster.wording import counted

EXIT_MISTAKES = 2
"""`check` has found mistakes."""


def check(path: Path) -> int:
    """Print the mistakes of a site's file, or what it changes. Returns the exit status."""
    try:
        policy = Policy.load(path)
    except PolicyError as error:
        for mistake in error.mistakes:
            print_note(mistake)
        return EXIT_MISTAKES
    show(sentences(differences(policy, str(path)), screen()))
    return 0


def differences(policy: Policy, site: str) -> Iterator[str]:
    """A line for the file `site`, and one for each value that it sets."""
    changes = policy.changes()
    different = [change for change in changes if change.shipped != change.site]
    same = len(changes) - len(different)
    words = f"{site}: no mistakes, {counted(len(different), 'difference')} from the shipped table"
    yield words + (f", {counted(same, 'value')} as shipped" if same else "")
    yield from (f"  {_in_words(change)}" for change in different)


def _in_words(change: Change) -> str:
    if change.shipped is None:
        return f"{change.key} = {change.site!r} (new)"
    return f"{change.key} = {change.site!r} (shipped: {change.shipped!r})"


def explain_text(text: str, site: Path | None) -> int:
    """Print which row decides about a line or a signal. Returns the exit status.

    Raises:
        SiteFault: the site's file has mistakes.
        WrongInput: the text is almost the name of a signal.
    """
    policy, path = _load(site)
    try:
        show(sentences(explain(text, policy, str(path)), screen()))
    except SignalNameError as error:
        raise WrongInput(str(error)) from None
    return 0


def replay_log(log: str, site: Path | None) -> int:
    """Print what a saved log would have led to; "-" is the standard input. Returns the exit status.

    Raises:
        SiteFault: the site's file has mistakes.
        WrongInput: the log can't be read.
    """
    replay = Replay(_load(site)[0])
    try:
        with sys.stdin.buffer if log == "-" else open(log, "rb") as file:
            show(sentences(replay.lines(bounded_lines(file)), screen()))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise WrongInput(f"{log} can't be read: {error.strerror}") from None
    show(sentences(replay.summary(), screen()))
    return 0


def _load(site: Path | None) -> tuple[Policy, Path | None]:
    path = site or (SITE_POLICY if os.path.exists(SITE_POLICY) else None)
    try:
        return Policy.load(path), path
    except PolicyError as error:
        raise SiteFault(str(error), f"muster policy check {path}") from None


def sentences(lines: Iterable[str], target: Screen) -> Iterator[str]:
    """The lines, broken where they do not fit; each keeps its indent."""
    for line in lines:
        text = plain(line.lstrip(" "))
        indent = " " * (len(line) - len(line.lstrip(" ")))
        yield from target.sentence(text, indent, indent + INDENT)
