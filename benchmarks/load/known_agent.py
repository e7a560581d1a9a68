"""The server of an agent, in a process of its own: what a measurement attacks.

    python -m benchmarks.load.known_agent FOLDER

Its first line of output is {"port": …}. It writes the authority of its certificate to agent.pem of the folder, and ends
when its standard input ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import grpc

from benchmarks.load import site
from muster.daemon.agent.failure_detector.peers import AgentIdentity, PeerService, make_agent_server
from muster.daemon.host import private_file
from muster.daemon.host.process.process_memory import collect_seldom
from muster.daemon.testing.no_shards import NoShards
from muster.daemon.transport import authority, call_binding
from muster.daemon.transport.channel import bind, stop_server
from muster.daemon.transport.server_limits import agent_limits
from muster.daemon.transport.tls import certificate_name

GANG, NODE = "attacked", "n1"
NAME = call_binding.name_of_agent(GANG, NODE)


def _certificate(folder: Path) -> grpc.ServerCredentials:
    made, key = authority.Authority.create("a measurement"), authority.make_key()
    private_file.replace(folder / "agent.pem", made.pem.decode())
    issued = made.issue(authority.bytes_of_public_key(key), [certificate_name(NAME)])
    return grpc.ssl_server_credentials([(authority.pem_of_key(key), issued)])


async def _serve(folder: Path) -> None:
    identity = AgentIdentity(GANG, NODE, "a", os.getuid())
    service = PeerService(identity, NoShards(), lambda: None)
    server = make_agent_server(site.Site(folder).credentials(), agent_limits(8), identity, service)
    port = bind(server, "127.0.0.1:0", _certificate(folder))
    await server.start()
    site.tell(port=port)
    await asyncio.to_thread(sys.stdin.read)
    await stop_server(server, 0.2)


if __name__ == "__main__":
    collect_seldom()
    asyncio.run(_serve(Path(sys.argv[1])))
