"""A user with valid credentials and without any job, who holds all that one user can of a coordinator and of an agent.

    python3 -m muster.daemon.testing.known_user AGENT AGENT_NAME SECONDS

The coordinator is that of the site's settings. AGENT is "host:port", AGENT_NAME what its credentials are made for.
The calls are those of the table "What one user can hold" of docs/SECURITY.md, all at once: calls without a message,
half messages of the largest size, whole messages that take much more once they are read, answers that are not read. A
call that has ended is replaced at once. The last line
of the output is a JSON object: how often each status came back.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import NoReturn

import grpc

from muster.daemon.testing.half_calls import HalfCaller
from muster.daemon.transport.call_binding import payload_of_call
from muster.daemon.transport.identity import Credentials, IdentityUnavailable
from muster.daemon.transport.server_limits import COORDINATOR, KIB, SHARD_MESSAGE_BYTES, SPEC_MESSAGE_BYTES
from muster.daemon.transport.site_config import Site, split_address, split_addresses
from muster.v1.agent_pb2 import AgentHello, AgentMessage, AgentStatus, RankStatus
from muster.v1.api_pb2 import RegisterRequest
from muster.v1.common_pb2 import JobSpec

REGISTER, ATTACH = "/muster.v1.Muster/Register", "/muster.v1.AgentService/Attach"
NODES, PING = "/muster.v1.Muster/Nodes", "/muster.v1.ProbeService/Ping"
RETRY_S = 0.25
"""Seconds after which a connection that has ended is opened again, and an ended call is replaced."""
_NO_JOB = 2**32 - 1
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass(frozen=True)
class Target:
    """A server. `name`: what credentials for it are made for."""

    name: str
    address: str
    tls: ssl.SSLContext


@dataclass(frozen=True)
class Attack:
    """Calls of one kind. `size`: of each message, of which the last byte is left out; 0: no message comes. `message`: a
    whole one in its place. `more`: what follows it, as it is on the wire."""

    method: str
    target: Target
    connections: int
    calls: int
    size: int = 0
    reads: bool = True
    message: bytes = b""
    more: bytes = b""


@dataclass
class Attacker:
    """Makes credentials of this process, and counts how calls end."""

    credentials: Credentials
    counts: Counter[str] = field(default_factory=Counter)

    async def run_all(self, attacks: list[Attack], seconds: float) -> Counter[str]:
        """Make all attacks for so long."""
        running = [asyncio.create_task(self._run(attack)) for attack in attacks for _ in range(attack.connections)]
        done, _ = await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for task in done:
            task.result()  # a bug of this module
        return self.counts

    async def _run(self, attack: Attack) -> NoReturn:
        """Hold one connection of the attack for ever."""
        while True:
            try:
                caller = await HalfCaller.open(attack.target.address, tls=attack.target.tls, reads=attack.reads)
                try:
                    await asyncio.gather(*(self._hold(caller, attack) for _ in range(attack.calls)))
                finally:
                    await caller.close()
            except (OSError, asyncio.IncompleteReadError):
                self.counts["connection closed"] += 1
            await asyncio.sleep(RETRY_S)

    async def _hold(self, caller: HalfCaller, attack: Attack) -> NoReturn:
        half = bytes(attack.size - 1) if attack.size else None
        whole = attack.message + attack.more if attack.message else b"" if not attack.reads else half
        size = len(attack.message) or attack.size or None
        payload = payload_of_call(attack.method, attack.target.name, attack.message)
        while True:
            try:
                token = await asyncio.to_thread(self.credentials.issue, payload)
            except IdentityUnavailable:
                await asyncio.sleep(RETRY_S)
                continue
            call = caller.call(attack.method, token, whole, size=size)
            [status] = await caller.ended([call])
            self.counts[f"{attack.method.rpartition('/')[2]} {_NAMES[status]}"] += 1
            await asyncio.sleep(RETRY_S)


def all_attacks(coordinator: Target, agent: Target) -> list[Attack]:
    """All cells of the table that cost memory."""
    each, ping_bytes = COORDINATOR.calls_per_connection, SHARD_MESSAGE_BYTES - KIB
    # 256 connections of one address reach the coordinator, as muster-coordinator.nft allows.
    return [
        Attack(REGISTER, coordinator, connections=188, calls=each),
        Attack(REGISTER, coordinator, connections=1, calls=each, size=COORDINATOR.message_bytes),
        Attack(ATTACH, coordinator, connections=64, calls=each),
        Attack(ATTACH, coordinator, connections=1, calls=each, size=COORDINATOR.message_bytes),
        Attack(REGISTER, coordinator, connections=1, calls=each, message=_registration()),
        Attack(ATTACH, coordinator, connections=1, calls=each, message=_hello(), more=_status()),
        Attack(NODES, coordinator, connections=2, calls=each, reads=False),
        Attack(PING, agent, connections=4, calls=128),
        Attack(PING, agent, connections=1, calls=8, size=ping_bytes),
    ]


def _registration() -> bytes:
    """The largest one, with a command of half a million empty words."""
    job = JobSpec(name="a", nodes=1, ranks_per_node=1, command=[""] * ((SPEC_MESSAGE_BYTES - KIB) // 2))
    return RegisterRequest(gang_id="known", slurm_job_id=_NO_JOB, spec=job).SerializeToString()


def _hello() -> bytes:
    hello = AgentHello(gang_id="known", slurm_job_id=_NO_JOB, node="n1", incarnation="a", peer_address="127.0.0.1:1")
    return AgentMessage(hello=hello).SerializeToString()


def _status() -> bytes:
    """Of two million empty ranks."""
    status = AgentStatus(ranks=[RankStatus()] * ((COORDINATOR.message_bytes - KIB) // 2))
    message = AgentMessage(status=status).SerializeToString()
    return b"\x00" + len(message).to_bytes(4, "big") + message


def tls_context() -> ssl.SSLContext:
    """For HTTP/2 with a server that may be anybody."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def main() -> None:
    """See the module."""
    address, name, seconds = sys.argv[1:]
    config = Site.load()
    coordinator = split_addresses(config.coordinator)[0]
    anybody = tls_context()
    targets = Target(split_address(coordinator)[0], coordinator, anybody), Target(name, address, anybody)
    attacker = Attacker(config.credentials())
    print(json.dumps(asyncio.run(attacker.run_all(all_attacks(*targets), float(seconds)))), flush=True)


if __name__ == "__main__":
    main()
