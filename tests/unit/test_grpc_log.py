"""What gRPC itself would write into the log of a server."""

from __future__ import annotations

import subprocess
import sys

_SERVER = """
import asyncio, ssl
from contextlib import suppress
from muster.daemon.transport.authority import Authority, bytes_of_public_key, make_key, pem_of_key
from muster.daemon.transport.channel import bind, make_server, stop_server
from muster.daemon.transport.server_limits import COORDINATOR
from muster.daemon.testing.chosen_users import ChosenUser
from muster.daemon.transport.tls import certificate_name
import grpc

async def main():
    made, key = Authority.create("a test"), make_key()
    issued = made.issue(bytes_of_public_key(key), [certificate_name("n1")])
    server = make_server(ChosenUser(1), COORDINATOR)
    port = bind(server, "127.0.0.1:0", grpc.ssl_server_credentials([(pem_of_key(key), issued)]))
    await server.start()
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    anybody.set_alpn_protocols(["h2"])
    with suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=anybody, server_hostname="no-such-server")
        writer.close()
    await stop_server(server, 0)
    print("served")

asyncio.run(main())
"""


def test_a_stranger_writes_no_line_with_a_name_that_no_server_has() -> None:
    """The attack: TLS handshakes with chosen names, without a credential. Each was a line of 300 bytes."""
    done = subprocess.run([sys.executable, "-Ic", _SERVER], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("served\n", "")
