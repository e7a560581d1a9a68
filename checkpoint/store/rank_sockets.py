"""The sockets between this agent and its ranks: packets in, packets out, memfds beside them.

A rank that can't be spoken to any more is dropped; its end is reported by whoever watches its process.
"""

import array
import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from muster.v1.rank_pb2 import AgentRankMessage, AgentSlotFree, AgentStop, RankMessage

log = logging.getLogger(__name__)

PACKET_BYTES = 1 << 16


class RankSockets:
    """One socket a rank.

    Args:
        received: called with rank, generation and each message, on the event loop.
    """

    def __init__(self, received: Callable[[int, int, RankMessage], None]) -> None:
        self._received = received
        self._ends: dict[int, tuple[int, socket.socket]] = {}
        self._stop: AgentRankMessage | None = None

    def open(self, rank: int, generation: int) -> socket.socket:
        """Make a pair, serve one end, return the rank's (inheritable, blocking)."""
        self._drop(rank)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        theirs.set_inheritable(True)
        self._ends[rank] = (generation, ours)
        asyncio.get_running_loop().add_reader(ours, self._readable, rank, generation, ours)
        if self._stop is not None:
            self.send(rank, self._stop)
        return theirs

    def generation(self, rank: int) -> int | None:
        """The generation of the rank that is connected; None: none is."""
        return self._ends[rank][0] if rank in self._ends else None

    def send(self, rank: int, message: AgentRankMessage, fds: Sequence[int] = ()) -> None:
        """Send one message. A rank that is gone is dropped, quietly, once all that it has said was heard."""
        if rank not in self._ends:
            return
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._ends[rank][1].sendmsg([message.SerializeToString()], beside)
        except (BrokenPipeError, ConnectionResetError):
            log.info("rank %d has hung up", rank)  # its last words may wait to be read
        except OSError as error:
            log.warning("rank %d can't be told: %s", rank, error)
            self._drop(rank)

    def free(self, rank: int, slot: int, from_step: int, fills: int) -> None:
        """Lend a rank a slot, which it has filled so many times, for the first due step from a step on."""
        free = AgentSlotFree(slot=slot, from_step=from_step, fills=fills)
        self.send(rank, AgentRankMessage(slot_free=free))

    def stop(self, reason: str) -> None:
        """Ask all ranks for a planned stop: those, too, that come later, for the others wait for their word."""
        self._stop = AgentRankMessage(stop=AgentStop(reason=reason))
        for rank in list(self._ends):
            self.send(rank, self._stop)

    def hang_up(self, rank: int, generation: int) -> None:
        """Close the line to a rank of this generation."""
        if self.generation(rank) == generation:
            self._drop(rank)

    def hear(self, rank: int, generation: int) -> None:
        """Take in at once what a rank of this generation has said so far."""
        theirs, sock = self._ends.get(rank, (0, None))
        if sock is not None and theirs == generation:
            self._readable(rank, theirs, sock)

    def drop(self, generation: int) -> None:
        """Close the sockets of all ranks up to `generation`; what they have said before is heard."""
        for rank, (theirs, _) in list(self._ends.items()):
            if theirs <= generation:
                self.hear(rank, theirs)
                self._drop(rank)

    def _drop(self, rank: int) -> None:
        _, sock = self._ends.pop(rank, (0, None))
        if sock is not None:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()

    def _readable(self, rank: int, generation: int, sock: socket.socket) -> None:
        while self._ends.get(rank) == (generation, sock):
            try:
                data = sock.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # It has closed its end with words of ours unread. The kernel says so once, before its own last words.
                continue
            except OSError as error:
                log.info("rank %d: %s", rank, error)
                data = b""
            if not data:
                self._drop(rank)
                return
            try:
                message = RankMessage.FromString(data)
            except DecodeError:
                log.error("rank %d sent a packet that is no message: dropped", rank)
                self._drop(rank)
                return
            self._received(rank, generation, message)
