"""The Unix sockets between this agent and its ranks: packets in both directions, memfds beside them.

The sockets drop a rank that can't be reached any more. The rank supervisor reports the end of its process.
"""

import array
import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from math import inf

from google.protobuf.message import DecodeError

from muster.v1.rank_pb2 import AgentRankMessage, AgentSlotFree, AgentStop, RankMessage

log = logging.getLogger(__name__)

PACKET_BYTES = 1 << 16
"""The largest packet that a rank may send."""


class RankSockets:
    """One socket for each rank.

    Args:
        on_message: called with rank, generation and each message, on the event loop.
        on_page: called with rank, generation and the descriptor of a page that the rank has sent. It owns the
            descriptor.
    """

    def __init__(
        self,
        on_message: Callable[[int, int, RankMessage], None],
        on_page: Callable[[int, int, int], None] = lambda rank, generation, page: os.close(page),
    ) -> None:
        self._on_message = on_message
        self._on_page = on_page
        self._sockets: dict[int, tuple[int, socket.socket]] = {}
        self._stop: AgentRankMessage | None = None
        self._last_stopped = inf

    def open(self, rank: int, generation: int) -> socket.socket:
        """Make a socket pair and serve one end; returns the rank's end (inheritable, blocking)."""
        self._close(rank)
        agent_end, rank_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        agent_end.setblocking(False)
        rank_end.set_inheritable(True)
        self._sockets[rank] = (generation, agent_end)
        asyncio.get_running_loop().add_reader(agent_end, self._on_readable, rank, generation, agent_end)
        self._ask_to_stop(rank, generation)
        return rank_end

    def generation(self, rank: int) -> int | None:
        """The generation of the connected rank; None if the rank is not connected."""
        return self._sockets[rank][0] if rank in self._sockets else None

    def send(self, rank: int, message: AgentRankMessage, fds: Sequence[int] = ()) -> None:
        """Send one message. A rank that has closed its end is dropped once all of its messages are read."""
        if rank not in self._sockets:
            return
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sockets[rank][1].sendmsg([message.SerializeToString()], ancillary)
        except (BrokenPipeError, ConnectionResetError):
            log.info("rank %d has closed its socket", rank)  # its last messages may still wait to be read
        except OSError as error:
            log.warning("rank %d can't be sent a message: %s", rank, error)
            self._close(rank)

    def send_in(self, generation: int, rank: int, message: AgentRankMessage, *fds: int) -> None:
        """Send a message to a rank if it is of this generation."""
        if self.generation(rank) == generation:
            self.send(rank, message, fds)

    def grant_slot(self, rank: int, slot: int, from_step: int, fill_count: int) -> None:
        """Give a rank a free slot for the first due step from `from_step` on.

        `fill_count`: how often the rank has filled the slot. A rank ignores a grant with another count as outdated.
        """
        free = AgentSlotFree(slot=slot, from_step=from_step, fills=fill_count)
        self.send(rank, AgentRankMessage(slot_free=free))

    def stop(self, reason: str, last_generation: float = inf) -> None:
        """Ask all ranks up to `last_generation` for a planned stop. Such ranks that connect later are asked too: all
        ranks have to agree."""
        self._stop, self._last_stopped = AgentRankMessage(stop=AgentStop(reason=reason)), last_generation
        for rank, (generation, _) in list(self._sockets.items()):
            self._ask_to_stop(rank, generation)

    def _ask_to_stop(self, rank: int, generation: int) -> None:
        if self._stop is not None and generation <= self._last_stopped:
            self.send(rank, self._stop)

    def close_rank(self, rank: int, generation: int) -> None:
        """Close the socket of a rank of this generation."""
        if self.generation(rank) == generation:
            self._close(rank)

    def read_pending(self, rank: int, generation: int) -> None:
        """Read at once all messages that a rank of this generation has sent so far."""
        current, sock = self._sockets.get(rank, (0, None))
        if sock is not None and current == generation:
            self._on_readable(rank, current, sock)

    def close_up_to(self, generation: int) -> None:
        """Close the sockets of all ranks up to `generation`, after all of their messages are read."""
        for rank, (current, _) in list(self._sockets.items()):
            if current <= generation:
                self.read_pending(rank, current)
                self._close(rank)

    def _close(self, rank: int) -> None:
        _, sock = self._sockets.pop(rank, (0, None))
        if sock is not None:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()

    def _on_readable(self, rank: int, generation: int, sock: socket.socket) -> None:
        while self._sockets.get(rank) == (generation, sock):
            try:
                data, descriptors = _receive(sock)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The rank closed its end before it had read all messages. The kernel reports this once; the rank's own
                # last messages follow.
                continue
            except OSError as error:
                log.info("rank %d: %s", rank, error)
                data, descriptors = b"", array.array("i")
            if not data:
                self._close(rank)
                return
            try:
                message = RankMessage.FromString(data)
            except DecodeError:
                log.error("rank %d sent a packet that is no message: its socket is closed", rank)
                self._close(rank)
                message = None
            self._take_descriptors(rank, generation, message, descriptors)
            if message is None:
                return
            self._on_message(rank, generation, message)

    def _take_descriptors(
        self, rank: int, generation: int, message: RankMessage | None, descriptors: Iterable[int]
    ) -> None:
        """Pass a page on. What else a rank sends is closed."""
        for descriptor in descriptors:
            if message is not None and message.HasField("page"):
                self._on_page(rank, generation, descriptor)
            else:
                os.close(descriptor)


def _receive(sock: socket.socket) -> tuple[bytes, "array.array[int]"]:
    """A packet, and the descriptor that came with it, if one did."""
    descriptors = array.array("i")
    space = socket.CMSG_LEN(descriptors.itemsize)
    data, ancillary, _, _ = sock.recvmsg(PACKET_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return data, descriptors
