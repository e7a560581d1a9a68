"""musterd keeps memfds for the next run of a job: its bookkeeping, its socket, systemd's store, and Slurm's prolog."""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from muster.daemon.host import clock, packets
from muster.daemon.host.kept_memory_client import MAX_FDS, open_request, send_request
from muster.daemon.node.kept_memory import systemd_fd_store
from muster.daemon.node.kept_memory.kept_memory_store import KeptMemoryStore
from muster.daemon.node.kept_memory.memory_service import MAX_CALLS_PER_USER, MemoryService
from muster.daemon.node.kept_memory.retention import RETENTION_S, JobOwner, KeptEntry, Retention
from muster.daemon.node.kept_memory.systemd_fd_store import FdStore
from muster.daemon.transport.identity import SecretCredentials
from muster.slurm.hooks import prolog
from muster.v1.memory_pb2 import KeepMemory

PAGE = 1 << 16
MEMFD_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


OWNER = JobOwner(7, 1000)


def kept(gang: str = "g", owner: JobOwner = OWNER, until: float = RETENTION_S, generation: int = 3) -> KeptEntry[str]:
    return KeptEntry(owner, gang, until, f"memory of {gang}", generation)


# --- whose memory, for how long --------------------------------------------------------------------------------------


def test_what_is_kept_is_given_back_to_its_user_once() -> None:
    one: Retention[str] = Retention()
    assert one.keep(kept()) is None
    assert one.hand_out(1001, "g") is None
    assert one.hand_out(1000, "other") is None
    assert one.hand_out(1000, "g") == kept()
    assert one.hand_out(1000, "g") is None


def test_only_the_job_that_a_prolog_has_named_is_kept_of_and_only_its_user_says_so() -> None:
    one: Retention[str] = Retention()
    assert "slurm.conf needs Prolog=" in one.refusal(OWNER)
    one.job_starts(OWNER)
    assert one.refusal(OWNER) == ""
    assert "another user's" in one.refusal(JobOwner(7, 1001))
    assert "job 7 has started on this node since" in one.refusal(JobOwner(6, 1000))


@pytest.mark.parametrize("other", [JobOwner(8, 1000), JobOwner(6, 1000), JobOwner(7, 1001)])
def test_another_job_that_starts_makes_it_go(other: JobOwner) -> None:
    one: Retention[str] = Retention()
    one.keep(kept())
    assert one.job_starts(OWNER) is None, "the requeued job itself"
    assert one.job_starts(other) == kept()
    assert one.kept is None


def test_what_its_gang_wants_no_more_goes() -> None:
    one: Retention[str] = Retention()
    one.keep(kept())
    assert one.remove_obsolete("other", 9) is one.remove_obsolete("g", 2) is None  # of an earlier run's end
    assert one.remove_obsolete("g", 3) == kept()
    assert one.kept is None


def test_nothing_is_kept_for_longer_than_it_may_be() -> None:
    one: Retention[str] = Retention()
    one.keep(kept(until=600.0))
    assert one.remove_expired(599.9) is None
    assert one.remove_expired(600.0) == kept(until=600.0)
    assert one.kept is None


def test_what_is_left_anew_takes_the_place_of_what_was_left() -> None:
    one: Retention[str] = Retention()
    one.keep(kept())
    assert one.keep(kept(generation=4)) == kept()
    assert one.hand_out(1000, "g") == kept(generation=4)


# --- the socket ------------------------------------------------------------------------------------------------------


