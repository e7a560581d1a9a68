"""musterd's socket for memory that outlives a run of a job: agents leave it here and take it back, prologs have it
freed (protos/muster/v1/memory.proto)."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from google.protobuf import json_format

from muster.daemon import clock
from muster.daemon.agent import packet
from muster.daemon.memory_line import MOST_FDS
from muster.daemon.node.custody import Kept
from muster.daemon.node.depot import Depot, Memfds, is_sealed
from muster.v1.memory_pb2 import KeepMemory, MemoryAnswer, MemoryRequest

_log = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""A caller that says nothing for so long is hung up on."""
LOOK_S = 5.0
MOST_CALLS = 16
"""Calls of one user at once."""
_PEER = struct.Struct("=iII")


class MemoryService:
    """The socket at `path`, before `depot`; `now`: seconds, as of daemon.clock.monotonic. A file beside the socket
    holds the job that Slurm's prolog has named last."""

    def __init__(self, path: Path, depot: Depot, now: Callable[[], float] = clock.monotonic) -> None:
        self._path = path
        self._prolog = path.with_suffix(".prolog")
        self._depot = depot
        self._now = now
        self._calls: Counter[int] = Counter()
        self._closing: dict[int, threading.Thread] = {}
        self._freeing = asyncio.Lock()

    async def run(self) -> None:
        """Serve until cancelled. Where the socket can't be there, say so: jobs go on without."""
        try:
            listener = _listen(self._path)
        except OSError as error:
            _log.warning("no memory is kept over requeues: %s: %s", self._path, error.strerror or error)
            await self._free(self._depot.expired(float("inf")))
            return
        with closing(listener), closing(self._depot):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._free_in_time())
                while True:
                    line, _ = await asyncio.get_running_loop().sock_accept(listener)
                    tasks.create_task(self._serve(line))

    async def _free_in_time(self) -> None:
        while True:
            await self.free_expired()
            await asyncio.sleep(LOOK_S)

    async def free_expired(self) -> None:
        """Free what has been kept for long enough."""
        await self._free(self._depot.expired(self._now()))

    async def _serve(self, line: socket.socket) -> None:
        """One call."""
        with line:
            uid = _uid(line)
            if self._calls[uid] >= MOST_CALLS or self._hangs(uid):
                return
            self._calls[uid] += 1
            try:
                await self._answer(uid, line)
            except (TimeoutError, OSError) as error:
                _log.info("a call of uid %d came to nothing: %s", uid, str(error) or "it said nothing")
            finally:
                self._calls[uid] -= 1

    async def _answer(self, uid: int, line: socket.socket) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await _readable(line)
        data, fds = packet.receive_bytes(line, MOST_FDS + 1)
        try:
            request = json_format.Parse(data, MemoryRequest())
        except (json_format.ParseError, UnicodeDecodeError) as error:
            request, answer = MemoryRequest(), MemoryAnswer(refused=f"not a MemoryRequest: {error}")
        else:
            answer = MemoryAnswer()
        kind = request.WhichOneof("body")
        if kind == "keep":
            answer.refused = self._keep(uid, request.keep, fds)
        if kind != "keep" or answer.refused:
            self._close(uid, fds)
        if kind == "take":
            self._give(uid, request.take.gang_id, line)
            return
        if kind == "free":
            answer = await self._job_starts(uid, request.free.slurm_job_id)
        _say(line, answer)

    def _keep(self, uid: int, request: KeepMemory, fds: Sequence[int]) -> str:
        """Why they are not kept, in words; empty: they are."""
        try:
            return self._other_job(request.slurm_job_id) or self._depot.keep(uid, request, fds, self._now())
        except OSError as error:
            _log.error("nothing can be kept: %s", error)
            return f"musterd: {error.strerror}"

    def _give(self, uid: int, gang: str, line: socket.socket) -> None:
        kept = self._depot.take(uid, gang)
        if kept is None:
            _say(line, MemoryAnswer())
            return
        try:
            _say(line, MemoryAnswer(), kept.memory.handed)
        except OSError:
            self._depot.put_back(kept)
            raise
        _log.info("gang %s of uid %d has its memory back", gang, uid)
        self._depot.let_go(kept)

    def _other_job(self, job: int) -> str:
        """Why nothing of this job may be kept, in words; empty: it is the last that a prolog has named here.

        Where another one has started since it would stand beside that; where no prolog calls at all, not even for this
        job before it ran, beside whatever comes.
        """
        try:
            last = self._prolog.read_text()
        except FileNotFoundError:
            return "no prolog calls on this node: slurm.conf has no Prolog=…/muster-prolog"
        return "" if last == str(job) else f"job {last or 'another'} has started on this node since"

    async def _job_starts(self, uid: int, job: int) -> MemoryAnswer:
        if uid not in (0, os.getuid()):
            return MemoryAnswer(refused="only root says which job starts")
        self._prolog.write_text(str(job))
        gone = self._depot.job_starts(job)
        await self._free(gone)
        return MemoryAnswer(freed=len(gone))

    async def _free(self, gone: Sequence[Kept[Memfds]]) -> None:
        # Whoever asks for it waits for what another has begun to free as well.
        async with self._freeing:
            if gone:
                await asyncio.to_thread(self._depot.free, gone)

    # -- descriptors that are not kept --

    def _close(self, uid: int, fds: Sequence[int]) -> None:
        """A file of a user's own making may never be done with closing: that is waited for by a thread of its own, and
        its user is not listened to meanwhile."""
        strange = [fd for fd in fds if not is_sealed(fd)]
        for fd in fds:
            if fd not in strange:
                os.close(fd)
        if strange:
            self._closing[uid] = thread = threading.Thread(target=_close_all, args=(strange,), daemon=True)
            thread.start()

    def _hangs(self, uid: int) -> bool:
        thread = self._closing.get(uid)
        if thread is not None and not thread.is_alive():
            del self._closing[uid]
        return uid in self._closing


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _listen(path: Path) -> socket.socket:
    """A socket that everyone may call. One that an earlier musterd has left is replaced, and never away meanwhile: a
    prolog that finds none takes it that nothing is kept."""
    fresh = path.with_name(path.name + ".new")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        fresh.unlink(missing_ok=True)
        listener.bind(str(fresh))
        fresh.chmod(0o666)
        listener.listen(128)
        listener.setblocking(False)
        fresh.rename(path)
    except OSError:
        listener.close()
        raise
    return listener


def _uid(line: socket.socket) -> int:
    """Who has called."""
    _, uid, _ = _PEER.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(uid)


async def _readable(line: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(line, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(line)


def _say(line: socket.socket, answer: MemoryAnswer, fds: Sequence[int] = ()) -> None:
    packet.send(line, json_format.MessageToDict(answer, preserving_proto_field_name=True), list(fds))
