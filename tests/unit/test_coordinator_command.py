"""The command muster-coordinator: a process of its own, as `muster run --local` starts it."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import pytest

from muster.daemon.coordinator.slurm.local_slurm import LocalSlurm
from muster.daemon.coordinator.testing.scripted_agent import ScriptedAgent
from muster.daemon.coordinator.testing.scripted_world import DEADLINE_S, spec
from muster.daemon.transport.identity import SecretCredentials
from muster.slurm.client.states import JobState


async def _start(*flags: object, **environment: object) -> asyncio.subprocess.Process:
    """`flags` win over those of all tests."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-Im", "muster.daemon.coordinator", "--slurm", "fake", *map(str, flags),
        env={"PATH": os.environ["PATH"], **{key: str(value) for key, value in environment.items()}},
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


def _shared(folder: Path, mode: int = 0o700) -> tuple[object, ...]:
    """Flags of a coordinator with a standby, whose state folder is made."""
    SecretCredentials.create(folder / "secret")
    (folder / "state").mkdir()
    (folder / "state").chmod(mode)
    given = ("--listen", "127.0.0.1:0", "--auth", f"secret:{folder / 'secret'}", "--state-dir", folder / "state")
    return (*given, "--shared-state")


async def _said(process: asyncio.subprocess.Process, words: str) -> str:
    """The rest of the first line on stderr that holds `words`."""
    assert process.stderr
    async with asyncio.timeout(DEADLINE_S):
        async for line in process.stderr:
            if words in line.decode():
                return line.decode().partition(words)[2].strip()
    raise AssertionError(f"ended without saying {words!r}")


async def test_a_local_gang_runs_and_the_coordinator_leaves_at_sigterm(tmp_path: Path) -> None:
    credentials = SecretCredentials.create(tmp_path / "secret")
    process = await _start(
        "--listen", "127.0.0.1:0", "--auth", f"secret:{tmp_path / 'secret'}", "--state-dir", tmp_path / "state"
    )  # fmt: skip
    port = (await _said(process, "listens on port")).partition(",")[0]
    agents = [ScriptedAgent(n, spec(), credentials, job=7, batch_host=n == "a") for n in ("a", "b", "c")]
    for agent in agents:
        await agent.open()
    tasks = [asyncio.create_task(agent.attach(f"127.0.0.1:{port}")) for agent in agents]
    async with asyncio.timeout(DEADLINE_S):
        await agents[0].wait_until(lambda: agents[0].duty == "RUN 1")
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(DEADLINE_S):
        assert await process.wait() == 0
    await asyncio.gather(*tasks, return_exceptions=True)
    for agent in agents:
        await agent.die()


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--auth", "secret:/nonexistent"], 78, "the secret file can't be read"),
        (["--state-dir", "/proc/muster"], 74, "not safe to go on: can't open the journal /proc/muster/journal.db"),
        (["--policy", "/nonexistent.toml"], 78, "/nonexistent.toml"),
    ],
)
async def test_what_can_not_be_is_said_in_one_line(tmp_path: Path, flags: list[str], status: int, words: str) -> None:
    SecretCredentials.create(tmp_path / "secret")
    given = ["--listen", "127.0.0.1:0", "--auth", f"secret:{tmp_path / 'secret'}", "--state-dir", tmp_path / "state"]
    process = await _start(*given, *flags)
    await _said(process, words)
    async with asyncio.timeout(DEADLINE_S):
        assert await process.wait() == status


async def test_on_a_full_disk_it_ends_with_the_reason(tmp_path: Path) -> None:
    credentials = SecretCredentials.create(tmp_path / "secret")
    flags = ["--listen", "127.0.0.1:0", "--auth", f"secret:{tmp_path / 'secret'}", "--state-dir", tmp_path / "state"]
    process = await _start(*flags)
    port = (await _said(process, "listens on port")).partition(",")[0]
    # Python ignores SIGXFSZ: a write beyond the limit fails, as on a full disk.
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
    agent = ScriptedAgent("a", spec(), credentials, job=7, batch_host=True)
    await agent.open()
    attached = asyncio.create_task(agent.attach(f"127.0.0.1:{port}"))
    await _said(process, "muster-coordinator: not safe to go on: can't write the journal")
    async with asyncio.timeout(DEADLINE_S):
        assert await process.wait() == 74
    await asyncio.gather(attached, return_exceptions=True)
    assert agent.orders == []
    await agent.die()


async def test_a_standby_takes_over_and_leaves_when_told(tmp_path: Path) -> None:
    flags = _shared(tmp_path)
    first = await _start(*flags)
    assert (await _said(first, "listens on port")).endswith("term 1")
    second = await _start(*flags)
    assert await _said(second, "standing by:") == f"{socket.gethostname()} (term 1) holds the lease"
    third = await _start(*flags)
    await _said(third, "standing by:")
    third.send_signal(signal.SIGTERM)
    async with asyncio.timeout(DEADLINE_S):
        assert await third.wait() == 0
    first.kill()
    assert (await _said(second, "listens on port")).endswith("term 2")
    second.send_signal(signal.SIGTERM)
    async with asyncio.timeout(DEADLINE_S):
        assert await second.wait() == 0
    await first.wait()


