"""The command muster-coordinator, as a process of its own.

Which error ends it is also shown without a process, which would import all of the coordinator.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
import sys
from pathlib import Path

import pytest

from muster.daemon.coordinator.__main__ import _parser, _run
from muster.daemon.coordinator.journal.journal import JournalError
from muster.daemon.coordinator.leadership.lease import LeaseError
from muster.daemon.coordinator.policy.policy import PolicyError
from muster.daemon.coordinator.slurm.local_slurm import LocalSlurm
from muster.daemon.host import private_file
from muster.daemon.testing.scripted_agent import ScriptedAgent
from muster.daemon.testing.scripted_world import DEADLINE_S, spec
from muster.daemon.transport.authority import Authority, bytes_of_public_key, make_key, pem_of_key
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.transport.site_config import SiteError
from muster.daemon.transport.tls import TlsError
from muster.slurm.client.states import JobState


async def _start(*flags: object, **environment: object) -> asyncio.subprocess.Process:
    """Start the command. `flags` override the flags that all tests share."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-Im", "muster.daemon.coordinator", "--slurm", "fake", *map(str, flags),
        env={"PATH": os.environ["PATH"], **{key: str(value) for key, value in environment.items()}},
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def _check_error(kind: type[Exception], words: str, *flags: object) -> None:
    """The command with `flags` ends with this error."""
    with pytest.raises(kind, match=re.escape(words)):
        async with asyncio.timeout(DEADLINE_S):
            await _run(_parser().parse_args(["--slurm", "fake", *map(str, flags)]))


def _shared_flags(folder: Path) -> tuple[object, ...]:
    """Create a shared state folder. Returns the flags of a coordinator with a standby."""
    SecretCredentials.create(folder / "secret")
    (folder / "state").mkdir(mode=0o700)
    given = ("--listen", "127.0.0.1:0", "--auth", f"secret:{folder / 'secret'}", "--state-dir", folder / "state")
    return (*given, "--shared-state")


async def _wait_for_line(process: asyncio.subprocess.Process, words: str) -> str:
    """Wait for a line on stderr that holds `words`. Returns the rest of that line."""
    assert process.stderr
    async with asyncio.timeout(DEADLINE_S):
        async for line in process.stderr:
            if words in line.decode():
                return line.decode().partition(words)[2].strip()
    raise AssertionError(f"the process ended without a line with {words!r}")


async def test_a_local_gang_runs_and_sigterm_ends_the_coordinator(tmp_path: Path) -> None:
    credentials = SecretCredentials.create(tmp_path / "secret")
    process = await _start(
        "--listen", "127.0.0.1:0", "--auth", f"secret:{tmp_path / 'secret'}", "--state-dir", tmp_path / "state"
    )  # fmt: skip
    port = (await _wait_for_line(process, "listens on port")).partition(",")[0]
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


async def test_a_wrong_setting_is_an_error_in_one_line(tmp_path: Path) -> None:
    flags = ("--listen", "127.0.0.1:0", "--auth", "secret:/nonexistent", "--state-dir", tmp_path / "state")
    await _check_error_exit(78, "muster-coordinator: the secret file can't be read", *flags)


@pytest.mark.parametrize(
    ("flags", "kind", "words"),
    [
        (["--state-dir", "/proc/muster"], JournalError, "can't open the journal /proc/muster/journal.db"),
        (["--policy", "/nonexistent.toml"], PolicyError, "/nonexistent.toml"),
    ],
)
async def test_a_wrong_setting_is_an_error(tmp_path: Path, flags: list[str], kind: type[Exception], words: str) -> None:
    SecretCredentials.create(tmp_path / "secret")
    given = ["--listen", "127.0.0.1:0", "--auth", f"secret:{tmp_path / 'secret'}", "--state-dir", tmp_path / "state"]
    await _check_error(kind, words, *given, *flags)


async def test_a_damaged_issuing_authority_is_an_error(tmp_path: Path) -> None:
    SecretCredentials.create(tmp_path / "secret")
    issuing, key = Authority.create("site"), make_key()
    (tmp_path / "c.pem").write_bytes(issuing.issue(bytes_of_public_key(key), ["mgmt1"]))
    private_file.create(tmp_path / "c.key", pem_of_key(key).decode())
    config = tmp_path / "muster.toml"
    config.write_text(
        f'coordinator = "mgmt1:7070"\ntls_certificate = "{tmp_path}/c.pem"\ntls_key = "{tmp_path}/c.key"\n'
    )
    (tmp_path / "state").mkdir()
    damaged = tmp_path / "state" / "issuing-authority.pem"
    damaged.write_text("half a file")
    flags = ("--auth", f"secret:{tmp_path / 'secret'}", "--config", config, "--state-dir", tmp_path / "state")
    await _check_error(TlsError, f"{damaged} holds no certificate (PEM)", "--listen", "127.0.0.1:0", *flags)


async def test_on_a_full_disk_the_coordinator_ends_with_the_reason(tmp_path: Path) -> None:
    credentials = SecretCredentials.create(tmp_path / "secret")
    flags = ["--listen", "127.0.0.1:0", "--auth", f"secret:{tmp_path / 'secret'}", "--state-dir", tmp_path / "state"]
    process = await _start(*flags)
    port = (await _wait_for_line(process, "listens on port")).partition(",")[0]
    # Python ignores SIGXFSZ: a write beyond the limit fails as on a full disk.
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
    agent = ScriptedAgent("a", spec(), credentials, job=7, batch_host=True)
    await agent.open()
    attached = asyncio.create_task(agent.attach(f"127.0.0.1:{port}"))
    await _wait_for_line(process, "muster-coordinator: not safe to go on: can't write the journal")
    async with asyncio.timeout(DEADLINE_S):
        assert await process.wait() == 74
    await asyncio.gather(attached, return_exceptions=True)
    assert agent.orders == []
    await agent.die()


