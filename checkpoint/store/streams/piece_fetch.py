"""The receiver's side of streams: pieces from one or several holders, straight into the memory where they belong.

Each stream has a connection and a thread. The streams take work from one list, so that a fast holder gives more than a
slow one, and what a lost holder has not given is asked of the others.

Only the receiver verifies. Of a piece that does not match, the holder is asked to verify its own bytes. If they have
changed, the piece comes from the other holders. If not, the way has damaged it, and it is asked for again.
"""

import asyncio
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from math import inf

import xxhash

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.store.memory.pieces import Piece
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.streams import stream_sockets
from muster.checkpoint.store.streams.transport import Arrivals, FetchFailed, Holder
from muster.daemon.host import clock
from muster.wording import counted

BATCH_PIECES = 8
"""Pieces of one request, at most: 32 MiB. A stream asks for the next ones before these have come."""

CHUNK_BYTES = 512 << 10
"""Bytes that are received and then digested, while they are still in the processor's cache."""

CHECK_S = 0.1
"""Seconds between two looks at how far the streams are."""

SLOW_S = 1.0
"""Seconds that the last streams of a fetch may take longer than others would, at least."""

SLOWER_TIMES = 4
"""How many times as long as others would need they may take beside."""

MOST_DAMAGED = 3
"""Pieces that the way from a holder may damage during a fetch: then the holder is not asked again."""

UNKNOWN_RATE = 20 << 20
"""Bytes a second that are expected of a holder which had nothing to give so far."""

Connect = Callable[[str, int, str], socket.socket]
_Batch = range
"""Numbers of pieces that follow each other."""
_Nodes = frozenset[str]


