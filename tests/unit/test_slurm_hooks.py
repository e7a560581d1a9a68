"""muster-healthcheck and muster-epilog: their exit status, what they print, and what they wait for."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from muster.daemon.host.kept_memory_client import SOCKET, send_request
from muster.daemon.node.kept_memory.kept_memory_store import KeptMemoryStore
from muster.daemon.node.kept_memory.memory_service import MemoryService
from muster.daemon.node.kept_memory.retention import JobOwner
from muster.daemon.node.kept_memory.systemd_fd_store import FdStore
from muster.daemon.node.own_verdict import Verdict
from muster.daemon.transport.site_config import CONFIG, Site
from muster.slurm.hooks import epilog, healthcheck
from muster.slurm.hooks.node_verdict import Hook

HOOKS: list[Callable[[Hook], int]] = [healthcheck.check, lambda hook: epilog.run(hook, 7)]
EACH_HOOK = pytest.mark.parametrize("run", HOOKS, ids=["healthcheck", "epilog"])


class Musterd:
    """A musterd's socket, with the verdict as the test wants it."""

    def __init__(self, path: Path, root: bool = True) -> None:
        self.path, self.verdict = path, Verdict()
        self.store = KeptMemoryStore(FdStore(""))
        uids = [os.getuid()] if root else []
        self.service = MemoryService(path, self.store, root=uids, verdict=lambda: self.verdict.message())


@asynccontextmanager
async def _serving(musterd: Musterd) -> AsyncIterator[Musterd]:
    running = asyncio.create_task(musterd.service.run())
    try:
        while not musterd.path.exists():  # noqa: ASYNC110 - a file tells nobody
            await asyncio.sleep(0)
        yield musterd
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        musterd.path.unlink()


@pytest.fixture
async def musterd(tmp_path: Path) -> AsyncIterator[Musterd]:
    async with _serving(Musterd(tmp_path / "memory.sock")) as found:
        yield found


@pytest.fixture
def hook(tmp_path: Path) -> Hook:
    return Hook(str(tmp_path / "memory.sock"), str(tmp_path / "muster.toml"))


def _chooses(hook: Hook, text: str) -> None:
    Path(hook.config).write_text(text)


@EACH_HOOK
async def test_a_fit_node_passes_in_silence(
    musterd: Musterd, hook: Hook, run: Callable[[Hook], int], capsys: pytest.CaptureFixture[str]
) -> None:
    musterd.verdict = Verdict("DEGRADED", "a row remap is pending")
    assert await asyncio.to_thread(run, hook) == 0
    assert capsys.readouterr() == ("", "")


@EACH_HOOK
async def test_an_unfit_node_fails_with_its_reason(
    musterd: Musterd, hook: Hook, run: Callable[[Hook], int], capsys: pytest.CaptureFixture[str]
) -> None:
    musterd.verdict = Verdict("UNFIT", "xid 79", own_word=True)
    assert await asyncio.to_thread(run, hook) == 1
    assert capsys.readouterr().err.endswith(": UNFIT: xid 79\n")


