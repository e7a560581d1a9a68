"""What a command is: a row of the table in __main__.py, one file each in commands/."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from muster.daemon.transport.identity import IdentityError
from muster.daemon.transport.site_config import CONFIG, Site, SiteError
from muster.launcher.coordinator import Coordinator, cannot_prove
from muster.launcher.errors import LauncherError, SiteFault


@dataclass(frozen=True, slots=True)
class Command:
    """One command of `muster`."""

    name: str
    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Awaitable[int]]
    """Returns the exit status; raises LauncherError."""
    remote: bool = True
    """It asks the coordinator, and so takes the options that say where and how."""
    guarded: bool = False
    """It starts processes: it runs as the child of a guard that ends whatever it leaves behind."""


def site_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the coordinator is and how we prove who we are."""
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where muster-coordinator listens")
    parser.add_argument("--auth", metavar="munge|secret:PATH", help="how we prove who we are")
    parser.add_argument("--config", metavar="FILE", type=Path, help=f"settings; default {CONFIG}")


def load_site(options: argparse.Namespace) -> Site:
    """The site's settings.

    Raises:
        SiteFault: they can't be right.
    """
    try:
        return Site.load(coordinator=options.coordinator, auth=options.auth, config=options.config)
    except SiteError as error:
        raise SiteFault(str(error)) from None


def connect(site: Site) -> Coordinator:
    """The site's coordinator; nothing is sent yet.

    Raises:
        SiteFault: we can't prove who we are.
    """
    try:
        return Coordinator(site.coordinator, site.credentials())
    except IdentityError as error:
        raise cannot_prove(error) from None


def note(text: str) -> None:
    """One line for a person; standard output is left to what scripts read."""
    print(text, file=sys.stderr, flush=True)


def say_away(words: str) -> None:
    """The coordinator is away while something is followed."""
    note(f"muster: {words}; training goes on without it, waiting for its return")


def complain(error: LauncherError) -> None:
    """What went wrong, and what to do next."""
    note(f"muster: {error.message}")
    if error.hint:
        note(f"  {error.hint}")


def painter() -> Callable[[Text], str]:
    """What makes a coloured word fit for standard output: as it is where that is no terminal."""
    target = console()

    def paint(word: Text) -> str:
        with target.capture() as captured:
            target.print(word, end="")
        return captured.get()

    return paint


def console(*, stderr: bool = False) -> Console:
    """Where tables go. Where that is no terminal, lines are as long as they need to be."""
    # No markup: reasons quote what ranks wrote, brackets too.
    plain = Console(highlight=False, markup=False, stderr=stderr)
    return plain if plain.is_terminal else Console(highlight=False, markup=False, width=200, stderr=stderr)