class _Work:
    """The batches that nobody has taken yet, and the pieces that have come."""

    def __init__(self, holders: Sequence[Holder], wanted: Sequence[int], arrivals: Arrivals | None) -> None:
        self._lock = threading.Lock()
        self._arrivals = arrivals
        self._holders = holders
        self._batches: dict[_Nodes, deque[_Batch]] = {}
        """By the nodes that have their pieces."""
        for nodes, batch in _batches(holders, wanted):
            self._batches.setdefault(nodes, deque()).append(batch)
        self._absent = set(wanted)
        self._failures: dict[str, str] = {}
        """Why a holder is not asked again, by its node."""
        self._changed: dict[str, str] = {}
        """Which piece has changed in a holder's memory, by its node."""
        self._damaged: Counter[str] = Counter()
        """How many pieces the way from a holder has damaged, by its node."""

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

    def got(self, number: int, holder: Holder) -> None:
        """A piece has come, and is verified."""
        if self._arrivals is not None:
            self._arrivals.arrived(number, holder.node)
        with self._lock:
            self._absent.discard(number)

    def got_changed(self, number: int, holder: Holder, nodes: _Nodes) -> None:
        """The holder's own bytes are not the piece any more. The others of `nodes` may give it."""
        with self._lock:
            self._changed.setdefault(holder.node, f"piece {number} has changed in its memory")
            if others := nodes - {holder.node}:
                self._batches.setdefault(others, deque()).append(range(number, number + 1))

    def got_damaged(self, number: int, holder: Holder, nodes: _Nodes) -> None:
        """The way has damaged the piece. It is asked for again.

        Raises:
            CorruptShard: this happens too often. Nothing is asked for again.
        """
        if self._arrivals is not None:
            self._arrivals.damaged(number, holder.node)
        with self._lock:
            self._damaged[holder.node] += 1
            if (count := self._damaged[holder.node]) >= MOST_DAMAGED:
                raise CorruptShard(f"{counted(count, 'piece')} arrived damaged")
            self._batches[nodes].append(range(number, number + 1))

    @property
    def is_complete(self) -> bool:
        """All pieces have come."""
        with self._lock:
            return not self._absent

    def has_untaken(self) -> bool:
        """Whether there is a batch that nobody has taken."""
        with self._lock:
            return any(self._batches.values())

    def others(self, holder: Holder) -> set[str]:
        """The nodes of the other holders that may still be asked."""
        with self._lock:
            return {h.node for h in self._holders} - self._failures.keys() - {holder.node}

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
            reasons = "; ".join(f"{node}: {reason}" for node, reason in (self._changed | self._failures).items())
            raise FetchFailed(
                f"{counted(len(self._absent), 'piece has', 'pieces have')} not come ({reasons or 'no holder has them'})"
            )


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
        self._question: socket.socket | None = None
        """The connection on which the holder is asked to verify a piece."""
        self._lock = threading.Lock()
        self._aborted = ""
        self._asked: deque[tuple[_Nodes, _Batch]] = deque()
        self._began = 0.0
        self._asked_bytes = self._received_bytes = 0
        self.ended = False
        self.rate_at_end = 0.0

    @property
    def node(self) -> str:
        """The holder's node."""
        return self._holder.node

    def abort(self, reason: str) -> bool:
        """End `run` soon. Returns whether it may still write to the memory meanwhile."""
        with self._lock:
            self._aborted = self._aborted or reason
            if self._connection is not None:
                stream_sockets.cut(self._connection)
            if self._question is not None:
                stream_sockets.cut(self._question)
            return self._connection is not None and not self.ended

    @property
    def rate(self) -> float:
        """Bytes a second so far; 0: nothing has come."""
        return self._received_bytes / max(clock.monotonic() - self._began, 1e-6) if self._began else 0.0

    def is_too_slow(self, work: _Work, rates: Mapping[str, float]) -> bool:
        """Whether others would bring what this stream was asked for much sooner. `rates`: of streams that have nothing
        to do any more, by their nodes."""
        asked = self._nodes_asked()
        if self.ended or not asked:
            return False
        able = frozenset.intersection(*asked) & work.others(self._holder)
        other_rate = max((rates.get(node, 0.0) for node in able), default=0.0)
        if not other_rate:
            return False
        left, passed_s = self._asked_bytes - self._received_bytes, clock.monotonic() - self._began
        needs_s = left / self.rate if self.rate else inf
        return passed_s > SLOW_S and needs_s > SLOW_S + SLOWER_TIMES * left / other_rate

    def _nodes_asked(self) -> list[_Nodes]:
        with self._lock:
            return [nodes for nodes, batch in self._asked if batch]

    def run(self) -> None:
        """Fetch until nothing is left that this holder has. What goes wrong is noted in the work."""
        try:
            self._fetch_all()
        except (BlockingIOError, TimeoutError):
            self._failed(f"nothing came for {stream_sockets.QUIET_S:.0f} s")
        except (OSError, CorruptShard) as error:
            self._failed(str(error))
        finally:
            self.rate_at_end = self.rate
            self.ended = True

    def _failed(self, reason: str) -> None:
        with self._lock:
            asked, self._asked = self._asked, deque()
        self._work.failed(self._holder, asked, self._aborted or reason)

    def _fetch_all(self) -> None:
        access = self._holder.access
        with self._connect(self._holder.host, access.port, access.certificate) as connection:
            with self._lock:
                if self._aborted:
                    return
                self._connection = connection
            connection.sendall(access.token)
            self._began = clock.monotonic()
            self._ask(connection)
            while self._asked:
                self._ask(connection)
                nodes, batch = self._asked[0]
                for number in batch:
                    if self._receive(connection, number):
                        self._work.got(number, self._holder)
                    else:
                        self._ask_again(number, nodes)
                    with self._lock:
                        self._asked[0] = nodes, range(number + 1, batch.stop)
                with self._lock:
                    self._asked.popleft()
                if not self._asked:  # a batch that another stream has given back
                    self._ask(connection)

    def _ask(self, connection: socket.socket) -> None:
        taken = self._work.take(self._holder)
        if taken is not None:
            batch = taken[1]
            with self._lock:
                self._asked.append(taken)
            self._asked_bytes += sum(self._pieces[number].length for number in batch)
            connection.sendall(stream_sockets.REQUEST.pack(batch[0], len(batch)))

    def _receive(self, connection: socket.socket, number: int) -> bool:
        """Receive a piece into its place; returns whether it matches its digest."""
        piece, digest = self._pieces[number], xxhash.xxh3_128()
        target = self._memory[piece.offset : piece.offset + piece.length]
        for start in range(0, piece.length, CHUNK_BYTES):
            chunk = target[start : start + CHUNK_BYTES]
            stream_sockets.read_into(connection, chunk)
            digest.update(chunk)
            self._received_bytes += len(chunk)
        return digest.digest() == piece.digest

    def _ask_again(self, number: int, nodes: _Nodes) -> None:
        """A piece does not match: ask for it again where it is intact.

        Raises:
            CorruptShard: the holder does not say whether its own bytes match, or too many pieces arrive damaged.
        """
        try:
            answer = self._verified_by_holder(number)
        except OSError as error:
            raise CorruptShard(f"piece {number} arrived damaged, and why is not known: {error}") from None
        if answer == stream_sockets.CHANGED:
            self._work.got_changed(number, self._holder, nodes)
        elif answer == stream_sockets.INTACT:
            self._work.got_damaged(number, self._holder, nodes)
        else:
            raise CorruptShard(f"piece {number} arrived damaged, and so did the answer why")

    def _verified_by_holder(self, number: int) -> bytes:
        """The holder's answer whether its own bytes of a piece match."""
        access, answer = self._holder.access, bytearray(len(stream_sockets.INTACT))
        with self._connect(self._holder.host, access.port, access.certificate) as connection:
            with self._lock:
                if self._aborted:
                    raise ConnectionError(self._aborted)
                self._question = connection
            stream_sockets.limit_waits(connection, stream_sockets.CONNECT_S)
            try:
                connection.sendall(access.token + stream_sockets.REQUEST.pack(number, 0))
                stream_sockets.read_into(connection, memoryview(answer))
            finally:
                with self._lock:
                    self._question = None
        return bytes(answer)