def memfd(fill: bytes = b"x", seals: int = MEMFD_SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, fill * PAGE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def inodes(fds: list[int]) -> list[int]:
    found = [os.fstat(fd).st_ino for fd in fds]
    for fd in fds:
        os.close(fd)
    return found


def stands(fd: int) -> bool:
    """Whether the memory behind a descriptor has any pages left."""
    return os.fstat(fd).st_blocks > 0


def held(fd: int) -> int:
    """How many other descriptors of this process, musterd's among them, the same memory has."""
    found = 0
    for other in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found += os.stat(f"/proc/self/fd/{other}").st_ino == os.fstat(fd).st_ino
    return found - 1


class Node:
    """A musterd's memory, and agents that call it; `root`: whether these may speak as a prolog."""

    def __init__(self, path: Path, store: FdStore, root: bool = True) -> None:
        self.path, self.now = path, 1000.0
        self.depot = KeptMemoryStore(store, freed_s=60.0)
        self.service = MemoryService(path, self.depot, lambda: self.now, [os.getuid()] if root else [])

    async def ask(self, request: packets.Message, *fds: int) -> tuple[packets.Message, list[int]]:
        return await asyncio.to_thread(send_request, str(self.path), request, fds)

    async def leave(self, *fds: int, gang: str = "g", job: int = 7) -> str:
        answer, back = await self.ask({"keep": {"gang_id": gang, "slurm_job_id": job}}, *fds)
        assert back == []
        return str(answer.get("refused", ""))

    async def take(self, gang: str = "g") -> list[int]:
        """The inodes of what comes back, for good."""
        line, _, fds = await asyncio.to_thread(open_request, str(self.path), {"take": {"gang_id": gang}})
        await self.end(line, b'{"taken": {}}' if fds else b"")
        return inodes(fds)

    async def end(self, line: socket.socket, word: bytes = b"") -> None:
        """End a call, and wait until musterd has ended it, too."""
        with line:
            line.settimeout(60.0)
            if word:
                line.send(word)
            line.shutdown(socket.SHUT_WR)
            assert await asyncio.to_thread(line.recv, 1) == b""

    async def job_starts(self, job: int) -> int:
        answer, _ = await self.ask({"free": {"slurm_job_id": job, "uid": os.getuid()}})
        return int(answer.get("freed", 0))

    def tidy(self) -> None:
        self.depot.release_expired(self.now)


@asynccontextmanager
async def serving(
    path: Path, store: FdStore, stored: dict[str, int] | None = None, *, root: bool = True
) -> AsyncIterator[Node]:
    node = Node(path, store, root)
    node.depot.recover(stored or {}, node.service.prolog_job())
    running = asyncio.create_task(node.service.run())
    try:
        while not path.exists():  # noqa: ASYNC110 - a file tells nobody
            await asyncio.sleep(0)
        yield node
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        path.unlink()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with serving(tmp_path / "memory.sock", FdStore("")) as found:
        await found.job_starts(7)
        yield found


@pytest.fixture
def pair() -> Iterator[tuple[int, int]]:
    """A description and a shard."""
    fds = memfd(), memfd()
    yield fds
    for fd in fds:
        os.close(fd)


async def test_the_very_memory_that_was_left_comes_back_once(node: Node, pair: tuple[int, int]) -> None:
    expected = [os.fstat(fd).st_ino for fd in pair]
    assert await node.leave(*pair) == ""
    assert await node.take("another") == []
    assert await node.take() == expected
    assert await node.take() == []
    assert await node.job_starts(8) == 0
    assert all(map(stands, pair)), "what was taken back is its owner's"


async def test_memory_is_gone_when_another_jobs_prolog_hears_back(node: Node, pair: tuple[int, int]) -> None:
    assert await node.leave(*pair, job=7) == ""
    assert await node.job_starts(7) == 0, "the requeued job itself"
    assert all(map(stands, pair))
    assert await node.job_starts(8) == 1
    assert not any(map(stands, pair)), "whoever else still holds a descriptor"
    assert await node.take() == []


async def test_memory_goes_after_ten_minutes(node: Node, pair: tuple[int, int]) -> None:
    await node.leave(*pair)
    node.now += RETENTION_S - 1
    node.tidy()
    assert [held(fd) for fd in pair] == [1, 1]
    node.now += 1
    node.tidy()
    assert [held(fd) for fd in pair] == [0, 0]
    assert await node.take() == []


async def test_what_a_gang_leaves_anew_takes_the_place_of_what_it_had_left(node: Node, pair: tuple[int, int]) -> None:
    newer = memfd(), memfd()
    for _ in range(3):
        await node.leave(*pair)
        assert [held(fd) for fd in pair] == [1, 1]
    await node.leave(*newer)
    assert [held(fd) for fd in pair] == [0, 0]
    assert await node.take() == inodes(list(newer))


async def test_what_is_left_twice_stands_unharmed(node: Node, pair: tuple[int, int]) -> None:
    expected = [os.fstat(fd).st_ino for fd in pair]
    for _ in range(2):
        await node.leave(*pair)
    node.tidy()
    assert all(map(stands, pair))
    assert await node.take() == expected


async def test_an_agent_that_ends_before_it_was_heard_has_taken_nothing(node: Node, pair: tuple[int, int]) -> None:
    expected = [os.fstat(fd).st_ino for fd in pair]
    await node.leave(*pair)
    line, answer, fds = await asyncio.to_thread(open_request, str(node.path), {"take": {"gang_id": "g"}})
    assert inodes(fds) == expected
    assert answer == {"generation": "0"} or answer == {}
    assert await node.take() == [], "nobody else has it meanwhile"
    await node.end(line)
    assert await node.take() == expected


async def test_memory_that_comes_back_after_another_job_has_started_is_freed(node: Node, pair: tuple[int, int]) -> None:
    await node.leave(*pair)
    line, _, fds = await asyncio.to_thread(open_request, str(node.path), {"take": {"gang_id": "g"}})
    inodes(fds)
    await node.job_starts(8)
    await node.end(line)
    assert await node.job_starts(8) == 0, "it waits for what is being freed"
    assert not any(map(stands, pair))


def waits(event: threading.Event) -> None:
    """As for somebody who writes there."""
    event.wait(60.0)


def test_a_prolog_is_told_where_freeing_takes_too_long() -> None:
    writer = threading.Event()
    depot, fds = KeptMemoryStore(FdStore(""), 0.0, lambda _: waits(writer)), (memfd(), memfd())
    depot.recover({}, JobOwner(7, 1000))
    request = KeepMemory(gang_id="g", slurm_job_id=7)
    assert depot.keep(1000, request, [os.dup(fd) for fd in fds], 0.0) == ""
    with pytest.raises(TimeoutError, match="still being freed"):
        depot.job_starts(JobOwner(8, 1000))
    assert depot.job_starts(JobOwner(9, 1000)) == 0, "nobody waits for it again"
    writer.set()
    inodes(list(fds))


async def test_no_call_ends_more_than_itself(node: Node, pair: tuple[int, int]) -> None:
    odd = (
        b"",
        b"\xff{",
        b'{"\\ud800":1,"\\ud800":2}',
        b"[" * 100000,
        b'{"keep": 3}',
        b'{"take": {"gang_id": "\\ud800"}}',
    )
    for packet_ in odd:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.connect(str(node.path))
            if packet_:
                line.send(packet_)
    assert await node.leave(*pair) == ""
    assert len(await node.take()) == 2


async def test_nothing_is_kept_where_no_prolog_would_have_it_freed(tmp_path: Path, pair: tuple[int, int]) -> None:
    path = tmp_path / "memory.sock"
    async with serving(path, FdStore("")) as first:
        assert "no prolog has named a job" in await first.leave(*pair)
        await first.job_starts(7)
        assert "job 7 has started on this node since" in await first.leave(*pair, job=6)
        assert await first.leave(*pair) == ""
    async with serving(path, FdStore("")) as second:
        assert await second.leave(*pair) == "", "a restart of musterd forgets nothing"


async def test_only_sealed_memory_is_kept(node: Node, pair: tuple[int, int]) -> None:
    reading, writing = os.pipe()
    grows = memfd(seals=fcntl.F_SEAL_SHRINK)
    for strange in (reading, grows):
        assert "must be a memfd" in await node.leave(pair[0], strange)
    fixed = memfd(seals=MEMFD_SEALS | fcntl.F_SEAL_WRITE)
    glance = os.open(f"/proc/self/fd/{pair[1]}", os.O_RDONLY)
    for unfit in (fixed, glance):
        assert "their pages can't be freed" in await node.leave(pair[0], unfit)
    inodes([fixed, glance])
    for fd in (reading, writing, grows):
        os.close(fd)
    assert await node.take() == []


async def test_a_request_that_can_not_be_right_is_refused_in_words(node: Node, pair: tuple[int, int]) -> None:
    for gang in ("", "g" * 129, "g\nkept: all of it"):
        assert "the gang's name must" in await node.leave(*pair, gang=gang)
    assert "1 descriptors" in await node.leave(pair[0])
    assert "descriptors" in await node.leave(*[pair[0]] * (MAX_FDS + 9))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.setblocking(False)
        line.connect(str(node.path))
        line.send(b"\xff{")
        answer = await asyncio.get_running_loop().sock_recv(line, 1 << 16)
    assert b"not a MemoryRequest" in answer


@pytest.mark.parametrize(
    "packet",
    [b"", b"\xff{", b"{}", b'{"take": {"gang_id": "other"}}', b'{"keep": {"gang_id": "g", "slurm_job_id": 9}}'],
    ids=["empty", "no request", "no body", "take", "refused"],
)
async def test_musterd_holds_no_descriptor_that_it_does_not_keep(node: Node, packet: bytes) -> None:
    """Each would count among musterd's own, and hold memory that the job's end does not free."""
    fd = memfd()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(str(node.path))
        line.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd] * MAX_FDS))])
        while await asyncio.to_thread(line.recv, 4096):
            pass  # an answer; the connection ends after the descriptors are closed
    assert held(fd) == 0
    os.close(fd)


