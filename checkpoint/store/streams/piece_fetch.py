"""The receiver's side of streams: pieces from one or several holders, straight into the memory where they belong.

Each stream has a connection and a thread. The streams take work from one list, so that a fast holder gives more than a
slow one, and what a lost holder has not given is asked of the others.
"""

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise

import xxhash

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.store.memory.pieces import Piece
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.streams import stream_sockets
from muster.checkpoint.store.streams.transport import FetchFailed, Holder

BATCH_PIECES = 8
"""Pieces of one request, at most: 32 MiB. A stream asks for the next ones before these have come."""

CHUNK_BYTES = 512 << 10
"""Bytes that are received and then digested, while they are still in the processor's cache."""

Connect = Callable[[str, int, str], socket.socket]
_Batch = range
"""Numbers of pieces that follow each other."""
_Nodes = frozenset[str]


class _Work:
    """The batches that nobody has taken yet, and the pieces that have come."""

    def __init__(self, holders: Sequence[Holder], wanted: Sequence[int]) -> None:
        self._lock = threading.Lock()
        self._holders = holders
        self._batches: dict[_Nodes, deque[_Batch]] = {}
        """By the nodes that have their pieces."""
        for nodes, batch in _batches(holders, wanted):
            self._batches.setdefault(nodes, deque()).append(batch)
        self._absent = set(wanted)
        self._failures: dict[str, str] = {}
        """What went wrong, by the node of the holder."""

    def holders_left(self) -> list[Holder]:
        """Holders that have a batch which nobody has taken."""
        with self._lock:
            usable = {node for nodes, batches in self._batches.items() if batches for node in nodes}
            return [h for h in self._holders if h.node in usable and h.node not in self._failures]

    def take(self, holder: Holder) -> tuple[_Nodes, _Batch] | None:
        """The next batch that a holder has and nobody has taken. Batches that few holders have come first."""
        with self._lock:
            mine = [nodes for nodes, batches in self._batches.items() if batches and holder.node in nodes]
            if not mine or holder.node in self._failures:
                return None
            nodes = min(mine, key=lambda nodes: len(nodes - self._failures.keys()))
            return nodes, self._batches[nodes].popleft()

    def got(self, number: int) -> None:
        """A piece has come, and is verified."""
        with self._lock:
            self._absent.discard(number)

    def failed(self, holder: Holder, asked: Iterable[tuple[_Nodes, _Batch]], reason: str) -> None:
        """A holder is not asked again. Others may give what it was `asked` for and has not given."""
        with self._lock:
            self._failures.setdefault(holder.node, reason)
            for nodes, batch in asked:
                if len(batch):
                    self._batches[nodes].append(batch)

    def raise_if_incomplete(self) -> None:
        """Raises FetchFailed: some pieces have not come."""
        if self._absent:
            reasons = "; ".join(f"{node}: {reason}" for node, reason in self._failures.items())
            raise FetchFailed(f"{len(self._absent)} pieces have not come ({reasons or 'no holder has them'})")


def _batches(holders: Sequence[Holder], wanted: Sequence[int]) -> Iterator[tuple[_Nodes, _Batch]]:
    """Runs of wanted pieces that the same nodes have, in batches. Pieces that nobody has are in none."""
    if not wanted:
        return
    ordered = sorted(wanted)
    nodes = {n: frozenset(h.node for h in holders if n in h.numbers) for n in ordered}
    breaks = [i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if b != a + 1 or nodes[a] != nodes[b]]
    for begin, end in pairwise([0, *breaks, len(ordered)]):
        for start in range(begin, end, BATCH_PIECES):
            last = ordered[min(start + BATCH_PIECES, end) - 1]
            yield nodes[ordered[start]], range(ordered[start], last + 1)