async def fetch_pieces(
    holders: Sequence[Holder],
    pieces: Sequence[Piece],
    wanted: Sequence[int],
    memory: SealedMemory,
    stream_count: int,
    connect: Connect = stream_sockets.connect,
    arrivals: Arrivals | None = None,
) -> None:
    """Fetch the numbered pieces into `memory`, over `stream_count` streams or one for each holder.

    See `PieceTransport.fetch`. `connect` opens a connection to host, port and certificate.

    Raises:
        FetchFailed: no holder has given some piece.
    """
    work = _Work(holders, wanted, arrivals)
    while left := work.holders_left():
        # A further round, if a lost or slow holder has left work to others who had finished already.
        per_holder = max(1, min(stream_count // len(left), -(-len(wanted) // BATCH_PIECES)))
        streams = [_Stream(holder, pieces, memory.view, work, connect) for holder in left for _ in range(per_holder)]
        await _run(streams, work)
    work.raise_if_incomplete()


async def _run(streams: Sequence[_Stream], work: _Work) -> None:
    """Run streams to their end, each in a thread. Cancelling this ends them first."""
    loop = asyncio.get_running_loop()
    pool = ThreadPoolExecutor(len(streams), thread_name_prefix="fetch")
    running = asyncio.gather(*(loop.run_in_executor(pool, stream.run) for stream in streams))
    try:
        while not running.done():
            await asyncio.wait({running}, timeout=CHECK_S)
            if work.is_complete and not any([stream.abort("all has come") for stream in streams]):
                return  # what is left has no connection yet
            _end_slow(streams, work)
    except asyncio.CancelledError:
        for stream in streams:
            stream.abort("cancelled")
        await _until_done(running)  # a thread may still write to the memory
        raise
    finally:
        pool.shutdown(wait=False)


def _end_slow(streams: Sequence[_Stream], work: _Work) -> None:
    """End streams for which the whole fetch waits, though others would bring the same pieces much sooner."""
    rates: dict[str, float] = {}
    for stream in streams:
        if stream.ended:
            rates[stream.node] = max(stream.rate_at_end or UNKNOWN_RATE, rates.get(stream.node, 0.0))
    if rates and not work.has_untaken():
        for stream in streams:
            if stream.is_too_slow(work, rates):
                stream.abort("much slower than the others")


async def _until_done(running: "asyncio.Future[list[None]]") -> None:
    """Wait for the threads, however often this task is cancelled. They end within one connection's time limit."""
    while not running.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({running})