async def test_callers_that_say_nothing_keep_nobody_else_waiting(node: Node, pair: tuple[int, int]) -> None:
    lines = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(8)]
    for line in lines:
        line.connect(str(node.path))
    assert await node.leave(*pair) == ""
    for line in lines:
        line.close()
    assert len(await node.take()) == 2


async def test_only_root_speaks_for_slurm(tmp_path: Path) -> None:
    async with serving(tmp_path / "memory.sock", FdStore(""), root=False) as node:
        answer, _ = await node.ask({"free": {"slurm_job_id": 7, "uid": os.getuid()}})
        assert answer == {"refused": "only root says which job starts"}


async def test_one_user_has_so_many_calls_at_once_and_is_heard_again_after_them(tmp_path: Path) -> None:
    async with serving(tmp_path / "memory.sock", FdStore(""), root=False) as node:
        lines = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(MAX_CALLS_PER_USER)]
        for line in lines:
            line.connect(str(node.path))
        with pytest.raises(ConnectionError):
            await node.ask({"take": {"gang_id": "g"}})
        for line in lines:
            await node.end(line)
        assert await node.ask({"take": {"gang_id": "g"}}) == ({}, [])


async def test_a_call_for_which_there_is_no_thread_counts_no_more(tmp_path: Path) -> None:
    async with serving(tmp_path / "memory.sock", FdStore(""), root=False) as node:
        before = threading.stack_size(2**46)  # more than a process can have
        try:
            for _ in range(MAX_CALLS_PER_USER):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line, suppress(ConnectionError):
                    line.connect(str(node.path))
                    assert line.recv(1) == b""
        finally:
            threading.stack_size(before)
        assert await node.ask({"take": {"gang_id": "g"}}) == ({}, [])


