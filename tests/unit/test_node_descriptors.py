"""Callers over TCP never take the descriptors of musterd's local socket: prologs and agents are still served."""

import asyncio
import fcntl
import json
import os
import re
import resource
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from muster.checkpoint.store.memory.sealed_memory import MEMFD_SEALS
from muster.daemon.host.kept_memory_client import MAX_FDS, send_request
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.transport.server_limits import NODE_DAEMON

FLOOD = Path(__file__).with_name("connection_flood.py")
DESCRIPTORS = NODE_DAEMON.connections + 3 * (1 + MAX_FDS) + 64
"""For TCP, one gang's memory that arrives and is kept, and musterd's own. The unit allows more of each."""
FEW = 16
WAIT_S = 120.0
"""Ends a wait that would never end."""


@asynccontextmanager
async def _program(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def _port(musterd: asyncio.subprocess.Process) -> str:
    """The port of a musterd whose start is complete: that it finds no coordinator is the last thing it says of it."""
    assert musterd.stderr
    said = ""
    async with asyncio.timeout(WAIT_S):
        while "not attached to" not in said:
            line = await musterd.stderr.readline()
            assert line, said
            said += line.decode()
    found = re.search(r"answers probes on port (\d+)", said)
    assert found, said
    return found[1]


def _open_descriptors(process: asyncio.subprocess.Process) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


@pytest.fixture
def memory() -> Iterator[list[int]]:
    fds = [os.memfd_create("shard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for _ in range(MAX_FDS)]
    for fd in fds:
        os.write(fd, b"x")
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, MEMFD_SEALS)
    yield fds
    for fd in fds:
        os.close(fd)


async def test_connections_over_tcp_leave_the_local_socket_its_descriptors(tmp_path: Path, memory: list[int]) -> None:
    SecretCredentials.create(tmp_path / "secret")
    (tmp_path / "kmsg").touch(mode=0o600)
    socket = str(tmp_path / "memory.sock")
    flags = ["--coordinator=127.0.0.1:1", f"--auth=secret:{tmp_path / 'secret'}", "--listen=127.0.0.1:0", "--node=n1"]
    files = [f"--kmsg={tmp_path / 'kmsg'}", f"--memory={socket}"]

    async def ask(request: dict[str, object], *fds: int) -> tuple[dict[str, object], list[int]]:
        return await asyncio.to_thread(send_request, socket, request, fds, timeout_s=WAIT_S, retry_s=WAIT_S)

    async with _program("-m", "muster.daemon.node", *flags, *files) as musterd:
        port = await _port(musterd)
        resource.prlimit(musterd.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        # As many as musterd has descriptors for, but for a few: a musterd that takes them all has none left.
        callers = DESCRIPTORS - _open_descriptors(musterd) - FEW
        async with _program(str(FLOOD), "127.0.0.1", port, str(callers)) as flood, asyncio.timeout(WAIT_S):
            assert flood.stdout
            got = json.loads(await flood.stdout.readline())
            assert got["answered"] >= NODE_DAEMON.connections
            assert DESCRIPTORS - _open_descriptors(musterd) > 1 + MAX_FDS
            assert await ask({"free": {"slurm_job_id": 7, "uid": os.getuid()}}) == ({}, [])
            assert await ask({"keep": {"gang_id": "g", "slurm_job_id": 7}}, *memory) == ({}, [])
            answer, back = await ask({"take": {"gang_id": "g"}})
            assert len(back) == len(memory), answer
            for fd in back:
                os.close(fd)