async def test_a_node_that_the_coordinator_has_judged_is_the_coordinators_to_drain(
    musterd: Musterd, hook: Hook, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator may have resumed it a moment ago."""
    musterd.verdict = Verdict("UNFIT", "Xid 79: GPU has fallen off the bus")
    words = "UNFIT: Xid 79: GPU has fallen off the bus\n"
    assert await asyncio.to_thread(epilog.run, hook, 7) == 0
    assert capsys.readouterr().err == f"muster-epilog: {words}"
    assert await asyncio.to_thread(healthcheck.check, hook) == 1
    assert capsys.readouterr().err == f"muster-healthcheck: {words}"


def _nothing(path: str) -> None:
    pass


def _dead_socket(path: str) -> None:
    """As a musterd that has ended leaves it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.bind(path)


@EACH_HOOK
@pytest.mark.parametrize("leave", [_nothing, _dead_socket])
@pytest.mark.parametrize(
    ("choice", "status"),
    [
        ("", 0),
        ('hooks_without_musterd = "pass"', 0),
        ('hooks_without_musterd = "fail"', 1),
        ("hooks_without_musterd = 1", 0),
        ('hooks_without_musterd = "fail', 0),
    ],
    ids=["none", "pass", "fail", "no-such-choice", "not-toml"],
)
def test_without_musterd_the_sites_choice_counts(
    hook: Hook,
    run: Callable[[Hook], int],
    leave: Callable[[str], None],
    choice: str,
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    leave(hook.socket)
    _chooses(hook, choice)
    assert run(hook) == status
    assert "musterd does not answer at" in capsys.readouterr().err


@EACH_HOOK
async def test_a_musterd_of_an_earlier_release_gives_no_verdict(
    hook: Hook, run: Callable[[Hook], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(hook.socket)
        listening.listen()
        ran = asyncio.create_task(asyncio.to_thread(run, hook))
        called, _ = await asyncio.to_thread(listening.accept)
        with called:
            called.send(b'{"refused": "not a MemoryRequest: no field named \'ask_verdict\'"}')
            assert await ran == 0
    assert "musterd gives no verdict: {'refused': 'not a MemoryRequest" in capsys.readouterr().err.replace('"', "'")


@pytest.mark.parametrize("answer", [b"garbage", b"[]", b'"x"', b"\xff", b'{"verdict": 7}', b"null"])
async def test_an_answer_that_is_none_is_as_if_musterd_were_down(hook: Hook, answer: bytes) -> None:
    _chooses(hook, 'hooks_without_musterd = "fail"')
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(hook.socket)
        listening.listen()
        ran = asyncio.create_task(asyncio.to_thread(healthcheck.check, hook))
        called, _ = await asyncio.to_thread(listening.accept)
        with called:
            called.send(answer)
            assert await ran == 1


def test_the_settings_of_the_hooks_are_those_of_muster_toml(hook: Hook) -> None:
    site = Site()
    assert (site.hooks_without_musterd, site.epilog_wait_s) == ("pass", epilog.wait_s(hook))
    assert (SOCKET, str(CONFIG)) == Hook()


@pytest.mark.parametrize(("text", "seconds"), [("2.5", 2.5), ("3", 3), ("-1", 0), ("1e9", 600), ('"x"', 0), ("nan", 0)])
def test_an_epilog_waits_within_bounds(hook: Hook, text: str, seconds: float) -> None:
    _chooses(hook, f"epilog_wait_s = {text}")
    assert epilog.wait_s(hook) == seconds


# -- memory of the job that has ended --


def _memfd() -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


async def _keep(musterd: Musterd, job: int) -> None:
    """Leave memory for the next run of the job."""
    musterd.store.job_starts(JobOwner(job, os.getuid()))
    fds = [_memfd(), _memfd()]
    answer, _ = await asyncio.to_thread(
        send_request, str(musterd.path), {"keep": {"gang_id": "g", "slurm_job_id": job}}, fds
    )
    for fd in fds:
        os.close(fd)
    assert not answer.get("refused")


class Waiting:
    """A clock that goes on with each pause. `then` happens after so many pauses."""

    def __init__(self, pauses: int = 10**6, then: Callable[[], None] = lambda: None) -> None:
        self.now, self._left, self._then = 0.0, pauses, then

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self._left -= 1
        if not self._left:
            self._then()


async def _waited_s(musterd: Musterd, hook: Hook, choice: str, job: int = 7, waiting: Waiting | None = None) -> float:
    """Seconds for which the Epilog of a job waits while memory of job 7 is kept."""
    _chooses(hook, choice)
    await _keep(musterd, 7)
    clock = waiting or Waiting()
    assert await asyncio.to_thread(epilog.run, hook, job, lambda: clock.now, clock.pause) == 0
    return clock.now


async def test_an_epilog_waits_for_nothing_by_default(musterd: Musterd, hook: Hook) -> None:
    assert await _waited_s(musterd, hook, "") == 0


async def test_an_epilog_waits_until_the_memory_is_needed_no_more(musterd: Musterd, hook: Hook) -> None:
    waiting = Waiting(3, lambda: musterd.store.mark_obsolete("g", 0))
    assert await _waited_s(musterd, hook, "epilog_wait_s = 60", waiting=waiting) == 0.75


async def test_an_epilog_gives_up_at_the_sites_limit(musterd: Musterd, hook: Hook) -> None:
    assert await _waited_s(musterd, hook, "epilog_wait_s = 5") == 5


async def test_the_memory_of_another_job_is_not_waited_for(musterd: Musterd, hook: Hook) -> None:
    assert await _waited_s(musterd, hook, "epilog_wait_s = 60", job=8) == 0


async def test_a_musterd_that_goes_down_is_not_waited_for(musterd: Musterd, hook: Hook) -> None:
    gone = musterd.path.with_suffix(".gone")
    waiting = Waiting(2, lambda: musterd.path.rename(gone))
    assert await _waited_s(musterd, hook, "epilog_wait_s = 60", waiting=waiting) == 0.5
    gone.rename(musterd.path)


async def test_only_root_learns_whose_memory_is_kept(tmp_path: Path) -> None:
    async with _serving(Musterd(tmp_path / "other.sock", root=False)) as musterd:
        await _keep(musterd, 7)
        answer, _ = await asyncio.to_thread(send_request, str(musterd.path), {"ask_verdict": {"slurm_job_id": 7}})
    assert answer == {"verdict": {"fit": True, "verdict": "FIT"}}


# -- the programs --


def test_the_environment_may_name_the_settings(hook: Hook) -> None:
    assert Hook.of({}) == Hook()
    assert Hook.of({"MUSTER_CONFIG": hook.config}).config == hook.config


@pytest.mark.parametrize("name", ["healthcheck", "epilog"])
def test_the_hooks_are_quick_to_start(name: str) -> None:
    show = f"import sys, muster.slurm.hooks.{name}; print(*(n for n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, timeout=60, check=True)
    heavy = {
        "grpc",
        "google",
        "pydantic",
        "asyncio",
        "rich",
        "xxhash",
        "subprocess",
        "tomllib",
        "pathlib",
        "dataclasses",
    }
    assert not heavy & {module.partition(".")[0] for module in done.stdout.split()}
