"""A rank's connection to its agent: one inherited Unix socket that carries packets, with memfds beside them. No torch.

The connection must not delay training: it reads messages without waiting, except when the rank waits for its state or
for a slot on purpose. When the agent ends, snapshots end and training goes on.
"""

import array
import fcntl
import logging
import mmap
import os
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf

from muster import compatibility
from muster.checkpoint.format import stack_file
from muster.checkpoint.format.errors import CheckpointError, RestoreError
from muster.checkpoint.format.touched_memory import map_touched
from muster.checkpoint.training.durable_loading.load_progress import Loaded
from muster.checkpoint.training.rank_signals import flight_recorder
from muster.checkpoint.training.rank_signals.reported_numbers import send_page
from muster.checkpoint.training.rank_signals.signs_of_life import SignsOfLife
from muster.v1.rank_pb2 import (
    AgentRankMessage,
    AgentRead,
    AgentRestore,
    AgentSlots,
    RankAlive,
    RankDeclared,
    RankFilled,
    RankJoin,
    RankLayout,
    RankLoad,
    RankMessage,
    RankNotFinite,
    RankProgress,
    RankRead,
    RankStopped,
    StepTime,
)

log = logging.getLogger(__name__)

_PACKET_BYTES = 1 << 16
_MAX_DESCRIPTORS = 4
"""The agent sends at most two slots in one message."""

_MAX_UNREAD_BYTES = 1 << 14
"""No sign of life is sent while the agent has so much left to read: while the agent is stopped, signs must not fill the
socket."""

NO_STEP_S = 5.0
"""Seconds without a step after which signs of life tell what the flight recorder says. No hang is found sooner."""

FIRST_PERIOD = 8
"""Steps until ranks with every="auto" first look for another interval, and until they look for the second time."""

_MAX_UINT32 = (1 << 32) - 1

_TOUCHING_THREADS = min(4, len(os.sched_getaffinity(0)))
"""Threads that touch the memory of slots before the first snapshot."""
_MAX_READS = 8
"""Reads of shards that wait for an answer at the same time: the socket has room for that many."""

_SLOTS_TIMEOUT_S = 120.0
"""Seconds that the agent may take to allocate slots: large slots take long, because all their pages are allocated."""


@dataclass(frozen=True)
class StartPoint:
    """What a rank starts from: step 0, or `shard` (its bytes in a private mapping), or a durable folder, or the shards
    of another number of ranks (`written_ranks`), which `AgentConnection.read_shards` reads. `skip_to_step`: the next
    batch is the one after that of this step, if it is a later step."""

    step: int = 0
    generation: int = 0
    shard: memoryview | None = None
    durable_path: str = ""
    written_ranks: int = 0
    skip_to_step: int = 0

    @property
    def is_in_memory(self) -> bool:
        """Whether agents hold the state in memory."""
        return self.shard is not None or self.written_ranks > 0


@dataclass(frozen=True)
class SnapshotCost:
    """What a snapshot has cost. `stall_s`: seconds for which it held the training up. `every`: steps between two
    snapshots now. `auto`: they follow from costs and failures."""

    stall_s: float = 0.0
    every: int = 1
    auto: bool = False


