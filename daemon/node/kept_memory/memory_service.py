"""musterd's socket for memory that outlives a run of a job (protos/muster/v1/memory.proto). Agents deposit and reclaim
memory; prologs have it freed.

Each call has its own thread, because closing a user's descriptors may take as long as the user likes. So the event
loop, with heartbeats and the kernel log, is never blocked.
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
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from muster.daemon.host import clock, packets
from muster.daemon.host.kept_memory_client import MAX_FDS
from muster.daemon.node.kept_memory.kept_memory_store import KeptMemoryStore
from muster.daemon.node.kept_memory.retention import JobOwner
from muster.v1.common_pb2 import Hardware
from muster.v1.memory_pb2 import GpuCounters, GpuUse, KeepMemory, MemoryAnswer, MemoryRequest, NodeVerdict, ReportRanks

_log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0
"""Seconds after which a silent caller is disconnected."""
EXPIRY_CHECK_S = 5.0
"""Seconds between two checks for expired memory."""
MAX_CALLS_PER_USER, MAX_CALLS = 16, 64
"""Concurrent calls of one user, and of all users. Root is never refused."""
NO_METRICS = "this node serves no metrics"
_MAX_ERROR_CHARS = 200
_PEER = struct.Struct("=iII")


class NotARequest(ValueError):
    """A packet that holds no MemoryRequest. The message is ASCII, in one line, and short."""


class MemoryService:
    """The socket at `path`, in front of `store`. A file beside the socket holds the job and user that Slurm's prolog
    named last.

    Args:
        now: returns monotonic seconds (muster.daemon.host.clock).
        root: uids that may speak as Slurm's prolog.
        verdict: returns what is known of this node; any user may ask.
        counters: returns the error counters of the GPUs; any user may ask.
        hardware: returns what hardware the node has; any user may ask.
        gpu_use: returns how much of the GPUs is used; any user may ask.
        report_ranks: takes what an agent of this uid reports for the node's metrics. Returns why not; empty: it is
            taken.
    """

    def __init__(
        self,
        path: Path,
        store: KeptMemoryStore,
        now: Callable[[], float] = clock.monotonic,
        root: Collection[int] = (0, os.getuid()),
        verdict: Callable[[], NodeVerdict] = lambda: NodeVerdict(fit=True, verdict="FIT"),
        counters: Callable[[], GpuCounters] = GpuCounters,
        hardware: Callable[[], Hardware] = Hardware,
        gpu_use: Callable[[], Iterable[GpuUse]] = tuple,
        report_ranks: Callable[[int, ReportRanks], str] = lambda uid, report: NO_METRICS,
    ) -> None:
        self._report_ranks = report_ranks
        self._path = path
        self._counters = counters
        self._hardware = hardware
        self._gpu_use = gpu_use
        self._verdict = verdict
        self._prolog = path.with_suffix(".prolog")
        self._store = store
        self._now = now
        self._root = root

    def prolog_job(self) -> JobOwner | None:
        """The job and user that a prolog named last, as an earlier musterd noted them; None if there is no note."""
        try:
            job, uid = self._prolog.read_text().split()
            return JobOwner(int(job), int(uid))
        except (OSError, ValueError):
            return None

    async def run(self) -> None:
        """Serve until cancelled. If the socket can't be made, log a warning: jobs run without kept memory."""
        try:
            server = _Server(self._path, self._answer, self._root)
        except OSError as error:
            _log.warning("no memory is kept over requeues: %s: %s", self._path, error.strerror or error)
            await asyncio.to_thread(self._store.release_expired, float("inf"))
            return
        server.start()
        try:
            while True:
                await asyncio.to_thread(self._store.release_expired, self._now())
                await asyncio.sleep(EXPIRY_CHECK_S)
        finally:
            server.stop()
            self._store.close()

    def _answer(self, uid: int, connection: socket.socket) -> None:
        """Serve one call."""
        connection.settimeout(REQUEST_TIMEOUT_S)
        data, fds = packets.receive_bytes(connection, MAX_FDS + 1)
        if not data:
            return
        try:
            try:
                request = parse_request(data)
            except NotARequest as error:
                _send(connection, MemoryAnswer(refused=str(error)))
                return
            kind = request.WhichOneof("body")
            if kind == "take":
                self._hand_out(uid, request.take.gang_id, connection)
                return
            answer = MemoryAnswer()
            if kind == "keep":
                answer.refused = self._keep(uid, request.keep, fds)
                if not answer.refused:
                    fds = []
            elif kind == "free":
                answer = self._job_starts(uid, JobOwner(request.free.slurm_job_id, request.free.uid))
            elif kind == "ask_verdict":
                answer.verdict.CopyFrom(self._verdict())
                answer.verdict.memory_kept = uid in self._root and self._store.keeps(request.ask_verdict.slurm_job_id)
            elif kind == "ask_counters":
                answer.counters.CopyFrom(self._counters())
            elif kind == "ask_hardware":
                answer.hardware.CopyFrom(self._hardware())
            elif kind == "ask_gpu_use":
                answer.gpu_use.extend(self._gpu_use())
            elif kind == "report_ranks":
                answer.refused = self._report_ranks(uid, request.report_ranks)
            _send(connection, answer)
        finally:
            for fd in fds:
                os.close(fd)

    def _keep(self, uid: int, request: KeepMemory, fds: list[int]) -> str:
        """Return the reason why the descriptors are not kept; empty: they are kept."""
        try:
            return self._store.keep(uid, request, fds, self._now())
        except OSError as error:
            _log.error("nothing can be kept: %s", error)
            return f"musterd: {error.strerror}"

    def _hand_out(self, uid: int, gang: str, connection: socket.socket) -> None:
        """Give a gang its memory back. The agent confirms that it has it; without a confirmation the memory is kept
        again."""
        kept = self._store.hand_out(uid, gang)
        if kept is None:
            _send(connection, MemoryAnswer())
            return
        try:
            _send(connection, MemoryAnswer(generation=kept.generation), kept.memory.handed_fds)
            connection.settimeout(None)
            taken = _wait_until_taken(connection)
        except BaseException:
            self._store.put_back(kept)
            raise
        if not taken:
            _log.info(
                "the agent of gang %s, uid %d, has ended before it confirmed: its memory is kept again", gang, uid
            )
            self._store.put_back(kept)
            return
        _log.info("gang %s of uid %d has its memory back", gang, uid)
        self._store.release(kept)

    def _job_starts(self, uid: int, owner: JobOwner) -> MemoryAnswer:
        if uid not in self._root:
            return MemoryAnswer(refused="only root says which job starts")
        try:
            self._prolog.write_text(f"{owner.job} {owner.uid}")
        except OSError as error:
            # The old note names another job, and half a note is no note: remove it.
            _log.error("%s: %s", self._prolog, error.strerror)
            self._prolog.unlink(missing_ok=True)
        try:
            return MemoryAnswer(freed=self._store.job_starts(owner))
        except TimeoutError as error:
            return MemoryAnswer(refused=f"musterd: {error}")


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Runs `answer` (caller's uid, connection) in a thread for each call. Calls of `root` are not counted."""

    socket_type = socket.SOCK_SEQPACKET
    request_queue_size = 128
    daemon_threads = True
    block_on_close = False

    def __init__(self, path: Path, answer: Callable[[int, socket.socket], None], root: Collection[int]) -> None:
        # Replace an earlier musterd's socket in one step: a prolog that finds no socket concludes that nothing is kept.
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
        """Start to accept calls."""
        threading.Thread(target=self._take_calls, name="memory", daemon=True).start()

    def stop(self) -> None:
        """Accept no more calls. Running calls end by themselves, or with the process."""
        self._stopped = True
        with suppress(OSError):  # the thread has ended a call just now, seen that it shall stop, and closed the socket
            self.socket.shutdown(socket.SHUT_RDWR)

    def _take_calls(self) -> None:
        while not self._stopped:
            self.handle_request()
        self.server_close()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether one more call of this user is allowed."""
        uid = _caller_uid(request)
        with self._lock:
            full = self._calls[uid] >= MAX_CALLS_PER_USER or self._calls.total() >= MAX_CALLS
            if full and uid not in self._root:
                return False
            self._calls[uid] += uid not in self._root
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts the call's thread, if the process may have one more."""
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._call_ended(_caller_uid(request))
            raise

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Runs in the call's thread."""
        uid = _caller_uid(request)
        try:
            self._answer(uid, request)
        except OSError as error:
            _log.info("a call of uid %d failed: %s", uid, error)
        finally:
            self._call_ended(uid)

    def _call_ended(self, uid: int) -> None:
        with self._lock:
            self._calls[uid] -= uid not in self._root

    def handle_error(self, request: Any, client_address: Any) -> None:
        """An error ends its own call only."""
        _log.exception("a bug of Muster, in a call of uid %d", _caller_uid(request))


def _caller_uid(connection: socket.socket) -> int:
    """The uid of the caller."""
    _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(uid)


def _wait_until_taken(connection: socket.socket) -> bool:
    """Wait for the agent's confirmation or its end; return whether it confirmed."""
    data, _ = packets.receive_bytes(connection, 0)
    try:
        return parse_request(data).WhichOneof("body") == "taken"
    except NotARequest:
        return False


def parse_request(data: bytes) -> MemoryRequest:
    """The request in one packet.

    Raises:
        NotARequest: `data` is none.
    """
    try:
        return json_format.Parse(data, MemoryRequest())
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise NotARequest(f"not a MemoryRequest: {ascii(str(error))[:_MAX_ERROR_CHARS]}") from None


def _send(connection: socket.socket, answer: MemoryAnswer, fds: tuple[int, ...] = ()) -> None:
    packets.send(connection, json_format.MessageToDict(answer, preserving_proto_field_name=True), list(fds))
