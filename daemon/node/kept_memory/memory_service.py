"""musterd's socket for memory that outlives a run of a job: agents leave it here and take it back, prologs have it
freed (protos/muster/v1/memory.proto).

Each call has a thread of its own: closing what a user has sent may take as long as that user likes. The event loop, and
with it heartbeats and the kernel log, know nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import socketserver
import struct
import threading
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from muster.daemon.host import clock, packets
from muster.daemon.host.kept_memory_client import MAX_FDS
from muster.daemon.node.kept_memory.kept_memory_store import KeptMemoryStore
from muster.daemon.node.kept_memory.retention import JobOwner
from muster.v1.memory_pb2 import KeepMemory, MemoryAnswer, MemoryRequest

_log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0
"""A caller that says nothing for so long is hung up on."""
EXPIRY_CHECK_S = 5.0
MAX_CALLS_PER_USER, MAX_CALLS = 16, 64
"""Calls at once of one user, and of all together; root is always heard."""
_WORDS_MOST = 200
_PEER = struct.Struct("=iII")


class MemoryService:
    """The socket at `path`, before `depot`. A file beside the socket holds the job that Slurm's prolog has named last,
    and its user.

    Args:
        now: seconds, as of daemon.clock.monotonic.
        root: the users (uid) who may speak as Slurm's prolog.
    """

    def __init__(
        self,
        path: Path,
        depot: KeptMemoryStore,
        now: Callable[[], float] = clock.monotonic,
        root: Collection[int] = (0, os.getuid()),
    ) -> None:
        self._path = path
        self._prolog = path.with_suffix(".prolog")
        self._depot = depot
        self._now = now
        self._root = root

    def prolog_job(self) -> JobOwner | None:
        """Whom a prolog has named last, as far as an earlier musterd has noted it."""
        try:
            job, uid = self._prolog.read_text().split()
            return JobOwner(int(job), int(uid))
        except (OSError, ValueError):
            return None

    async def run(self) -> None:
        """Serve until cancelled. Where the socket can't be there, say so: jobs go on without."""
        try:
            server = _Server(self._path, self._answer, self._root)
        except OSError as error:
            _log.warning("no memory is kept over requeues: %s: %s", self._path, error.strerror or error)
            await asyncio.to_thread(self._depot.release_expired, float("inf"))
            return
        server.start()
        try:
            while True:
                await asyncio.to_thread(self._depot.release_expired, self._now())
                await asyncio.sleep(EXPIRY_CHECK_S)
        finally:
            server.stop()
            self._depot.close()

    def _answer(self, uid: int, line: socket.socket) -> None:
        """One call."""
        line.settimeout(REQUEST_TIMEOUT_S)
        data, fds = packets.receive_bytes(line, MAX_FDS + 1)
        if not data:
            return
        try:
            try:
                request = json_format.Parse(data, MemoryRequest())
            except (json_format.ParseError, UnicodeDecodeError) as error:
                _say(line, MemoryAnswer(refused=f"not a MemoryRequest: {ascii(str(error))[:_WORDS_MOST]}"))
                return
            kind = request.WhichOneof("body")
            if kind == "take":
                self._lend(uid, request.take.gang_id, line)
                return
            answer = MemoryAnswer()
            if kind == "keep":
                answer.refused = self._keep(uid, request.keep, fds)
                if not answer.refused:
                    fds = []
            elif kind == "free":
                answer = self._job_starts(uid, JobOwner(request.free.slurm_job_id, request.free.uid))
            _say(line, answer)
        finally:
            for fd in fds:
                os.close(fd)

    def _keep(self, uid: int, request: KeepMemory, fds: list[int]) -> str:
        """Why they are not kept, in words; empty: they are."""
        try:
            return self._depot.keep(uid, request, fds, self._now())
        except OSError as error:
            _log.error("nothing can be kept: %s", error)
            return f"musterd: {error.strerror}"

    def _lend(self, uid: int, gang: str, line: socket.socket) -> None:
        """Give back what a gang has left: for good once its agent says that it has it, else it is kept again."""
        kept = self._depot.hand_out(uid, gang)
        if kept is None:
            _say(line, MemoryAnswer())
            return
        try:
            _say(line, MemoryAnswer(generation=kept.generation), kept.memory.handed_fds)
            line.settimeout(None)
            has_it = _has_it(line)
        except BaseException:
            self._depot.put_back(kept)
            raise
        if not has_it:
            _log.info("the agent of gang %s, uid %d, has ended before it was heard: its memory is kept on", gang, uid)
            self._depot.put_back(kept)
            return
        _log.info("gang %s of uid %d has its memory back", gang, uid)
        self._depot.release(kept)

    def _job_starts(self, uid: int, owner: JobOwner) -> MemoryAnswer:
        if uid not in self._root:
            return MemoryAnswer(refused="only root says which job starts")
        try:
            self._prolog.write_text(f"{owner.job} {owner.uid}")
        except OSError as error:
            # What stands there names another job, and half of a name is none.
            _log.error("%s: %s", self._prolog, error.strerror)
            self._prolog.unlink(missing_ok=True)
        try:
            return MemoryAnswer(freed=self._depot.job_starts(owner))
        except TimeoutError as error:
            return MemoryAnswer(refused=f"musterd: {error}")


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Has each call answered (`answer`: the caller's uid, its line) by a thread. Calls of `root` are not counted."""

    socket_type = socket.SOCK_SEQPACKET
    request_queue_size = 128
    daemon_threads = True
    block_on_close = False

    def __init__(self, path: Path, answer: Callable[[int, socket.socket], None], root: Collection[int]) -> None:
        # One that an earlier musterd has left is replaced, and never away meanwhile: a prolog that finds none takes it
        # that nothing is kept.
        fresh = path.with_name(path.name + ".new")
        fresh.unlink(missing_ok=True)
        super().__init__(str(fresh), socketserver.BaseRequestHandler)
        fresh.chmod(0o666)
        fresh.rename(path)
        self._answer = answer
        self._root = root
        self._calls: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._stopped = False

    def start(self) -> None:
        """Begin to take calls."""
        threading.Thread(target=self._take_calls, name="memory", daemon=True).start()

    def stop(self) -> None:
        """Take no more calls; those under way end by themselves, or with the process."""
        self._stopped = True
        self.socket.shutdown(socket.SHUT_RDWR)

    def _take_calls(self) -> None:
        while not self._stopped:
            self.handle_request()
        self.server_close()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more call of this user."""
        uid = _uid(request)
        with self._lock:
            full = self._calls[uid] >= MAX_CALLS_PER_USER or self._calls.total() >= MAX_CALLS
            if full and uid not in self._root:
                return False
            self._calls[uid] += uid not in self._root
        return True

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the call's thread."""
        uid = _uid(request)
        try:
            self._answer(uid, request)
        except OSError as error:
            _log.info("a call of uid %d came to nothing: %s", uid, error)
        finally:
            with self._lock:
                self._calls[uid] -= uid not in self._root

    def handle_error(self, request: Any, client_address: Any) -> None:
        """No call may be the end of more than itself."""
        _log.exception("a bug, in a call of uid %d", _uid(request))


def _uid(line: socket.socket) -> int:
    """Who has called."""
    _, uid, _ = _PEER.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(uid)


def _has_it(line: socket.socket) -> bool:
    """Waits for the agent's word, or its end."""
    data, _ = packets.receive_bytes(line, 0)
    try:
        return json_format.Parse(data, MemoryRequest()).WhichOneof("body") == "taken"
    except (json_format.ParseError, UnicodeDecodeError):
        return False


def _say(line: socket.socket, answer: MemoryAnswer, fds: tuple[int, ...] = ()) -> None:
    packets.send(line, json_format.MessageToDict(answer, preserving_proto_field_name=True), list(fds))