class _Stream:
    """One connection to one holder. `run` blocks: it has a thread of its own."""

    def __init__(
        self, holder: Holder, pieces: Sequence[Piece], memory: memoryview, work: _Work, connect: Connect
    ) -> None:
        self._holder, self._pieces, self._memory, self._work = holder, pieces, memory, work
        self._connect = connect
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._aborted = False

    def abort(self) -> None:
        """End `run` soon."""
        with self._lock:
            self._aborted = True
            if self._connection is not None:
                stream_sockets.cut(self._connection)

    def run(self) -> None:
        """Fetch until nothing is left that this holder has. What goes wrong is noted in the work."""
        asked: deque[tuple[_Nodes, _Batch]] = deque()
        try:
            self._fetch_all(asked)
        except (BlockingIOError, TimeoutError):
            self._work.failed(self._holder, asked, f"nothing came for {stream_sockets.QUIET_S:.0f} s")
        except (OSError, CorruptShard) as error:
            self._work.failed(self._holder, asked, str(error))

    def _fetch_all(self, asked: deque[tuple[_Nodes, _Batch]]) -> None:
        access = self._holder.access
        with self._connect(self._holder.host, access.port, access.certificate) as connection:
            with self._lock:
                if self._aborted:
                    return
                self._connection = connection
            connection.sendall(access.token)
            self._ask(connection, asked)
            while asked:
                self._ask(connection, asked)
                nodes, batch = asked[0]
                for number in batch:
                    self._receive(connection, number)
                    self._work.got(number)
                    asked[0] = nodes, range(number + 1, batch.stop)
                asked.popleft()
                if not asked:  # a batch that another stream has given back
                    self._ask(connection, asked)

    def _ask(self, connection: socket.socket, asked: deque[tuple[_Nodes, _Batch]]) -> None:
        taken = self._work.take(self._holder)
        if taken is not None:
            asked.append(taken)
            batch = taken[1]
            connection.sendall(stream_sockets.REQUEST.pack(batch[0], len(batch)))

    def _receive(self, connection: socket.socket, number: int) -> None:
        piece, digest = self._pieces[number], xxhash.xxh3_128()
        target = self._memory[piece.offset : piece.offset + piece.length]
        for start in range(0, piece.length, CHUNK_BYTES):
            chunk = target[start : start + CHUNK_BYTES]
            stream_sockets.read_into(connection, chunk)
            digest.update(chunk)
        if digest.digest() != piece.digest:
            raise CorruptShard(f"piece {number} (offset {piece.offset}, {piece.length} bytes) arrived damaged")


async def fetch_pieces(
    holders: Sequence[Holder],
    pieces: Sequence[Piece],
    wanted: Sequence[int],
    memory: SealedMemory,
    stream_count: int,
    connect: Connect = stream_sockets.connect,
) -> None:
    """Fetch the numbered pieces into `memory`, over `stream_count` streams or one for each holder.

    See `PieceTransport.fetch`. `connect` opens a connection to host, port and certificate.

    Raises:
        FetchFailed: no holder has given some piece.
    """
    work = _Work(holders, wanted)
    while left := work.holders_left():
        # A second round, if a lost holder has left work to others who had finished already.
        per_holder = max(1, min(stream_count // len(left), -(-len(wanted) // BATCH_PIECES)))
        await _run([_Stream(holder, pieces, memory.view, work, connect) for holder in left for _ in range(per_holder)])
    work.raise_if_incomplete()


async def _run(streams: Sequence[_Stream]) -> None:
    """Run streams to their end, each in a thread. Cancelling this ends them first."""
    loop = asyncio.get_running_loop()
    pool = ThreadPoolExecutor(len(streams), thread_name_prefix="fetch")
    running = asyncio.gather(*(loop.run_in_executor(pool, stream.run) for stream in streams))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        for stream in streams:
            stream.abort()
        await _until_done(running)  # a thread may still write to the memory
        raise
    finally:
        pool.shutdown(wait=False)


async def _until_done(running: "asyncio.Future[list[None]]") -> None:
    """Wait for the threads, however often this task is cancelled. They end within one connection's time limit."""
    while not running.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({running})
