"""A site's settings: the coordinator's address, and how callers prove who they are.

Flags override the environment, which overrides /etc/muster/muster.toml, which overrides the defaults. A wrong key,
value or file is refused with what would be right.

Every command and daemon starts with these settings. They are checked here, and not by pydantic, which costs a command
100 ms at its start and each daemon 10 MiB.

The coordinator's address has no default. A program that calls the coordinator sends it a credential of its user, and
musterd's user is root. On an address that nobody has chosen, any user of the host may listen.
"""

from __future__ import annotations

import argparse
import logging
import os
import pwd
import socket
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, NoReturn, get_type_hints

from muster.daemon.host import toml_text
from muster.daemon.host.addresses import comparable_host
from muster.daemon.host.port_range import PortRange
from muster.daemon.host.process import log_format
from muster.daemon.transport import management_hosts
from muster.daemon.transport.identity import Credentials, MungeCredentials, SecretCredentials
from muster.daemon.transport.tls import PLAIN_TEXT, TLS, CertificateFiles, TlsError, Trust, trust_in_file

CONFIG = Path("/etc/muster/muster.toml")
TLS_FOLDER = Path("/etc/muster/tls")

COORDINATOR_PORT = 7070
NODE_PORT = 7071

# Exit status of every command and daemon if the site has to correct something (EX_CONFIG of sysexits.h). The systemd
# units know it: a restart would change nothing.
EXIT_CONFIG = 78


class SiteError(Exception):
    """The site's fault: a wrong configuration."""


_MAX_EPILOG_WAIT_S: Final = 600
_MAX_PRICE: Final = 1_000_000


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text in quotes")
    return value


def _path(value: object) -> Path:
    return value if isinstance(value, Path) else Path(_text(value))


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise ValueError('must be a list of texts, for example ["one", "two"]')
    return tuple(value)


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _one_of(*allowed: str) -> Callable[[object], Any]:
    def read(value: object) -> str:
        if value not in allowed:
            raise ValueError("must be " + " or ".join(f'"{one}"' for one in allowed))
        return str(value)

    return read


def _coordinator(value: object) -> str:
    text = _text(value)
    if not text.isprintable():
        raise ValueError("must be one line without control characters: it becomes a line of the batch script")
    for address in split_addresses(text):
        split_address(address)
    return text


def _listen_address(value: object) -> str:
    split_address(_text(value))
    return _text(value)


def _auth(value: object) -> str:
    text = _text(value)
    kind, colon, path = text.partition(":")
    if text == "munge" or (kind == "secret" and colon and path.startswith("/")):
        return text
    raise ValueError('must be "munge" or "secret:/absolute/path"')


def _agent_ports(value: object) -> PortRange:
    ports = PortRange.parse(value)
    if COORDINATOR_PORT in ports or NODE_PORT in ports:
        raise ValueError(
            f"must not contain {COORDINATOR_PORT} or {NODE_PORT}, the ports of muster-coordinator and musterd"
        )
    return ports


