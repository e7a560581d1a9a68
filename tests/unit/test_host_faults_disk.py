"""A disk that is full or read-only, really: a small tmpfs in a mount namespace of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from muster.daemon.testing.scripted_agent import ScriptedAgent
from muster.daemon.testing.scripted_world import spec
from muster.daemon.transport.identity import SecretCredentials

DEADLINE_S = 120.0
UNSHARE = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]

pytestmark = pytest.mark.skipif(
    subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, timeout=60).returncode != 0,
    reason="no mount namespace can be made here",
)


class SmallDisk:
    """A disk of 8 MiB that only one process, and what `run` starts, can see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "disk"
        self.folder.mkdir()
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, first: str, *argv: object) -> asyncio.subprocess.Process:
        """Mount the disk, run the shell command `first`, then start `argv` there."""
        script = f'mount -t tmpfs -o size=8m none {self.folder} && cd {self.folder} && {first}; exec "$@"'
        self._process = await asyncio.create_subprocess_exec(
            *UNSHARE,
            "sh",
            "-c",
            script,
            "sh",
            *map(str, argv),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return self._process

    async def close(self) -> None:
        """Kill the process and all that it has started. The disk is gone with them."""
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    @property
    def inside(self) -> Path:
        """The disk, as the process sees it."""
        assert self._process
        return Path(f"/proc/{self._process.pid}/root{self.folder}")

    def fill(self) -> None:
        """Write until nothing is left."""
        with (self.inside / "filler").open("wb", buffering=0) as filler:
            try:
                while filler.write(bytes(4096)):
                    pass
            except OSError:
                return

    def free(self) -> None:
        """Make room again."""
        (self.inside / "filler").unlink()


@pytest_asyncio.fixture
async def disk(tmp_path: Path) -> AsyncIterator[SmallDisk]:
    made = SmallDisk(tmp_path)
    yield made
    await made.close()


FILL = "cat /dev/zero > filler 2>/dev/null"


def coordinator(folder: Path, state: Path) -> list[object]:
    """The command line of a coordinator."""
    secret = f"secret:{folder / 'secret'}"
    command = [sys.executable, "-Im", "muster.daemon.coordinator", "--slurm", "fake", "--listen", "127.0.0.1:0"]
    return [*command, "--auth", secret, "--state-dir", state]


async def wait_for_line(process: asyncio.subprocess.Process, words: str) -> str:
    """Wait for a line on stderr that holds `words`. Returns all lines until then."""
    assert process.stderr
    said = ""
    async with asyncio.timeout(DEADLINE_S):
        async for line in process.stderr:
            said += line.decode()
            if words in line.decode():
                return said
    raise AssertionError(f"the process ended without a line with {words!r}: {said}")


@pytest.mark.parametrize("shared", [False, True])
async def test_a_coordinator_waits_for_a_full_disk_and_goes_on_when_there_is_room(
    tmp_path: Path, disk: SmallDisk, shared: bool
) -> None:
    SecretCredentials.create(tmp_path / "secret")
    flags = ["--shared-state"] if shared else []
    process = await disk.start(
        f"install -d -m 0700 state && {FILL}", *coordinator(tmp_path, disk.folder / "state"), *flags
    )
    said = await wait_for_line(process, "is full (No space left on device): free at least 4 MiB there")
    assert "the coordinator waits and does not act" in said
    disk.free()
    said = await wait_for_line(process, "listens on port")
    assert "can be written again" in said
    assert said.count("is full") == 0
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(DEADLINE_S):
        assert await process.wait() == 0


async def test_a_coordinator_waits_for_a_read_only_disk_and_a_waiting_one_can_be_stopped(
    tmp_path: Path, disk: SmallDisk
) -> None:
    SecretCredentials.create(tmp_path / "secret")
    read_only = f"mkdir state && mount -o remount,ro {disk.folder}"
    process = await disk.start(read_only, *coordinator(tmp_path, disk.folder / "state"))
    await wait_for_line(process, "state is read-only: mount it so that it can be written")
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(DEADLINE_S):
        assert await process.wait() == 0


async def test_a_coordinator_that_can_not_write_a_fact_ends_and_the_next_one_knows_all_that_was_committed(
    tmp_path: Path, disk: SmallDisk
) -> None:
    credentials = SecretCredentials.create(tmp_path / "secret")
    command = coordinator(tmp_path, disk.folder / "state")
    # The shell stays: it holds the disk while the coordinator ends and starts again, as systemd would start it.
    again = 'while :; do "$@"; echo "ended with $?" >&2; sleep 0.2; done'
    shell = await disk.start("mkdir state", "sh", "-c", again, "sh", *command)
    port = (await wait_for_line(shell, "listens on port")).rpartition("port ")[2].partition(",")[0]
    agents = [ScriptedAgent(name, spec(), credentials, job=7, batch_host=name == "a") for name in ("a", "b")]
    for agent in agents:
        await agent.open()
    streams = [asyncio.create_task(agents[0].attach(f"127.0.0.1:{port}"))]
    await wait_for_line(shell, "the agent on a joined")
    disk.fill()
    streams.append(asyncio.create_task(agents[1].attach(f"127.0.0.1:{port}")))
    await wait_for_line(shell, "muster-coordinator: not safe to go on: can't write the journal")
    await wait_for_line(shell, "ended with 74")
    await wait_for_line(shell, "the coordinator waits and does not act")
    assert agents[1].orders == []
    disk.free()
    # It knows the gang, and tells that the Slurm in its memory does not.
    await wait_for_line(shell, "g1: the gang is FAILED, exit code 1: Slurm ended job 7: GONE")
    for agent in agents:
        await agent.die()
    await asyncio.gather(*streams, return_exceptions=True)


LOGS_ON_A_FULL_DISK = """
import logging, os, sys
from pathlib import Path
from muster.daemon.agent import agent_log

run_dir = sys.argv[1]
agent_log.start("info", "text", run_dir, "g", "n1", "1")
log = logging.getLogger("muster.test")
def write(words, count):
    for number in range(count):
        log.info("%s %d %s", words, number, "x" * 200)
    for handler in logging.getLogger().handlers:
        while handler._queue.qsize():
            pass
write("before", 1)
with open("filler", "wb", buffering=0) as filler:
    try:
        while filler.write(bytes(4096)):
            pass
    except OSError:
        pass
write("during", 500)
os.unlink("filler")
write("after", 3)
agent_log.stop()
print(agent_log.path(run_dir, "g", "n1").read_text().count("after"))
"""


async def test_an_agent_whose_log_can_not_be_written_says_so_once_and_logs_again_when_there_is_room(
    disk: SmallDisk,
) -> None:
    process = await disk.start("mkdir run", sys.executable, "-Ic", LOGS_ON_A_FULL_DISK, disk.folder / "run")
    async with asyncio.timeout(DEADLINE_S):
        printed, said = await process.communicate()
    own = [line for line in said.decode().splitlines() if "muster.test:" not in line]
    assert len(own) == 2, own
    assert "can't write the log" in own[0]
    assert "No space left on device. Lines are lost" in own[0]
    assert "can be written again" in own[1]
    assert printed.strip() == b"3"
