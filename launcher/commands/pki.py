"""`muster pki`: the certificates of the coordinators, for a site that has no authority of its own.

`init` makes an authority and a certificate for each coordinator's host. `renew` makes new certificates with the same
authority. `show` says whom certificates name and when they expire. Nothing is sent anywhere: the administrator copies
the files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from muster.daemon.transport.tls import AUTHORITY_DAYS, TlsError
from muster.launcher.command import Command, say
from muster.launcher.errors import LauncherError, WrongInput

HOST_DAYS = 365
"""Days for which the certificate of a coordinator is valid, unless --days says otherwise."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, words in (
        ("init", "make an authority, and a certificate for each coordinator's host"),
        ("renew", "make new certificates with the authority that init has made"),
    ):
        action = actions.add_parser(name, help=words, description=words)
        action.add_argument("folder", type=Path, help="where the files are; init makes this folder")
        action.add_argument(
            "hosts",
            nargs="+",
            metavar="HOST[,NAME...]",
            help="the host of a coordinator as muster.toml names it, with further names and addresses of this host",
        )
        action.add_argument(
            "--days",
            type=_days,
            default=HOST_DAYS,
            metavar="N",
            help=f"how long certificates are valid; default {HOST_DAYS}",
        )
    words = "say whom certificates name and when they expire"
    show = actions.add_parser("show", help=words, description=words)
    show.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a file with certificates (PEM)")


def _days(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= AUTHORITY_DAYS):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 1 to {AUTHORITY_DAYS}")
    return int(text)


async def _run(options: argparse.Namespace) -> int:
    from muster.launcher.certificates import certificate_files  # only here: it imports cryptography

    try:
        if options.action == "init":
            certificate_files.make_files(options.folder, options.hosts, options.days)
        elif options.action == "renew":
            certificate_files.renew_files(options.folder, options.hosts, options.days)
        else:
            for file in options.files:
                say(certificate_files.description(file))
    except TlsError as error:
        raise WrongInput(str(error)) from None
    except OSError as error:
        raise LauncherError(f"{error.filename}: {error.strerror}") from None
    return 0


COMMAND = Command(_arguments, _run, remote=False)