def _epilog_wait(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MAX_EPILOG_WAIT_S:
        raise ValueError(f"must be a number of seconds from 0 to {_MAX_EPILOG_WAIT_S}")
    return float(value)


def _price(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MAX_PRICE:
        raise ValueError(f"must be a number from 0 to {_MAX_PRICE:,}: what one GPU costs in an hour")
    return float(value)


def _management_hosts(value: object) -> tuple[str, ...]:
    hosts = _texts(value)
    if len(hosts) > management_hosts.MAX_HOSTS:
        raise ValueError(f"must be at most {management_hosts.MAX_HOSTS} hosts")
    return tuple(map(management_hosts.check_host, hosts))


@dataclass(frozen=True, slots=True)
class Site:
    """The site's settings. `Site.load` reads them. The fields are the keys of muster.toml.

    Beside each type stands the function that returns a value as the field holds it. It raises ValueError with what
    would be right.
    """

    coordinator: Annotated[str, _coordinator] = ""
    """host:port of muster-coordinator; with a standby both, with a comma between them; empty: not given."""
    auth: Annotated[str, _auth] = "munge"
    """ "munge", or "secret:PATH" for one machine and one user."""
    connections: Annotated[str, _one_of(TLS, PLAIN_TEXT)] = TLS
    """TLS or PLAIN_TEXT. In plain text, whoever reaches the network can read and change everything. A secret file is
    for one machine: with it, connections to loopback addresses are always plain text.
    """
    tls_authority: Annotated[Path, _path] = TLS_FOLDER / "authority.pem"
    """On every host: the certificates of the authorities that issue the coordinators' certificates."""
    tls_certificate: Annotated[Path, _path] = TLS_FOLDER / "coordinator.pem"
    """On a coordinator's host: its certificate."""
    tls_key: Annotated[Path, _path] = TLS_FOLDER / "coordinator.key"
    """On a coordinator's host: the key of its certificate."""
    metrics_listen: Annotated[str, _listen_address] = ""
    """On a coordinator's host and on compute nodes: host:port on which the daemon serves its metrics; empty: it serves
    none."""
    metrics_token: Annotated[Path | None, _path] = None
    """The file with the token that readers of metrics send; None: they prove themselves with a certificate alone."""
    metrics_client_authority: Annotated[Path | None, _path] = None
    """The certificates of the authorities that issue the certificates of readers of metrics; None: they need none."""
    metrics_certificate: Annotated[Path | None, _path] = None
    """The certificate for metrics; None: that of the coordinator (`tls_certificate`)."""
    metrics_key: Annotated[Path | None, _path] = None
    """The key of `metrics_certificate`; None: that of the coordinator (`tls_key`)."""
    encrypt_checkpoints: Annotated[bool, _switch] = False
    """Whether the pieces of checkpoints between agents use TLS, too; their digests always do."""
    agent_ports: Annotated[PortRange | None, _agent_ports] = None
    """On every compute node: the ports that agents listen on, as "61000-61999"; None: any free ports."""
    hooks_without_musterd: Annotated[Literal["pass", "fail"], _one_of("pass", "fail")] = "pass"
    """On every compute node: the exit status of muster-epilog and muster-healthcheck if musterd does not answer. "pass"
    is 0. "fail" is 1, with which Slurm drains the node after its job.
    """
    epilog_wait_s: Annotated[float, _epilog_wait] = 0.0
    """On every compute node: seconds for which muster-epilog may wait until the memory that musterd keeps of the ended
    job is needed no more.
    """
    slurm_user: Annotated[str, _text] = "slurm"
    """Slurm's own user (SlurmUser): may do everything."""
    operators: Annotated[tuple[str, ...], _texts] = ()
    """Further users who may do everything."""
    management_hosts: Annotated[tuple[str, ...], _management_hosts] = ()
    """Names or addresses of the hosts from which root, SlurmUser and operators may do everything; empty: all hosts."""
    privacy: Annotated[Literal["slurm", "jobs"], _one_of("slurm", "jobs")] = "slurm"
    """On a coordinator's host: with "jobs", nodes that no job of a user has are shown to operators only. With "slurm",
    that is so if PrivateData of slurm.conf has jobs or nodes.
    """

    gpu_hour_price: Annotated[float, _price] = 0.0
    """Where goodput is shown: what one GPU costs in an hour, in the site's currency; 0: nothing is shown in money."""

    @classmethod
    def load(
        cls,
        *,
        coordinator: str | None = None,
        auth: str | None = None,
        connections: str | None = None,
        metrics_listen: str | None = None,
        config: Path | None = None,
        environ: Mapping[str, str] | None = None,
        calls_coordinator: bool = True,
    ) -> Site:
        """Read flags (those before `config`; None: not given), environment, file and defaults.

        If `config` is given, it is read instead of /etc/muster/muster.toml and must exist. A program with
        `calls_coordinator` needs the coordinator's address; only the coordinator itself does not.

        Raises:
            SiteError: something is wrong; the message says where, and what would be right.
        """
        environ = os.environ if environ is None else environ
        path = config or Path(environ.get("MUSTER_CONFIG", CONFIG))
        given: dict[str, tuple[Any, str]] = {
            key: (value, str(path)) for key, value in _read_file(path, must_exist=path != CONFIG).items()
        }
        flags = {
            "coordinator": coordinator,
            "auth": auth,
            "connections": connections,
            "metrics_listen": metrics_listen,
        }
        for key, flag in flags.items():
            if value := environ.get(name := f"MUSTER_{key.upper()}"):
                given[key] = (value, name)
            if flag is not None:
                given[key] = (flag, f"--{key.replace('_', '-')}")
        site = cls(**_read(given))
        if calls_coordinator and not site.coordinator:
            raise SiteError(
                f'no coordinator is configured: set coordinator = "HOST:{COORDINATOR_PORT}" in {path}, or give '
                "--coordinator or MUSTER_COORDINATOR"
            )
        return site

    def credentials(self) -> Credentials:
        """Credentials as `auth` says.

        Raises:
            muster.daemon.transport.identity.IdentityUnavailable: no libmunge, or no such secret file.
        """
        if self.auth == "munge":
            return MungeCredentials()
        return SecretCredentials(Path(self.auth.removeprefix("secret:")))

    @property
    def is_plain_text(self) -> bool:
        """Whether connections are plain text."""
        return self.connections == PLAIN_TEXT or (self.auth != "munge" and self.coordinator_hosts() <= _LOOPBACK)

    def coordinator_hosts(self) -> frozenset[str]:
        """The hosts of all coordinators, as callers name them, in the form of `comparable_host`."""
        addresses = split_addresses(self.coordinator) if self.coordinator else []
        return frozenset(comparable_host(split_address(address)[0]) for address in addresses)

    def trust(self) -> Trust | None:
        """Whom to take for a coordinator; None: connections are plain text.

        Raises:
            SiteError: the authority's certificate can't be read.
        """
        if self.is_plain_text:
            return None
        try:
            return trust_in_file(self.tls_authority)
        except TlsError as error:
            raise SiteError(f"{error}. {_HOW_TO_GET_TLS}") from None

    def certificate_files(self) -> CertificateFiles | None:
        """The certificate of the coordinator on this host; None: connections are plain text.

        Raises:
            SiteError: the files can't be used.
        """
        if self.is_plain_text:
            return None
        try:
            return CertificateFiles(self.tls_certificate, self.tls_key)
        except TlsError as error:
            raise SiteError(f"{error}. {_HOW_TO_GET_TLS}") from None

    def operator_uids(self) -> frozenset[int]:
        """Uids of Slurm's user and of the operators. Names that this host does not know are skipped with a warning."""
        uids = set()
        for name in (self.slurm_user, *self.operators):
            try:
                uids.add(pwd.getpwnam(name).pw_uid)
            except KeyError:
                logging.getLogger(__name__).warning("user %r of muster.toml is not known on this host", name)
        return frozenset(uids)


_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_HOW_TO_GET_TLS = (
    "`muster pki init` makes the certificates of a site that has no authority of its own. Without TLS: "
    f'connections = "{PLAIN_TEXT}" in muster.toml, on every host'
)


def _read_file(path: Path, *, must_exist: bool) -> dict[str, Any]:
    try:
        return toml_text.loads(path.read_text())
    except FileNotFoundError:
        if must_exist:
            raise SiteError(f"{path} does not exist") from None
        return {}
    except OSError as error:
        raise SiteError(f"{path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SiteError(f"{path} is not TOML: {error}") from None


def _read(given: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """The settings by key. `given`: each value by key, with the place that gives it."""
    known = {key: hint.__metadata__[0] for key, hint in get_type_hints(Site, include_extras=True).items()}
    found, faults = dict[str, Any](), list[str]()
    for key, (value, where) in given.items():
        if key not in known:
            faults.append(f"{where}: unknown key {key!r}; known keys are {', '.join(sorted(known))}")
            continue
        try:
            found[key] = known[key](value)
        except ValueError as error:
            faults.append(f"{where}: {key} = {value!r}: {error}")
    if faults:
        raise SiteError("\n".join(faults))
    return found


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port". The port is 0 to 65535; an empty host means all addresses.

    Raises:
        ValueError: the address has neither form.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535 or (":" in host and not bracketed):
        raise ValueError(f"{address!r} must be HOST:PORT, for example node17:{COORDINATOR_PORT}")
    return host.strip("[]"), int(port)


def split_addresses(addresses: str) -> list[str]:
    """The addresses of all coordinators: "ctl1:7070,ctl2:7070". A site with one coordinator has a list of one."""
    return [address.strip() for address in addresses.split(",")]


def node_name(flag: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """This node's name in Slurm: the flag, else SLURMD_NODENAME, else the short host name."""
    environ = os.environ if environ is None else environ
    return flag or environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


class CommandLine(argparse.ArgumentParser):
    """The command line of a daemon. A wrong word ends it as a wrong setting does: no restart would change that."""

    wrong_word: ClassVar[int] = EXIT_CONFIG
    """The exit status for it."""

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        self.exit(self.wrong_word, f"{self.prog}: {message}; --help lists the options\n")


def add_arguments(parser: argparse.ArgumentParser, *, listen: str) -> None:
    """Add the flags that all daemons share. `listen`: the default of --listen ("host:port")."""
    parser.add_argument("--coordinator", metavar="HOST:PORT[,...]",
                        help="where muster-coordinator listens; with a standby both")  # fmt: skip
    parser.add_argument("--listen", metavar="HOST:PORT", default=listen, help=f"default {listen}")
    parser.add_argument("--auth", metavar="munge|secret:PATH", help="how callers prove who they are")
    parser.add_argument("--connections", metavar="HOW", help=f'"{TLS}" or "{PLAIN_TEXT}"; default {TLS}')
    parser.add_argument("--config", metavar="FILE", type=Path, help=f"settings; default {CONFIG}")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--log-format", default=log_format.named_form(), choices=log_format.FORMS,
                        help=f"text, JSON lines, or records of journald with fields; default {log_format.VARIABLE}, "
                        "else text")  # fmt: skip


def add_metrics_argument(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the daemons that serve metrics."""
    parser.add_argument("--metrics-listen", metavar="HOST:PORT", help="where metrics are served; default: nowhere")


def start_logging(level: str, form: str = "text", program: str = "muster", **about_all: str) -> None:
    """Log as `form` says (log_format). `about_all`: what all lines are about."""
    log_format.about_all.update(about_all)
    logging.basicConfig(level=level.upper(), handlers=[log_format.handler(form, program)])
