"""A site's settings: the coordinator's address, and how callers prove who they are.

Flags override the environment, which overrides /etc/muster/muster.toml, which overrides the defaults. A wrong key,
value or file is refused with what would be right.

The coordinator's address has no default. A program that calls the coordinator sends it a credential of its user, and
musterd's user is root. On an address that nobody has chosen, any user of the host may listen.
"""

from __future__ import annotations

import argparse
import logging
import os
import pwd
import socket
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from muster.daemon.host.addresses import comparable_host
from muster.daemon.host.plain_text import PlainFormatter
from muster.daemon.host.port_range import PortRange
from muster.daemon.transport import management_hosts, toml_text
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


class Site(BaseModel):
    """The site's settings. `Site.load` reads them. The fields are the keys of muster.toml."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    coordinator: str = Field(
        default="",
        description="host:port of muster-coordinator; with a standby both, with a comma between them; empty: not given",
    )
    auth: str = Field(default="munge", description='"munge", or "secret:PATH" for one machine and one user')
    connections: str = Field(
        default=TLS,
        description=f'"{TLS}", or "{PLAIN_TEXT}": whoever reaches the network can read and change everything. A '
        "secret file is for one machine: with it, connections to loopback addresses are always plain text",
    )
    tls_authority: Path = Field(
        default=TLS_FOLDER / "authority.pem",
        description="on every host: the certificates of the authorities that issue the coordinators' certificates",
    )
    tls_certificate: Path = Field(
        default=TLS_FOLDER / "coordinator.pem", description="on a coordinator's host: its certificate"
    )
    tls_key: Path = Field(
        default=TLS_FOLDER / "coordinator.key", description="on a coordinator's host: the key of its certificate"
    )
    encrypt_checkpoints: bool = Field(
        default=False,
        description="whether the pieces of checkpoints between agents use TLS, too; their digests always do",
    )
    agent_ports: PortRange | None = Field(
        default=None,
        description='on every compute node: the ports that agents listen on, as "61000-61999"; none: any free ports',
    )
    hooks_without_musterd: Literal["pass", "fail"] = Field(
        default="pass",
        description="on every compute node: the exit status of muster-epilog and muster-healthcheck if musterd does "
        'not answer: "pass" is 0, "fail" is 1, with which Slurm drains the node after its job',
    )
    epilog_wait_s: float = Field(
        default=0.0,
        ge=0,
        le=600,
        description="on every compute node: seconds for which muster-epilog may wait until the memory that musterd "
        "keeps of the ended job is needed no more",
    )
    slurm_user: str = Field(default="slurm", description="Slurm's own user (SlurmUser): may do everything")
    operators: tuple[str, ...] = Field(default=(), description="further users who may do everything")
    management_hosts: tuple[str, ...] = Field(
        default=(),
        max_length=management_hosts.MAX_HOSTS,
        description="names or addresses of the hosts from which root, SlurmUser and operators may do everything; "
        "empty: from all hosts",
    )

    @field_validator("coordinator")
    @classmethod
    def _check_coordinator(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("must be one line without control characters: it becomes a line of the batch script")
        for address in split_addresses(value):
            split_address(address)
        return value

    @field_validator("auth")
    @classmethod
    def _check_auth(cls, value: str) -> str:
        kind, colon, path = value.partition(":")
        if value == "munge" or (kind == "secret" and colon and path.startswith("/")):
            return value
        raise ValueError('must be "munge" or "secret:/absolute/path"')

    @field_validator("connections")
    @classmethod
    def _check_connections(cls, value: str) -> str:
        if value not in (TLS, PLAIN_TEXT):
            raise ValueError(f'must be "{TLS}" or "{PLAIN_TEXT}"')
        return value

    @field_validator("agent_ports", mode="before")
    @classmethod
    def _check_agent_ports(cls, value: object) -> PortRange:
        ports = PortRange.parse(value)
        if COORDINATOR_PORT in ports or NODE_PORT in ports:
            raise ValueError(
                f"must not contain {COORDINATOR_PORT} or {NODE_PORT}, the ports of muster-coordinator and musterd"
            )
        return ports

    @field_validator("management_hosts")
    @classmethod
    def _check_management_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(management_hosts.check_host, value))

    @classmethod
    def load(
        cls,
        *,
        coordinator: str | None = None,
        auth: str | None = None,
        connections: str | None = None,
        config: Path | None = None,
        environ: Mapping[str, str] | None = None,
        calls_coordinator: bool = True,
    ) -> Site:
        """Read flags (`coordinator`, `auth`, `connections`; None: not given), environment, file and defaults.

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
        for key, flag in (("coordinator", coordinator), ("auth", auth), ("connections", connections)):
            if value := environ.get(name := f"MUSTER_{key.upper()}"):
                given[key] = (value, name)
            if flag is not None:
                given[key] = (flag, f"--{key}")
        try:
            site = cls(**{key: value for key, (value, _) in given.items()})
        except ValidationError as error:
            raise SiteError(_describe(error, given)) from None
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


def _describe(error: ValidationError, given: Mapping[str, tuple[Any, str]]) -> str:
    lines = []
    for fault in error.errors():
        key = str(fault["loc"][0])
        value, where = given[key]
        if fault["type"] == "extra_forbidden":
            known = ", ".join(sorted(Site.model_fields))
            lines.append(f"{where}: unknown key {key!r}; known keys are {known}")
        else:
            words = fault["msg"].removeprefix("Value error, ")
            lines.append(f"{where}: {key} = {value!r}: {words}")
    return "\n".join(lines)


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


def add_arguments(parser: argparse.ArgumentParser, *, listen: str) -> None:
    """Add the flags that all daemons share. `listen`: the default of --listen ("host:port")."""
    parser.add_argument("--coordinator", metavar="HOST:PORT[,...]",
                        help="where muster-coordinator listens; with a standby both")  # fmt: skip
    parser.add_argument("--listen", metavar="HOST:PORT", default=listen, help=f"default {listen}")
    parser.add_argument("--auth", metavar="munge|secret:PATH", help="how callers prove who they are")
    parser.add_argument("--connections", metavar="HOW", help=f'"{TLS}" or "{PLAIN_TEXT}"; default {TLS}')
    parser.add_argument("--config", metavar="FILE", type=Path, help=f"settings; default {CONFIG}")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])


def start_logging(level: str) -> None:
    """Log to stderr: one line for each message (plain_text.PlainFormatter)."""
    handler = logging.StreamHandler(sys.stderr)
    form = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
    handler.setFormatter(PlainFormatter(form, datefmt="%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