class AgentConnection:
    """The rank's end of the connection.

    Args:
        descriptor: a connected SOCK_SEQPACKET socket. The connection owns it.
        rank, generation: identify this process to the agent.
    """

    def __init__(self, descriptor: int, rank: int, generation: int) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._rank = rank
        self._generation = generation
        self._free_slots: dict[int, int] = {}
        """For each slot that may be written: the first step that it is meant for; 0: any step."""
        self._fill_counts: dict[int, int] = {}
        self.slots: list[memoryview] = []
        self.alive = True
        self.stop_reason = ""
        self.first_due: Callable[[int], int] = lambda step: step
        """Returns the first due step from a step on. By default every step is due."""
        self.advised_interval = (1, FIRST_PERIOD)
        """What the agent of rank 0 finds best: steps between two snapshots, and until ranks look again."""
        self._closing = threading.Lock()
        """Held while a sign of life is sent: its thread must not use the number of a closed descriptor."""
        self._slots_s = 0.0
        """Seconds in which the slots were made, until they are reported."""
        self._signs: SignsOfLife | None = None
        self._progressed_at = inf
        """When the newest step was reported (monotonic seconds); infinite before the first."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "AgentConnection | None":
        """The connection whose descriptor the agent named in MUSTER_AGENT_FD; None outside Muster."""
        if "MUSTER_AGENT_FD" not in environ:
            return None
        stack_file.register()
        connection = cls(int(environ["MUSTER_AGENT_FD"]), int(environ["RANK"]), int(environ["MUSTER_GENERATION"]))
        connection.start_signs_of_life()
        return connection

    def start_signs_of_life(self) -> None:
        """From now on, tell the agent once a second that this process runs Python."""
        self._signs = SignsOfLife(self.send_sign_of_life)
        self._signs.start()

    def join(self) -> StartPoint:
        """Identify this process to the agent, and wait for the state to start from.

        Raises:
            RestoreError: a state to start from exists and can't be had.
        """
        side = compatibility.own_side(f"the library of rank {self._rank}")
        release = compatibility.to_wire(side)
        self._send(RankMessage(join=RankJoin(rank=self._rank, generation=self._generation, release=release)))
        while self.alive:
            message, fds = self._receive(None)
            if message is None or not message.HasField("restore"):
                continue
            agent = compatibility.read("this node's agent", message.restore.release)
            if reason := compatibility.misfit(side, agent):
                raise RestoreError(reason)
            return _start_point(message.restore, fds)
        raise RestoreError("the agent ended before it said where to start from")

    def read_shards(self, reads: Iterable[RankRead]) -> Iterator[tuple[AgentRead, int]]:
        """Have the agent bring parts of the shards that another number of ranks wrote.

        Returns:
            Its answers as they come, in any order, each with the descriptor of a memfd in which all is verified that
            this rank has asked for and has an answer to. The caller closes it.

        Raises:
            RestoreError: the agent can't bring a part, or has ended.
        """
        left, waiting = list(reads)[::-1], 0
        while left or waiting:
            while left and waiting < _MAX_READS:
                self._send(RankMessage(read=left.pop()))
                waiting += 1
            message, fds = self._receive(None)
            if not self.alive:
                raise RestoreError("the agent ended before it had brought the state")
            if message is None or not message.HasField("read"):
                continue
            waiting -= 1
            if message.read.refused:
                raise RestoreError(message.read.refused)
            (descriptor,) = fds
            yield message.read, descriptor

    def end_reads(self) -> None:
        """Tell the agent that this rank reads no more shards."""
        self._send(RankMessage(read=RankRead(done=True)))

    def report_load(self, load: Loaded) -> None:
        """Report how far this rank is with a durable checkpoint."""
        told = RankLoad(
            folder=load.folder,
            version=load.version.to_wire(),
            bytes=load.size,
            loaded=load.loaded,
            done=load.done,
            damage=load.damage,
        )
        self._send(RankMessage(load=told))

    def request_slots(self, slot_bytes: int, header_bytes: int, shared_bytes: int = 0) -> str:
        """Ask for two slots of this size. Their bytes are in `slots` afterwards.

        `shared_bytes`: those that other ranks hold as well.

        Returns:
            Why there are no slots; empty if there are.
        """
        self.slots = []
        self._free_slots.clear()
        layout = RankLayout(slot_bytes=slot_bytes, header_bytes=header_bytes, shared_bytes=shared_bytes)
        asked_at = time.monotonic()
        self._send(RankMessage(layout=layout))
        deadline = asked_at + _SLOTS_TIMEOUT_S
        while self.alive and time.monotonic() < deadline:
            message, fds = self._receive(deadline)
            if message is None or not message.HasField("slots"):
                continue
            refused = self._map_slots(message.slots, fds)
            self._slots_s = time.monotonic() - asked_at
            return refused
        return "the agent gave no answer"

    def _map_slots(self, slots: AgentSlots, fds: list[int]) -> str:
        try:
            if slots.refused:
                return slots.refused
            self._free_slots.clear()
            self._fill_counts.clear()
            self.slots = [memoryview(map_touched(fd, slots.slot_bytes, _TOUCHING_THREADS)) for fd in fds]
            return ""
        finally:
            for fd in fds:
                os.close(fd)

    def report_progress(self, step: int, *, skipped: bool = False, step_times: Iterable[StepTime] = ()) -> None:
        """Report that an optimizer step is finished. `skipped`: its snapshot was due, and no slot was free.
        `step_times`: steps measured since the last report."""
        self._progressed_at = time.monotonic()
        progress = RankProgress(step=step, snapshot_skipped=skipped, step_times=step_times)
        self._send(RankMessage(progress=progress))

    def report_not_finite(self, step: int, words: str) -> None:
        """Report that the script gave a value that is no finite number."""
        self._send(RankMessage(not_finite=RankNotFinite(step=step, words=words)))

    def send_page(self, page: int) -> bool:
        """Give the agent the page in which this rank says how its training goes. `page`: its descriptor."""
        return send_page(self._socket, page)

    def declare_phase(self, phase: str) -> None:
        """Declare a phase in which this rank finishes no step; empty: the phase is over."""
        self._send(RankMessage(declared=RankDeclared(phase=phase)))

    def report_filled(self, slot: int, step: int, cost: SnapshotCost = SnapshotCost()) -> None:
        """Report that a slot holds the state after `step` steps. The agent owns the slot until it is free again."""
        self._free_slots.pop(slot, None)
        self._fill_counts[slot] = self._fill_counts.get(slot, 0) + 1
        stall_us = min(round(cost.stall_s * 1e6), _MAX_UINT32)
        slots_us, self._slots_s = round(self._slots_s * 1e6), 0.0
        filled = RankFilled(
            slot=slot, step=step, stall_us=stall_us, every=cost.every, auto_interval=cost.auto, slots_us=slots_us
        )
        self._send(RankMessage(filled=filled))

    def report_stopped(self, step: int) -> None:
        """Report that `step` is the last step of this rank, as the agent has asked."""
        self._send(RankMessage(stopped=RankStopped(step=step)))

    def send_sign_of_life(self, last: bool = False) -> bool:
        """Tell the agent that this process runs Python, without waiting. A thread of its own may call this.

        `last`: the interpreter is about to end. Returns False once the connection is lost.
        """
        message = RankMessage(alive=RankAlive(last=last, entered_collectives=self._entered_collectives()))
        with self._closing:
            if not self.alive:
                return False
            try:
                if _unread_bytes(self._socket) < _MAX_UNREAD_BYTES:
                    self._socket.send(message.SerializeToString(), socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            except OSError:
                return False  # the training's own thread will notice it
            return True

    def _entered_collectives(self) -> int | None:
        """None while the rank makes steps, for nobody has to know then. None before its first step, too: PyTorch's
        recorder is not safe to read while the script makes process groups."""
        quiet = time.monotonic() - self._progressed_at >= NO_STEP_S
        return flight_recorder.entered_collectives() if quiet else None

    def read_pending(self) -> None:
        """Read all messages that have arrived, without waiting. This takes microseconds if none has."""
        while self.alive and self._receive(0.0)[0] is not None:
            pass

    def slot_for_scheduled_step(self, step: int, wait_s: float = 0.0) -> int | None:
        """The slot for the snapshot of `step`; None if `step` is not the step that all ranks keep next.

        Args:
            step: a finished step for which a snapshot is due.
            wait_s: seconds to wait for a commit decision. The decision about the last kept step names the next one.
        """
        return self._wait_for_slot(lambda: self._scheduled_slot(step), wait_s)

    def slot_for_any_step(self, step: int, wait_s: float) -> int | None:
        """Any slot that may be written, whatever step it is meant for; None if none is free within `wait_s` seconds.

        All ranks keep the first and the last step, whether these steps are scheduled or not.
        """
        return self._wait_for_slot(lambda: self._any_slot(step), wait_s)

    def _wait_for_slot(self, choose: Callable[[], int | None], wait_s: float) -> int | None:
        deadline = time.monotonic() + wait_s
        while True:
            self.read_pending()
            slot = choose()
            may_arrive = self.alive and bool(self.slots) and time.monotonic() < deadline
            if slot is not None or self._free_slots or not may_arrive:
                return slot
            self._receive(deadline)

    def _scheduled_slot(self, step: int) -> int | None:
        for slot, from_step in sorted(self._free_slots.items()):
            if from_step > step:
                continue
            if not self._report_missed_step(from_step, step):
                return slot
            del self._free_slots[slot]
        return None

    def _any_slot(self, step: int) -> int | None:
        slot = min(self._free_slots, default=None)
        if slot is not None:
            self._report_missed_step(self._free_slots[slot], step)
        return slot

    def _report_missed_step(self, from_step: int, step: int) -> bool:
        """Report a slot that arrived too late for the first due step from `from_step` on; returns whether it did.

        All other ranks have kept that step, and have no slot for another step before that step is decided.
        """
        if from_step == 0 or (first_due := self.first_due(from_step)) >= step:
            return False
        self.report_progress(first_due, skipped=True)
        return True

    def close(self) -> None:
        """Close the connection and unmap the slots."""
        if self._signs is not None:
            self._signs.stop()
        with self._closing:
            self.alive, self.slots, self._free_slots = False, [], {}
            self._socket.close()

    def _send(self, message: RankMessage) -> None:
        if not self.alive:
            return
        try:
            self._socket.send(message.SerializeToString())
        except OSError as error:
            self._on_lost(str(error))

    def _receive(self, deadline: float | None) -> tuple[AgentRankMessage | None, list[int]]:
        """One message. Waits up to the monotonic time `deadline`; 0: does not wait; None: waits for ever."""
        if deadline != 0.0:
            left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            if not self._poll.poll(left_ms):
                return None, []
        fds = array.array("i")
        ancillary_bytes = socket.CMSG_SPACE(_MAX_DESCRIPTORS * fds.itemsize)
        try:
            flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            data, ancillary, _, _ = self._socket.recvmsg(_PACKET_BYTES, ancillary_bytes, flags)
        except BlockingIOError:
            return None, []
        except OSError as error:
            data, ancillary = b"", []
            log.debug("agent: %s", error)
        if not data:
            self._on_lost("it closed the connection")
            return None, []
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        message = AgentRankMessage.FromString(data)
        self._apply(message)
        return message, list(fds)

    def _apply(self, message: AgentRankMessage) -> None:
        if message.HasField("slot_free"):
            free = message.slot_free
            if free.fills == self._fill_counts.get(free.slot, 0):
                self._free_slots[free.slot] = free.from_step
        elif message.HasField("interval"):
            self.advised_interval = message.interval.every, message.interval.period
        elif message.HasField("stop"):
            self.stop_reason = message.stop.reason or "the agent asks for it"

    def _on_lost(self, reason: str) -> None:
        if self.alive:
            log.warning("the agent is gone (%s): no more snapshots", reason)
        self.alive = False
        self._free_slots.clear()


def _unread_bytes(sock: socket.socket) -> int:
    """Bytes of memory for what was sent and not read yet."""
    return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, struct.pack("i", 0)))[0])


def _start_point(restore: AgentRestore, fds: list[int]) -> StartPoint:
    try:
        if restore.refused:
            raise RestoreError(restore.refused)
        if not restore.HasField("version"):
            return StartPoint(durable_path=restore.durable_path, skip_to_step=restore.skip_to_step)
        if restore.written_ranks:
            version = restore.version
            return StartPoint(version.step, version.generation, written_ranks=restore.written_ranks)
        if len(fds) != 1:
            raise CheckpointError(f"the agent sent {len(fds)} descriptors with the state, not 1")
        # A private mapping: torch needs writable memory, and the slot itself must not change.
        private = mmap.mmap(fds[0], restore.bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return StartPoint(restore.version.step, restore.version.generation, memoryview(private))
    finally:
        for fd in fds:
            os.close(fd)
