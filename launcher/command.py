"""The type of a command, and what all commands share. Each file in commands/ defines one command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from muster.daemon.host.plain_text import plain
from muster.daemon.transport.identity import IdentityError
from muster.daemon.transport.site_config import CONFIG, Site, SiteError
from muster.daemon.transport.tls import PLAIN_TEXT, TLS
from muster.launcher.coordinator_client import CoordinatorClient, identity_fault
from muster.launcher.errors import LauncherError, SiteFault

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


@dataclass(frozen=True, slots=True)
class Command:
    """One command of `muster`. Its name and its help are in command_table.py."""

    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Awaitable[int]]
    """Runs the command and returns the exit status. Raises LauncherError."""
    remote: bool = True
    """Whether the command calls the coordinator. If so, it takes the options for the address and the authentication."""
    guarded: bool = False
    """Whether the command starts processes. If so, it runs as a child of a guard process, which ends all processes that
    the command leaves.
    """


def site_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the coordinator's address and for the authentication."""
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="the address of muster-coordinator")
    parser.add_argument("--auth", metavar="munge|secret:PATH", help="how to authenticate")
    parser.add_argument("--connections", metavar="HOW", help=f'"{TLS}" or "{PLAIN_TEXT}"; default {TLS}')
    parser.add_argument("--config", metavar="FILE", type=Path, help=f"settings file; default {CONFIG}")


def load_site(options: argparse.Namespace) -> Site:
    """Reads the site's settings.

    Raises:
        SiteFault: a setting is wrong.
    """
    try:
        return Site.load(
            coordinator=options.coordinator, auth=options.auth, connections=options.connections, config=options.config
        )
    except SiteError as error:
        raise SiteFault(str(error)) from None


def connect(site: Site) -> CoordinatorClient:
    """Returns a client for the site's coordinator. Nothing is sent yet.

    Raises:
        SiteFault: the credentials are not available.
    """
    try:
        return CoordinatorClient(site.coordinator, site.credentials(), site.trust())
    except IdentityError as error:
        raise identity_fault(error) from None
    except SiteError as error:
        raise SiteFault(str(error)) from None


def print_note(text: str) -> None:
    """Prints a note for the user on stderr. Standard output is for scripts."""
    print(plain(text, keep="\n"), file=sys.stderr, flush=True)


def note_coordinator_unavailable(words: str) -> None:
    """Tells the user that the coordinator does not answer while a command follows a job."""
    print_note(f"muster: {words}; training continues; waiting for the coordinator")


def print_error(error: LauncherError) -> None:
    """Prints the error and the next step."""
    print_note(f"muster: {error.message}")
    if error.hint:
        print_note(f"  {error.hint}")


def word_painter() -> Callable[[Text], str]:
    """Returns a function that converts a coloured word to terminal output. If stdout is no terminal, it returns plain
    text.
    """
    target = console()

    def paint(word: Text) -> str:
        with target.capture() as captured:
            target.print(word, end="")
        return captured.get()

    return paint


def console(*, stderr: bool = False) -> Console:
    """The console for tables. If the output is no terminal, lines are not wrapped at the terminal's width."""
    from rich.console import Console  # a command without tables must not wait for it

    # No markup: reasons quote the output of ranks, which may contain brackets.
    plain = Console(highlight=False, markup=False, stderr=stderr)
    return plain if plain.is_terminal else Console(highlight=False, markup=False, width=200, stderr=stderr)
