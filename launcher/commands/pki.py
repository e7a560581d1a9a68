"""`muster pki`: the certificates of the coordinators, for a site that has no authority of its own.

`init` makes an authority and a certificate for each coordinator's host. `renew` makes new certificates with the same
authority. `show` says whom certificates name and when they expire. Nothing is sent anywhere: the administrator copies
the files. No other command waits for the import of cryptography.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from muster.daemon.host import clock, private_file
from muster.daemon.transport import authority
from muster.daemon.transport.authority import Authority
from muster.daemon.transport.management_hosts import check_host
from muster.daemon.transport.site_config import TLS_FOLDER
from muster.daemon.transport.tls import AUTHORITY_DAYS, TlsError
from muster.launcher.command import Command, say
from muster.launcher.errors import LauncherError, WrongInput
from muster.wording import counted

_AUTHORITY, _AUTHORITY_KEY = "authority.pem", "authority.key"
_CERTIFICATE, _KEY = "coordinator.pem", "coordinator.key"
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
    try:
        if options.action == "init":
            make_files(options.folder, options.hosts, options.days)
        elif options.action == "renew":
            renew_files(options.folder, options.hosts, options.days)
        else:
            for file in options.files:
                say(description(file))
    except TlsError as error:
        raise WrongInput(str(error)) from None
    except OSError as error:
        raise LauncherError(f"{error.filename}: {error.strerror}") from None
    return 0


COMMAND = Command(_arguments, _run, remote=False)


def make_files(folder: Path, hosts: list[str], days: int) -> None:
    """Makes an authority, and a certificate for each host. Makes the whole folder, or nothing.

    Raises:
        WrongInput: a name can't be right, or the folder exists.
        OSError: the files can't be written.
    """
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
        _write_public(folder / _AUTHORITY, made.pem)
        for listed in names:
            _issue(made, folder, listed, days)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    for line in _next_steps(folder, [listed[0] for listed in names]):
        say(line)


def renew_files(folder: Path, hosts: list[str], days: int) -> None:
    """Makes new certificates with the authority in `folder`.

    Raises:
        WrongInput: a name can't be right.
        TlsError: the folder holds no authority.
        OSError: the files can't be written.
    """
    issuing = Authority.load(folder / _AUTHORITY, folder / _AUTHORITY_KEY)
    for listed in [_names(host) for host in hosts]:
        _issue(issuing, folder, listed, days)
        say(f"{folder / listed[0] / _CERTIFICATE} is new; copy both files of its folder to {listed[0]}")


def _names(host: str) -> list[str]:
    try:
        return [check_host(name) for name in host.split(",")]
    except ValueError as error:
        raise WrongInput(f"{error}; {host!r} must be HOST[,NAME...], without a port") from None


def _issue(issuing: Authority, folder: Path, names: list[str], days: int) -> None:
    """Writes the files of one host."""
    key = authority.make_key()
    issued = issuing.issue(authority.bytes_of_public_key(key), names, days)
    of_host = folder / names[0]
    of_host.mkdir(mode=0o700, exist_ok=True)
    private_file.replace(of_host / _KEY, authority.pem_of_key(key).decode())
    _write_public(of_host / _CERTIFICATE, issued)


def _write_public(path: Path, pem: bytes) -> None:
    """Writes a file that all may read and only its owner may write, whatever the umask: `cp -p` takes the mode along to
    the hosts, which trust whatever authority the file holds."""
    path.write_bytes(pem)
    path.chmod(0o644)


def _next_steps(folder: Path, hosts: list[str]) -> list[str]:
    lines = [f"Copy {folder / _AUTHORITY} to {TLS_FOLDER / _AUTHORITY} of every host, readable by all."]
    for host in hosts:
        lines.append(
            f"Copy {folder / host / _CERTIFICATE} and {_KEY} to {TLS_FOLDER} of {host}, readable by Slurm's user only."
        )
    lines.append(f"Keep {folder / _AUTHORITY_KEY} off the cluster: who has it can act as a coordinator.")
    return lines


def description(file: Path) -> str:
    """One line: whom the certificate in `file` names, and when it expires. Raises TlsError: it holds none."""
    certificate = authority.read_certificate(file)
    names = ", ".join(sorted(authority.names_in_certificate(certificate))) or "an authority"
    left = (authority.expires_at(certificate) - clock.wall()) / 86400
    expiry = f"expires in {counted(round(left), 'day')}" if left > 0 else f"expired {counted(round(-left), 'day')} ago"
    return f"{file}: {names}; {expiry}"