# --- systemd's store -------------------------------------------------------------------------------------------------


class Systemd:
    """Plays systemd's side of the notify socket: what is stored, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stored: dict[str, int] = {}
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._line.bind(str(path))
        self._line.setblocking(False)

    def hear(self) -> None:
        """Take in all that was said."""
        fds = array.array("i")
        while True:
            try:
                data, beside, _, _ = self._line.recvmsg(4096, socket.CMSG_SPACE(fds.itemsize))
            except BlockingIOError:
                return
            words = dict(line.split("=", 1) for line in data.decode().splitlines())
            if words.get("FDSTORE") == "1":
                (_, _, payload) = beside[0]
                self.stored[words["FDNAME"]] = array.array("i", payload)[0]
            elif words.get("FDSTOREREMOVE") == "1":
                os.close(self.stored.pop(words["FDNAME"]))

    def hands_out(self) -> dict[str, int]:
        """Descriptors for a service that is started again."""
        self.hear()
        return {name: os.dup(fd) for name, fd in reversed(self.stored.items())}

    def close(self) -> None:
        for fd in self.stored.values():
            os.close(fd)
        self._line.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    played = Systemd(tmp_path / "notify")
    yield played
    played.close()


async def test_memory_outlives_a_restart_of_musterd(tmp_path: Path, systemd: Systemd, pair: tuple[int, int]) -> None:
    expected = [os.fstat(fd).st_ino for fd in pair]
    path, store = tmp_path / "memory.sock", FdStore(str(systemd.path))
    async with serving(path, store) as first:
        await first.job_starts(7)
        assert await first.leave(*pair, job=7) == ""
    async with serving(path, store, systemd.hands_out()) as second:
        assert await second.job_starts(7) == 0
        assert await second.take() == expected
    systemd.hear()
    assert systemd.stored == {}, "what its owner has is stored no more"


async def test_after_a_restart_it_is_known_whose_it_is_and_until_when(
    tmp_path: Path, systemd: Systemd, pair: tuple[int, int]
) -> None:
    path, store = tmp_path / "memory.sock", FdStore(str(systemd.path))
    async with serving(path, store) as first:
        await first.job_starts(7)
        await first.leave(*pair, job=7)
    async with serving(path, store, systemd.hands_out()) as second:
        second.now = first.now + RETENTION_S - 1
        second.tidy()
        assert all(map(stands, pair))
        assert await second.job_starts(8) == 1
    systemd.hear()
    assert (systemd.stored, any(map(stands, pair))) == ({}, False)


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_what_systemd_has_lost_a_part_of_is_let_go(
    tmp_path: Path, systemd: Systemd, pair: tuple[int, int], place: int
) -> None:
    path, store = tmp_path / "memory.sock", FdStore(str(systemd.path))
    async with serving(path, store) as first:
        await first.job_starts(7)
        await first.leave(*pair)
    stored = systemd.hands_out()
    os.close(stored.pop(next(name for name in stored if name.endswith(f".{place}"))))
    async with serving(path, store, stored) as second:
        assert await second.take() == []


async def test_a_job_that_was_named_before_musterd_ended_finds_the_memory_gone(
    tmp_path: Path, systemd: Systemd, pair: tuple[int, int]
) -> None:
    path, store = tmp_path / "memory.sock", FdStore(str(systemd.path))
    async with serving(path, store) as first:
        await first.job_starts(7)
        await first.leave(*pair)
    path.with_suffix(".prolog").write_text(f"8 {os.getuid()}")
    async with serving(path, store, systemd.hands_out()) as second:
        assert await second.take() == []
        assert await second.job_starts(8) == 0
    systemd.hear()
    assert (systemd.stored, any(map(stands, pair))) == ({}, False)


async def test_of_two_that_are_found_the_later_counts(tmp_path: Path, systemd: Systemd) -> None:
    path, store = tmp_path / "memory.sock", FdStore(str(systemd.path))
    older, newer = (memfd(), memfd()), (memfd(), memfd())
    for fds in (older, newer):
        async with serving(path, store) as one:
            await one.job_starts(7)
            one.now += fds is newer
            await one.leave(*fds)
    stored = systemd.hands_out()
    expected = [os.fstat(fd).st_ino for fd in newer]
    async with serving(path, store, stored) as both:
        assert await both.take() == expected
        assert [held(fd) for fd in older] == [1, 1], "systemd's, which has not heard yet"
    inodes([*older, *newer])


def test_descriptors_of_the_store_are_found_by_their_names() -> None:
    made = memfd(), memfd()
    first = fcntl.fcntl(made[0], fcntl.F_DUPFD_CLOEXEC, 500)  # systemd's follow each other; far from all others
    second = os.dup2(made[1], first + 1)
    environ = {"LISTEN_PID": "42", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a.0:a.1", "HOME": "/"}
    assert systemd_fd_store.inherited_descriptors(dict(environ), 43, first) == {}, "they are another process's"
    os.set_inheritable(first, True)
    assert systemd_fd_store.inherited_descriptors(environ, 42, first) == {"a.0": first, "a.1": second}
    assert environ == {"HOME": "/"}
    assert not os.get_inheritable(first)
    for descriptor in (*made, first, second):
        os.close(descriptor)


async def test_the_command_takes_over_what_systemd_hands_it(
    tmp_path: Path, systemd: Systemd, pair: tuple[int, int]
) -> None:
    expected = [os.fstat(fd).st_ino for fd in pair]
    path = tmp_path / "memory.sock"
    async with serving(path, FdStore(str(systemd.path))) as first:
        first.now = clock.monotonic()
        await first.job_starts(7)
        await first.leave(*pair)
    SecretCredentials.create(tmp_path / "secret")
    (tmp_path / "kmsg").touch(mode=0o600)
    musterd = [sys.executable, "-Im", "muster.daemon.node", "--coordinator=127.0.0.1:1", "--listen=127.0.0.1:0"]
    musterd += [f"--auth=secret:{tmp_path}/secret", "--node=n1", f"--kmsg={tmp_path}/kmsg", f"--memory={path}"]
    stored = {name: fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for name, fd in systemd.hands_out().items()}
    moves = " ".join(f"{place}<&{fd}" for place, fd in enumerate(stored.values(), 3))
    script = f'exec {moves}; export LISTEN_PID=$$; exec "$@"'
    told = {"LISTEN_FDS": str(len(stored)), "LISTEN_FDNAMES": ":".join(stored), "NOTIFY_SOCKET": str(systemd.path)}
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", script, "bash", *musterd), env={**os.environ, **told}, pass_fds=tuple(stored.values())
    )
    inodes(list(stored.values()))
    try:
        while not path.exists():  # noqa: ASYNC110 - a file tells nobody
            await asyncio.sleep(0.01)
        _, fds = await asyncio.to_thread(send_request, str(path), {"take": {"gang_id": "g"}})
        assert inodes(fds) == expected
    finally:
        process.terminate()
        assert await process.wait() == 0


async def test_where_the_socket_can_not_be_musterd_goes_on_without(tmp_path: Path, systemd: Systemd) -> None:
    path, store = tmp_path / "memory.sock", FdStore(str(systemd.path))
    async with serving(path, store) as first:
        await first.job_starts(7)
        await first.leave(*(fds := (memfd(), memfd())))
    depot = KeptMemoryStore(store)
    depot.recover(systemd.hands_out(), JobOwner(7, os.getuid()))
    await MemoryService(tmp_path / "nowhere" / "memory.sock", depot).run()
    systemd.hear()
    assert systemd.stored == {}, "nobody could ask for it"
    inodes(list(fds))


# --- the prolog ------------------------------------------------------------------------------------------------------


async def test_the_prolog_frees_what_other_jobs_have_left(node: Node, pair: tuple[int, int]) -> None:
    await node.leave(*pair, job=7)
    assert await asyncio.to_thread(prolog.free_kept_memory, 8, os.getuid(), str(node.path), 0.0) == ""
    assert not any(map(stands, pair))


def test_without_musterd_the_prolog_returns_at_once(tmp_path: Path) -> None:
    assert prolog.free_kept_memory(8, 1000, str(tmp_path / "memory.sock"), 60.0) == ""


def dead_socket(path: Path) -> Path:
    """As a musterd that has ended leaves it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.bind(str(path))
    return path


def test_a_musterd_that_does_not_come_back_holds_up_no_job(tmp_path: Path) -> None:
    assert "does not answer" in prolog.free_kept_memory(8, 1000, str(dead_socket(tmp_path / "memory.sock")), 0.0)


async def test_a_musterd_that_is_started_again_is_waited_for(tmp_path: Path) -> None:
    path = dead_socket(tmp_path / "memory.sock")
    waiting = asyncio.create_task(asyncio.to_thread(prolog.free_kept_memory, 8, os.getuid(), str(path), 60.0))
    async with serving(path, FdStore("")):
        assert await waiting == ""


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "x"}, {"SLURM_JOB_ID": "7"}])
def test_the_prolog_fails_no_job(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert prolog.main(environ) == 0
    assert "SLURM_JOB_ID" in capsys.readouterr().err


def test_the_prolog_is_quick_to_start() -> None:
    show = "import sys, muster.slurm.hooks.prolog; print(*(n for n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, timeout=60, check=True)
    heavy = {"grpc", "google", "pydantic", "asyncio", "rich", "xxhash"}
    assert not heavy & {name.partition(".")[0] for name in done.stdout.split()}