async def test_a_standby_takes_over_and_sigterm_ends_a_standby(tmp_path: Path) -> None:
    flags = _shared_flags(tmp_path)
    first = await _start(*flags)
    assert (await _wait_for_line(first, "listens on port")).endswith("term 1")
    second = await _start(*flags)
    assert await _wait_for_line(second, "standing by:") == f"{socket.gethostname()} (term 1) holds the lease"
    third = await _start(*flags)
    await _wait_for_line(third, "standing by:")
    third.send_signal(signal.SIGTERM)
    async with asyncio.timeout(DEADLINE_S):
        assert await third.wait() == 0
    first.kill()
    assert (await _wait_for_line(second, "listens on port")).endswith("term 2")
    second.send_signal(signal.SIGTERM)
    async with asyncio.timeout(DEADLINE_S):
        assert await second.wait() == 0
    await first.wait()


async def test_a_leader_that_lost_the_lease_ends_at_once(tmp_path: Path) -> None:
    flags = _shared_flags(tmp_path)
    process = await _start(*flags)
    await _wait_for_line(process, "listens on port")
    (tmp_path / "state" / "lease").write_text("2 0 another")
    await _wait_for_line(process, "not safe to go on: another coordinator has the lease under term 2")
    async with asyncio.timeout(DEADLINE_S):
        assert await process.wait() == 75


async def _check_error_exit(status: int, words: str, *flags: object, **environment: object) -> None:
    process = await _start(*flags, **environment)
    await _wait_for_line(process, words)
    async with asyncio.timeout(DEADLINE_S):
        assert await process.wait() == status


async def test_a_shared_folder_needs_the_flag_and_a_local_one_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = _shared_flags(tmp_path)
    with monkeypatch.context() as systemd:
        systemd.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
        await _check_error(SiteError, "is this machine's own: give --state-dir", *flags)
    (tmp_path / "state" / "lease").touch()
    words = f"{tmp_path / 'state'} is shared with a coordinator on another machine, which may be acting: give --shared"
    await _check_error(SiteError, words, *flags[:-1])


async def test_a_missing_shared_folder_is_not_created(tmp_path: Path) -> None:
    flags, missing = _shared_flags(tmp_path), tmp_path / "not mounted" / "muster"
    words = f"{missing}: No such file or directory. Is the share mounted?"
    await _check_error(LeaseError, words, *flags, "--state-dir", missing)
    assert not missing.parent.exists()


async def test_a_standby_checks_at_its_start_what_a_takeover_needs(tmp_path: Path) -> None:
    flags = _shared_flags(tmp_path)
    first = await _start(*flags)
    await _wait_for_line(first, "listens on port")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        await _check_error_exit(69, f"can't listen on {address}", *flags, "--listen", address)
    first.kill()
    await first.wait()


async def test_a_port_in_use_is_an_error(tmp_path: Path) -> None:
    SecretCredentials.create(tmp_path / "secret")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = await _start(
            "--listen", address, "--auth", f"secret:{tmp_path / 'secret'}", "--state-dir", tmp_path / "state"
        )  # fmt: skip
        await _wait_for_line(process, f"muster-coordinator: can't listen on {address}")
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 78


def _old_setpriv(folder: Path) -> str:
    """A PATH with the setpriv of util-linux 2.32 (RHEL 8)."""
    (folder / "bin").mkdir()
    old = folder / "bin" / "setpriv"
    old.write_text("#!/bin/sh\necho \"setpriv: unrecognized option '--pdeathsig'\" >&2\nexit 1\n")
    old.chmod(0o755)
    return f"{folder / 'bin'}:{os.environ['PATH']}"


async def test_a_standby_needs_slurm_calls_that_end_with_the_process(tmp_path: Path) -> None:
    flags, path = (*_shared_flags(tmp_path), "--slurm", "cli"), _old_setpriv(tmp_path)
    await _check_error_exit(
        78, "calls to Slurm must not outlive this process, which needs setpriv with", *flags, PATH=path
    )
    unshared = await _start(*(flag for flag in flags if flag != "--shared-state"), PATH=path)
    await _wait_for_line(unshared, "calls to Slurm may outlive this process")
    await _wait_for_line(unshared, "listens on port")
    unshared.kill()
    await unshared.wait()


async def test_a_local_job_has_all_its_nodes_before_their_agents_come() -> None:
    """Else an agent that comes seconds after the others would look like one of a node that the job has lost."""
    slurm = LocalSlurm(("a", "b", "c"))
    slurm.add_node(7, "b", 1000)
    found = slurm.cluster.jobs()[7]
    assert (found.nodes, found.batch_host) == (("a", "b", "c"), "a")
    await slurm.remove_node(7, "b")
    slurm.add_node(7, "c", 1000)
    assert slurm.cluster.jobs()[7].nodes == ("a", "c")


async def test_a_local_cluster_is_made_of_the_agents_that_attach() -> None:
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
