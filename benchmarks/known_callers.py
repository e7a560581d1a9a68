"""A user with valid credentials and without any job, who holds all that one user can, in a process of its own.

    python -m benchmarks.known_callers FOLDER COORDINATOR_PORT AGENT_PORT UID SECONDS

Its calls are those of the table "What one user can hold" of docs/SECURITY.md, all at once: calls without a message,
half messages of the largest size, answers that are not read. A call that has ended is replaced at once. The last line
of the output is a JSON object: how often each status came back. It must start as root, to become the user.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import grpc

from benchmarks import known_agent, site
from muster.daemon.transport.call_binding import payload_of_call
from muster.daemon.transport.identity import Credentials, IdentityUnavailable
from muster.daemon.transport.server_limits import COORDINATOR, MIB, SHARD_MESSAGE_BYTES
from muster.daemon.transport.testing.half_calls import HalfCaller

EACH = COORDINATOR.calls_per_connection
REGISTER, ATTACH = "/muster.v1.Muster/Register", "/muster.v1.AgentService/Attach"
NODES, PING = "/muster.v1.Muster/Nodes", "/muster.v1.ProbeService/Ping"
RETRY_S = 0.25
"""Seconds after which a connection that has ended is opened again, and an ended call is replaced."""
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass(frozen=True)
class Attack:
    """Calls of one kind. `size`: of each message, of which the last byte is left out; 0: no message comes."""

    method: str
    server: str
    port: int
    tls: ssl.SSLContext
    connections: int
    calls: int
    size: int = 0
    reads: bool = True


@dataclass
class Attacker:
    """Makes credentials of this process, and counts how calls end."""

    credentials: Credentials
    counts: Counter[str] = field(default_factory=Counter)

    async def run(self, attack: Attack) -> NoReturn:
        """Hold one connection of the attack for ever."""
        while True:
            try:
                caller = await HalfCaller.open(f"127.0.0.1:{attack.port}", tls=attack.tls, reads=attack.reads)
                try:
                    await asyncio.gather(*(self._hold(caller, attack) for _ in range(attack.calls)))
                finally:
                    await caller.close()
            except (OSError, asyncio.IncompleteReadError):
                self.counts["connection closed"] += 1
            await asyncio.sleep(RETRY_S)

    async def _hold(self, caller: HalfCaller, attack: Attack) -> NoReturn:
        half = bytes(attack.size - 1) if attack.size else None
        whole = b"" if not attack.reads else half
        payload = payload_of_call(attack.method, attack.server, b"")
        while True:
            try:
                token = await asyncio.to_thread(self.credentials.issue, payload)
            except IdentityUnavailable:
                await asyncio.sleep(RETRY_S)
                continue
            call = caller.call(attack.method, token, whole, size=attack.size or None)
            [status] = await caller.ended([call])
            self.counts[f"{attack.method.rpartition('/')[2]} {_NAMES[status]}"] += 1
            await asyncio.sleep(RETRY_S)


def attacks(folder: Path, coordinator: int, agent: int) -> list[Attack]:
    """All cells of the table that cost memory."""
    # 256 connections of one address reach the coordinator, as muster-coordinator.nft allows.
    there, here = _context(folder / "authority.pem", "127.0.0.1"), _context(folder / "agent.pem", "")
    return [
        Attack(REGISTER, "127.0.0.1", coordinator, there, connections=188, calls=EACH),
        Attack(REGISTER, "127.0.0.1", coordinator, there, connections=1, calls=EACH, size=COORDINATOR.message_bytes),
        Attack(ATTACH, "127.0.0.1", coordinator, there, connections=64, calls=EACH),
        Attack(ATTACH, "127.0.0.1", coordinator, there, connections=1, calls=EACH, size=COORDINATOR.message_bytes),
        Attack(NODES, "127.0.0.1", coordinator, there, connections=2, calls=EACH, reads=False),
        Attack(PING, known_agent.NAME, agent, here, connections=4, calls=128),
        Attack(PING, known_agent.NAME, agent, here, connections=1, calls=8, size=SHARD_MESSAGE_BYTES - MIB // 1024),
    ]


def _context(authorities: Path, name: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authorities)
    context.check_hostname = bool(name)
    context.set_alpn_protocols(["h2"])
    return context


async def _attack(folder: Path, coordinator: int, agent: int, uid: int, seconds: float) -> Counter[str]:
    attacker, planned = Attacker(site.Site(folder).credentials()), attacks(folder, coordinator, agent)
    "".encode("idna")  # the user may not read the library that each connection with TLS asks for
    os.setresuid(uid, uid, uid)
    running = [asyncio.create_task(attacker.run(attack)) for attack in planned for _ in range(attack.connections)]
    done, _ = await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for task in done:
        task.result()  # a bug of this module
    return attacker.counts


if __name__ == "__main__":
    where, coordinator_port, agent_port, uid, seconds = sys.argv[1:]
    found = asyncio.run(_attack(Path(where), int(coordinator_port), int(agent_port), int(uid), float(seconds)))
    print(json.dumps(found), flush=True)
