"""A rank's line to its agent: one Unix socket that it inherited, packets on it, memfds beside them. No torch.

Nothing here may hold training up: what the agent says is looked at without waiting, except where a state or a slot is
waited for on purpose. An agent that is gone ends the snapshots, not the training.
"""

import array
import logging
import mmap
import os
import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from muster.checkpoint.format import stack_file
from muster.checkpoint.format.errors import CheckpointError, RestoreError
from muster.v1.rank_pb2 import (
    AgentRankMessage,
    AgentRestore,
    AgentSlots,
    RankDeclared,
    RankFilled,
    RankJoin,
    RankLayout,
    RankMessage,
    RankProgress,
)

log = logging.getLogger(__name__)

_PACKET_BYTES = 1 << 16
_FDS = 4
_SLOTS_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class StartPoint:
    """Where a rank starts: afresh (step 0), from `shard` (its bytes, a private view), or from a durable folder."""

    step: int = 0
    generation: int = 0
    shard: memoryview | None = None
    durable_path: str = ""


class AgentConnection:
    """The rank's end.

    Args:
        descriptor: of a connected SOCK_SEQPACKET socket; owned from now on.
        rank, generation: who speaks.
    """

    def __init__(self, descriptor: int, rank: int, generation: int) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._rank = rank
        self._generation = generation
        self._free: dict[int, int] = {}
        self._fills: dict[int, int] = {}
        self.slots: list[memoryview] = []
        self.alive = True
        self.stop_reason = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "AgentConnection | None":
        """The line that the agent left in MUSTER_AGENT_FD; None outside Muster."""
        if "MUSTER_AGENT_FD" not in environ:
            return None
        stack_file.offer()
        return cls(int(environ["MUSTER_AGENT_FD"]), int(environ["RANK"]), int(environ["MUSTER_GENERATION"]))

    def join(self) -> StartPoint:
        """Say who this is, and wait for the state to start from.

        Raises:
            RestoreError: there is a state to start from, and it can't be had.
        """
        self._send(RankMessage(join=RankJoin(rank=self._rank, generation=self._generation)))
        while self.alive:
            message, fds = self._receive(None)
            if message is None or not message.HasField("restore"):
                continue
            return _start(message.restore, fds)
        raise RestoreError("the agent ended before it said where to start from")

    def ask_slots(self, slot_bytes: int, header_bytes: int) -> str:
        """Get two slots of this size; `slots` are their bytes.

        Returns:
            Why there are none, in words; empty: there are.
        """
        self.slots = []
        self._free.clear()
        self._send(RankMessage(layout=RankLayout(slot_bytes=slot_bytes, header_bytes=header_bytes)))
        end = time.monotonic() + _SLOTS_TIMEOUT_S
        while self.alive and time.monotonic() < end:
            message, fds = self._receive(end)
            if message is None or not message.HasField("slots"):
                continue
            return self._map(message.slots, fds)
        return "the agent gave no answer"

    def _map(self, slots: AgentSlots, fds: list[int]) -> str:
        try:
            if slots.refused:
                return slots.refused
            self._free.clear()
            self._fills.clear()
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self.slots = [memoryview(mmap.mmap(fd, slots.slot_bytes, flags=flags)) for fd in fds]
            return ""
        finally:
            for fd in fds:
                os.close(fd)

    def progress(self, step: int, *, skipped: bool = False) -> None:
        """An optimizer step is finished; `skipped`: its snapshot was due, and no slot was free."""
        self._send(RankMessage(progress=RankProgress(step=step, snapshot_skipped=skipped)))

    def declare(self, phase: str) -> None:
        """This rank is in a phase in which it finishes no step; empty: in none any more."""
        self._send(RankMessage(declared=RankDeclared(phase=phase)))

    def filled(self, slot: int, step: int) -> None:
        """A slot holds the state after `step` steps: it is the agent's until it is free again."""
        self._free.pop(slot, None)
        self._fills[slot] = self._fills.get(slot, 0) + 1
        self._send(RankMessage(filled=RankFilled(slot=slot, step=step)))

    def listen(self) -> None:
        """Hear what has come, without waiting: microseconds where nothing has."""
        while self.alive and self._receive(0.0)[0] is not None:
            pass

    def granted_slot(self, step: int, every: int, wait_s: float = 0.0) -> int | None:
        """The slot for the snapshot of `step`, where that is the step that all ranks keep; None where it is not.

        Args:
            step: finished, and due: steps that `every` divides are.
            every: steps between snapshots.
            wait_s: seconds to wait for what is kept already to be settled, before which no step is named.
        """
        return self._slot(lambda: self._of(step, every), wait_s)

    def any_slot(self, step: int, every: int, wait_s: float) -> int | None:
        """Any slot that may be written, whatever step it was meant for; None where none comes within `wait_s` seconds.

        For a `step` that all ranks keep out of turn: the first one, the last one. `every`: as in `granted_slot`.
        """
        return self._slot(lambda: self._any(step, every), wait_s)

    def _slot(self, pick: Callable[[], int | None], wait_s: float) -> int | None:
        end = time.monotonic() + wait_s
        while True:
            self.listen()
            slot = pick()
            may_come = self.alive and bool(self.slots) and time.monotonic() < end
            if slot is not None or self._free or not may_come:
                return slot
            self._receive(end)

    def _of(self, step: int, every: int) -> int | None:
        for slot, start in sorted(self._free.items()):
            if start > step:
                continue
            if not self._missed(start, step, every):
                return slot
            del self._free[slot]
        return None

    def _any(self, step: int, every: int) -> int | None:
        slot = min(self._free, default=None)
        if slot is not None:
            self._missed(self._free[slot], step, every)
        return slot

    def _missed(self, start: int, step: int, every: int) -> bool:
        """A slot for the due step from `start` on came too late: say so, for all others have kept that step, and have
        no slot for another before it is settled."""
        if start == 0 or start > (step - 1) // every * every:
            return False
        self.progress(-(-start // every) * every, skipped=True)
        return True

    def close(self) -> None:
        """Let go of the line and the slots."""
        self.alive, self.slots, self._free = False, [], {}
        self._socket.close()

    def _send(self, message: RankMessage) -> None:
        if not self.alive:
            return
        try:
            self._socket.send(message.SerializeToString())
        except OSError as error:
            self._lost(str(error))

    def _receive(self, until: float | None) -> tuple[AgentRankMessage | None, list[int]]:
        """One message; waits up to the monotonic time `until` (0: not at all, None: for ever)."""
        if until != 0.0:
            left = None if until is None else max(0.0, until - time.monotonic()) * 1000
            if not self._poll.poll(left):
                return None, []
        fds = array.array("i")
        room = socket.CMSG_SPACE(_FDS * fds.itemsize)
        try:
            flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            data, beside, _, _ = self._socket.recvmsg(_PACKET_BYTES, room, flags)
        except BlockingIOError:
            return None, []
        except OSError as error:
            data, beside = b"", []
            log.debug("agent: %s", error)
        if not data:
            self._lost("it closed the line")
            return None, []
        for level, kind, payload in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        message = AgentRankMessage.FromString(data)
        self._note(message)
        return message, list(fds)

    def _note(self, message: AgentRankMessage) -> None:
        if message.HasField("slot_free"):
            free = message.slot_free
            if free.fills == self._fills.get(free.slot, 0):
                self._free[free.slot] = free.from_step
        elif message.HasField("stop"):
            self.stop_reason = message.stop.reason or "the agent asks for it"

    def _lost(self, why: str) -> None:
        if self.alive:
            log.warning("the agent is gone (%s): no more snapshots", why)
        self.alive = False
        self._free.clear()


def _start(restore: AgentRestore, fds: list[int]) -> StartPoint:
    try:
        if restore.refused:
            raise RestoreError(restore.refused)
        if not restore.HasField("version"):
            return StartPoint(durable_path=restore.durable_path)
        if len(fds) != 1:
            raise CheckpointError(f"the agent sent {len(fds)} descriptors with the state, not 1")
        # Private: torch wants writable memory, and the slot itself must not change.
        private = mmap.mmap(fds[0], restore.bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return StartPoint(restore.version.step, restore.version.generation, memoryview(private))
    finally:
        for fd in fds:
            os.close(fd)
