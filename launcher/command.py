"""The type of a command, and what all commands share. Each file in commands/ defines one command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from muster.daemon.host.plain_text import plain
from muster.daemon.transport.identity import IdentityError
from muster.daemon.transport.site_config import CONFIG, Site, SiteError
from muster.daemon.transport.tls import PLAIN_TEXT, TLS
from muster.launcher.command_line import Split
from muster.launcher.coordinator_client import CoordinatorClient, identity_fault
from muster.launcher.errors import LauncherError, SiteFault
from muster.launcher.output.screen import Screen, open_screen
from muster.launcher.output.terminal_width import columns
from muster.launcher.version_check import VersionCheck


@dataclass(frozen=True, slots=True)
class Command:
    """One command of `muster`. Its name and its help are in command_table.py."""

    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Awaitable[int]]
    """Runs the command and returns the exit status. Raises LauncherError."""
    remote: bool = True
    """Whether the command calls the coordinator. If so, it takes the options for the address and the authentication."""
    split: Split | None = None
    """Takes words out of the command line that another program understands."""
    guarded: Callable[[argparse.Namespace], bool] = lambda _: False
    """Whether the command starts processes. If so, it runs as a child of a guard process, which ends all processes that
    the command leaves.
    """


def site_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the coordinator's address and for the authentication."""
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="the address of muster-coordinator")
    parser.add_argument("--auth", metavar="munge|secret:PATH", help="how to authenticate")
    parser.add_argument("--connections", metavar="HOW", help=f'"{TLS}" or "{PLAIN_TEXT}"; default {TLS}')
    parser.add_argument("--config", metavar="FILE", type=Path, help=f"settings file; default {CONFIG}")


def load_site(options: argparse.Namespace, *, calls_coordinator: bool = True) -> Site:
    """Reads the site's settings. `calls_coordinator`: they must name its address.

    Raises:
        SiteFault: a setting is wrong.
    """
    try:
        return Site.load(
            coordinator=options.coordinator,
            auth=options.auth,
            connections=options.connections,
            config=options.config,
            calls_coordinator=calls_coordinator,
        )
    except SiteError as error:
        raise SiteFault(str(error)) from None


def connect(site: Site) -> CoordinatorClient:
    """Returns a client for the site's coordinator. Nothing is sent yet.

    Raises:
        SiteFault: the credentials are not available.
    """
    try:
        versions = VersionCheck(lambda reason: print_note(f"muster: {reason}"))
        return CoordinatorClient(site.coordinator, site.credentials(), site.trust(), versions=versions)
    except IdentityError as error:
        raise identity_fault(error) from None
    except SiteError as error:
        raise SiteFault(str(error)) from None


def time_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the option for the zone of the times that a command shows."""
    parser.add_argument("--utc", action="store_true", help="show times in UTC; default: in local time")


def screen(options: argparse.Namespace | None = None) -> Screen:
    """Standard output, with the zone that `options` ask for."""
    return open_screen(sys.stdout, utc=options is not None and getattr(options, "utc", False))


def show(lines: Iterable[str]) -> None:
    """Prints lines that a table or a sentence has laid out."""
    for line in lines:
        print(line)
    sys.stdout.flush()


def say(text: str) -> None:
    """Prints one line of prose."""
    show(screen().sentence(plain(text)))


def print_note(text: str) -> None:
    """Prints a note for the user on stderr. Standard output is for scripts."""
    target = Screen(columns() if sys.stderr.isatty() else None)
    for line in plain(text, keep="\n").split("\n"):
        indent = " " * (len(line) - len(line.lstrip()))
        print("\n".join(target.sentence(line.lstrip(), indent, indent + "  ")), file=sys.stderr)
    sys.stderr.flush()


def note_coordinator_unavailable(words: str) -> None:
    """Tells the user that the coordinator does not answer while a command follows a job."""
    print_note(f"muster: {words}; training continues; waiting for the coordinator")


def print_error(error: LauncherError) -> None:
    """Prints the error and the next step."""
    print_note(f"muster: {error.message}")
    if error.hint:
        print_note(f"  {error.hint}")
