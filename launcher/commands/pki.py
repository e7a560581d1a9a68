"""`muster pki`: the certificates of the coordinators, for a site that has no authority of its own.

`init` makes an authority and a certificate for each coordinator's host. `renew` makes new certificates with the same
authority. `show` says whom certificates name and when they expire. Nothing is sent anywhere: the administrator copies
the files.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from muster.daemon.host import clock, private_file
from muster.daemon.transport import authority
from muster.daemon.transport.authority import Authority
from muster.daemon.transport.site_config import TLS_FOLDER
from muster.daemon.transport.tls import TlsError
from muster.launcher.command import Command
from muster.launcher.errors import LauncherError, WrongInput

HOST_DAYS = 365
"""Days for which the certificate of a coordinator is valid, unless --days says otherwise."""
_AUTHORITY, _AUTHORITY_KEY = "authority.pem", "authority.key"
_CERTIFICATE, _KEY = "coordinator.pem", "coordinator.key"


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
        action.add_argument("--days", type=_days, default=HOST_DAYS, help=f"default {HOST_DAYS}")
    show = actions.add_parser("show", help="say whom certificates name and when they expire")
    show.add_argument("files", nargs="+", type=Path, metavar="FILE")


def _days(text: str) -> int:
    days = int(text)
    if not 1 <= days <= authority.AUTHORITY_DAYS:
        raise argparse.ArgumentTypeError(f"must be 1 to {authority.AUTHORITY_DAYS}")
    return days


async def _run(options: argparse.Namespace) -> int:
    try:
        if options.action == "init":
            _init(options.folder, options.hosts, options.days)
        elif options.action == "renew":
            _renew(options.folder, options.hosts, options.days)
        else:
            for file in options.files:
                print(_description(file), flush=True)
    except TlsError as error:
        raise WrongInput(str(error)) from None
    except OSError as error:
        raise LauncherError(f"{error.filename}: {error.strerror}") from None
    return 0


def _init(folder: Path, hosts: list[str], days: int) -> None:
    """Makes the folder, or nothing."""
    names = [_names(host) for host in hosts]
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise WrongInput(
            f"{folder} exists", "give a new folder, or renew certificates with `muster pki renew`"
        ) from None
    try:
        made = Authority.create("Muster: coordinators")
        private_file.create(folder / _AUTHORITY_KEY, authority.pem_of_key(made.key).decode())
        (folder / _AUTHORITY).write_bytes(made.pem)
        for listed in names:
            _issue(made, folder, listed, days)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    print(_next_steps(folder, [listed[0] for listed in names]), flush=True)


def _renew(folder: Path, hosts: list[str], days: int) -> None:
    issuing = Authority.load(folder / _AUTHORITY, folder / _AUTHORITY_KEY)
    for listed in [_names(host) for host in hosts]:
        _issue(issuing, folder, listed, days)
        print(f"{folder / listed[0] / _CERTIFICATE} is new; copy both files of its folder to {listed[0]}", flush=True)


def _names(host: str) -> list[str]:
    names = host.split(",")
    if not all(name and name.isprintable() and not set(name) & set(" /") for name in names):
        raise WrongInput(f"{host!r} must be HOST[,NAME...], for example mgmt1,mgmt1.cluster.example,10.0.0.1")
    return names


def _issue(issuing: Authority, folder: Path, names: list[str], days: int) -> None:
    """Writes the files of one host."""
    key = authority.make_key()
    issued = issuing.issue(authority.bytes_of_public_key(key), names, days)
    of_host = folder / names[0]
    of_host.mkdir(mode=0o700, exist_ok=True)
    private_file.replace(of_host / _KEY, authority.pem_of_key(key).decode())
    (of_host / _CERTIFICATE).write_bytes(issued)


def _next_steps(folder: Path, hosts: list[str]) -> str:
    lines = [f"Copy {folder / _AUTHORITY} to {TLS_FOLDER / _AUTHORITY} of every host, readable by all."]
    for host in hosts:
        lines.append(
            f"Copy {folder / host / _CERTIFICATE} and {_KEY} to {TLS_FOLDER} of {host}, readable by Slurm's user only."
        )
    lines.append(f"Keep {folder / _AUTHORITY_KEY} off the cluster: who has it can act as a coordinator.")
    return "\n".join(lines)


def _description(file: Path) -> str:
    certificate = authority.read_certificate(file)
    names = ", ".join(sorted(authority.names_in_certificate(certificate))) or "an authority"
    left = (authority.expires_at(certificate) - clock.wall()) / 86400
    expiry = f"expires in {left:.0f} days" if left > 0 else f"expired {-left:.0f} days ago"
    return f"{file}: {names}; {expiry}"


COMMAND = Command("pki", "make and show the certificates of coordinators", _arguments, _run, remote=False)
