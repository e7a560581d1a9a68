"""A site of 12,500 nodes for measurements of one coordinator: names, jobs, credentials, certificates.

The coordinator and what loads it run in processes of their own (`site_coordinator`, `site_nodes`, `site_gangs`). They
find everything in one folder. Connections are real, over loopback, with TLS. Credentials are munge's where munge is
installed, and of a secret file elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

import grpc

from muster.daemon.host import clock, private_file
from muster.daemon.transport import authority
from muster.daemon.transport.identity import Credentials, MungeCredentials, SecretCredentials
from muster.daemon.transport.tls import CertificateFiles, Trust, trust_in_file
from muster.slurm.client.fake.fake_cluster import FakeCluster

GANGS = 16
NODES_PER_GANG = 8
NODES_PER_JOB = 125
"""Nodes of each job that is not of Muster. They hold the other nodes."""
OTHER_JOBS = 100_000
LAG_SAMPLE_S = 0.02
LAG_TOLD_S = 0.5


@dataclass(frozen=True)
class Site:
    """One folder with everything that the processes share."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> Site:
        """Make the secret file, and the certificate of the coordinator at 127.0.0.1."""
        site, key = cls(folder), authority.make_key()
        SecretCredentials.create(folder / "secret")
        made = authority.Authority.create("a measurement")
        private_file.replace(folder / "authority.pem", made.pem.decode())
        private_file.replace(folder / "key.pem", authority.pem_of_key(key).decode())
        issued = made.issue(authority.bytes_of_public_key(key), ["127.0.0.1"])
        private_file.replace(folder / "certificate.pem", issued.decode())
        return site

    def credentials(self) -> Credentials:
        """Munge's, if the folder has a munged; else those of the secret file."""
        socket = self.folder / "munge" / "socket"
        return MungeCredentials(socket) if socket.exists() else SecretCredentials(self.folder / "secret")

    def trust(self) -> Trust:
        """Whom to take for the coordinator. The connections of one process share what gRPC makes of the file. Each real
        daemon makes that once. Here it would be most of the load's cost."""
        return SharedTrust(trust_in_file(self.folder / "authority.pem").authorities)

    def certificate_files(self) -> CertificateFiles:
        """What the coordinator proves itself with."""
        return CertificateFiles(self.folder / "certificate.pem", self.folder / "key.pem")


class SharedTrust(Trust):
    """Makes gRPC's credentials once for all channels. Each connection has a full handshake: no session is resumed."""

    def credentials(self) -> grpc.ChannelCredentials:
        """See Trust.credentials."""
        return _channel_credentials(self.authorities())


@cache
def _channel_credentials(authorities: bytes) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(authorities)


def gang_node(gang: int, number: int) -> str:
    """The name of a node of a gang."""
    return f"g{gang:02d}n{number}"


def gang_job(gang: int) -> int:
    """The Slurm job of a gang."""
    return gang + 1


def other_nodes(count: int) -> list[str]:
    """The names of the nodes that belong to no gang."""
    return [f"node{number:05d}" for number in range(count)]


def cluster(others: int, uid: int) -> FakeCluster:
    """Slurm's view of the site: all nodes are at 127.0.0.1, and all are allocated."""
    found = FakeCluster((), now=clock.wall)
    for gang in range(GANGS):
        for number in range(NODES_PER_GANG):
            found.add_running_node(gang_job(gang), gang_node(gang, number), uid)
    for number, name in enumerate(other_nodes(others)):
        found.add_running_node(OTHER_JOBS + number // NODES_PER_JOB, name, uid)
    return found


def tell(**figures: object) -> None:
    """Print one line for the process that started this one."""
    print(json.dumps(figures), flush=True)


async def tell_lag() -> NoReturn:
    """Tell by how many milliseconds timers of this process's event loop come late: the worst of each LAG_TOLD_S."""
    loop = asyncio.get_running_loop()
    while True:
        ends, worst = loop.time() + LAG_TOLD_S, 0.0
        while (begun := loop.time()) < ends:
            await asyncio.sleep(LAG_SAMPLE_S)
            worst = max(worst, loop.time() - begun - LAG_SAMPLE_S)
        tell(lag_ms=round(1000 * worst, 1))


def sample(names: Sequence[str], count: int) -> list[str]:
    """Random ones of these, the same at each run."""
    return random.Random(7).sample(names, count)