async def test_who_finds_the_lease_taken_stops_at_once(tmp_path: Path) -> None:
    flags = _shared(tmp_path)
    process = await _start(*flags)
    await _said(process, "listens on port")
    (tmp_path / "state" / "lease").write_text("2 0 another")
    await _said(process, "not safe to go on: another coordinator has the lease under term 2")
    async with asyncio.timeout(DEADLINE_S):
        assert await process.wait() == 75


async def _refused(status: int, words: str, *flags: object, **environment: object) -> None:
    process = await _start(*flags, **environment)
    await _said(process, words)
    async with asyncio.timeout(DEADLINE_S):
        assert await process.wait() == status


async def test_a_shared_folder_is_used_by_nobody_alone(tmp_path: Path) -> None:
    """One of the two machines lacks the flag."""
    flags = _shared(tmp_path)
    for left in ("lease", "journal-00000003.db"):
        (tmp_path / "state" / left).touch()
        words = (
            f"{tmp_path / 'state'} is shared with a coordinator on another machine, which may be acting: give --shared"
        )
        await _refused(78, words, *flags[:-1])
        (tmp_path / "state" / left).unlink()


async def test_a_folder_of_one_machine_is_not_shared(tmp_path: Path) -> None:
    flags = _shared(tmp_path)
    words = "is this machine's own: give --state-dir"
    await _refused(78, words, *flags, STATE_DIRECTORY=f"/nowhere:{tmp_path}/./state")
    await _refused(78, f"/var/lib/muster {words}", *flags[:4], "--shared-state")


async def test_a_shared_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    flags, missing = _shared(tmp_path), tmp_path / "not mounted" / "muster"
    await _refused(74, f"{missing}: No such file or directory. Is the share mounted?", *flags, "--state-dir", missing)
    assert not missing.parent.exists()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
async def test_a_shared_folder_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    words = f"may be written by others (mode {mode:04o}), who could take the lease: chmod 0700 {tmp_path / 'state'}"
    await _refused(78, words, *_shared(tmp_path, mode))


async def test_a_standby_that_could_not_take_over_says_so_at_once(tmp_path: Path) -> None:
    flags = _shared(tmp_path)
    first = await _start(*flags)
    await _said(first, "listens on port")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        await _refused(69, f"can't listen on {address}", *flags, "--listen", address)
    await _refused(74, "can't write in /proc: ", *flags, "--state-dir", "/proc")
    assert sorted(path.name for path in (tmp_path / "state").glob("standby-*")) == []
    first.kill()
    await first.wait()


async def test_a_taken_port_is_said(tmp_path: Path) -> None:
    SecretCredentials.create(tmp_path / "secret")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = await _start(
            "--listen", address, "--auth", f"secret:{tmp_path / 'secret'}", "--state-dir", tmp_path / "state"
        )  # fmt: skip
        await _said(process, f"muster-coordinator: can't listen on {address}")
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 78


def _old_setpriv(folder: Path) -> str:
    """PATH on which setpriv is that of util-linux 2.32 (RHEL 8)."""
    (folder / "bin").mkdir()
    old = folder / "bin" / "setpriv"
    old.write_text("#!/bin/sh\necho \"setpriv: unrecognized option '--pdeathsig'\" >&2\nexit 1\n")
    old.chmod(0o755)
    return f"{folder / 'bin'}:{os.environ['PATH']}"


async def test_no_standby_where_calls_could_outlive_it(tmp_path: Path) -> None:
    flags, path = (*_shared(tmp_path), "--slurm", "cli"), _old_setpriv(tmp_path)
    await _refused(78, "calls to Slurm must not outlive this process, which needs setpriv with", *flags, PATH=path)
    alone = await _start(*(flag for flag in flags if flag != "--shared-state"), PATH=path)
    await _said(alone, "calls to Slurm may outlive this process")
    await _said(alone, "listens on port")
    alone.kill()
    await alone.wait()


async def test_a_cluster_made_of_whoever_attaches() -> None:
    slurm = LocalSlurm()
    for node in ("a", "b", "c", "b"):
        slurm.add_node(7, node, 1000)
    found = slurm.cluster.jobs()[7]
    assert (found.user_id, found.nodes, found.batch_host, found.state) == (1000, ("a", "b", "c"), "a", JobState.RUNNING)
    await slurm.remove_node(7, "b")
    slurm.add_node(7, "b", 1000)
    assert slurm.cluster.jobs()[7].nodes == ("a", "c")
    await slurm.complete_job(7, 3)
    slurm.add_node(7, "d", 1000)
    assert slurm.cluster.jobs()[7].state is JobState.FAILED
