"""`make bench-tls`: what TLS costs a recovery, in pairs.

Two container clusters, one with TLS and one with plain text, take turns: one job with one fault on the first, then the
same on the second, and the other way round in the next pair. Nothing else differs. The output has each pair, and for
each fault the medians, the pairs' differences beside the spread of the plain runs, and how much longer each phase
took. The last line is a JSON object, which is also written to build/tls_overhead.json: `tls_overhead_percent` is the
median of all pairs' differences.

The state of the ranks is small, so that connections and control messages are measured, not the bytes of shards. Those
go in plain text by default. `--shards` measures them: one stream of pieces over loopback, with and without TLS.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.bench_recovery import FAULTS, PHASES, Fault, Figures, measure_fault
from muster.checkpoint.format.layout import PIECE_BYTES
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import Piece, digest_of, piece_ranges, shard_digest
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.memory.shards import Shard
from muster.checkpoint.store.streams.piece_fetch import fetch_pieces
from muster.checkpoint.store.streams.socket_transport import SocketTransport
from muster.checkpoint.store.streams.stream_sockets import StreamSecurity
from muster.checkpoint.store.streams.transport import Holder, PieceAccess
from muster.daemon.transport.tls import pinned_context
from muster.slurm.testcluster.cluster import Cluster
from muster.slurm.testcluster.spec import ClusterSpec
from muster.slurm.testcluster.training import Training, TrainingSpec
from muster.v1.agent_pb2 import TIER_OWN

OUTPUT = Path("build/tls_overhead.json")

Recovery = dict[str, float]
"""Seconds of each phase of a recovery, by its name in PHASES."""


@dataclass(frozen=True)
class Pair:
    """One recovery with TLS and one in plain text."""

    tls: Recovery
    plain: Recovery

    @property
    def tls_s(self) -> float:
        """Seconds from the fault to the first step."""
        return sum(self.tls.values())

    @property
    def plain_s(self) -> float:
        """Seconds from the fault to the first step."""
        return sum(self.plain.values())

    @property
    def difference_percent(self) -> float:
        """How much longer it took with TLS."""
        return 100 * (self.tls_s / self.plain_s - 1)


def measure_pairs(clusters: dict[str, Cluster], fault: Fault, count: int, console: Console) -> list[Pair]:
    """`count` pairs of one fault."""
    pairs = []
    for number in range(count):
        found = {}
        for kind in ("tls", "plain") if number % 2 else ("plain", "tls"):
            found[kind] = _one(clusters[kind], fault, f"{fault.name}-{number}")
        pairs.append(Pair(found["tls"], found["plain"]))
        console.print(f"{fault.name}: {pairs[-1].tls_s:.2f} s with TLS, {pairs[-1].plain_s:.2f} s in plain text")
        for phase in PHASES:
            console.print(f"    {phase}: {found['tls'][phase]:.3f} s, {found['plain'][phase]:.3f} s")
    return pairs


def _one(cluster: Cluster, fault: Fault, name: str) -> Recovery:
    cluster.restore_all()
    figures = Figures()
    with Training(cluster, TrainingSpec(name)) as training:
        training.submit()
        measure_fault(cluster, training, fault, figures)
        training.cancel()
    return {phase: seconds[0] for phase, seconds in figures.phases.items()}


def summary(pairs: dict[str, list[Pair]]) -> dict[str, Any]:
    """The JSON object of the last line."""
    every = [pair.difference_percent for of_fault in pairs.values() for pair in of_fault]
    found: dict[str, Any] = {
        name: {
            "tls_median_s": round(statistics.median(pair.tls_s for pair in of_fault), 3),
            "plain_median_s": round(statistics.median(pair.plain_s for pair in of_fault), 3),
            "difference_percent": sorted(round(pair.difference_percent, 1) for pair in of_fault),
            "plain_spread_s": round(max(p.plain_s for p in of_fault) - min(p.plain_s for p in of_fault), 3),
            "longer_by_s": {
                phase: round(statistics.median(pair.tls[phase] - pair.plain[phase] for pair in of_fault), 3)
                for phase in PHASES
            },
        }
        for name, of_fault in pairs.items()
    }
    return {**found, "tls_overhead_percent": round(statistics.median(every), 1)}


# -- one stream of pieces --------------------------------------------------------------------------------------------


def _serve(mib: int, parent: Connection) -> None:
    """Grants a shard of random bytes over both kinds of stream until the parent speaks."""
    memory = SealedMemory("bench", mib << 20)
    for start in range(0, memory.size, PIECE_BYTES):
        memory.view[start : start + PIECE_BYTES] = os.urandom(PIECE_BYTES)
    pieces = tuple(Piece(o, n, digest_of(memory.view[o : o + n])) for o, n in piece_ranges(memory.size, ()))
    shard = Shard(0, Version(1, 1), TIER_OWN, pieces, shard_digest(pieces), memory, memory.close)
    with ExitStack() as stack:
        access = {}
        for kind, security in (("tls", StreamSecurity(*pinned_context())), ("plain", None)):
            transport = SocketTransport(socket.create_server(("127.0.0.1", 0)), security)
            stack.callback(transport.close)
            access[kind] = stack.enter_context(transport.grant(shard)).access
        parent.send((access, pieces))
        parent.recv()


async def _measure_streams(
    access: dict[str, PieceAccess], pieces: tuple[Piece, ...], rounds: int
) -> dict[str, list[float]]:
    """GB/s of each round, by kind of stream."""
    found: dict[str, list[float]] = {kind: [] for kind in access}
    size = sum(piece.length for piece in pieces)
    memory = SealedMemory("target", size)
    memory.view[:] = bytes(size)  # no round pays for the first touch
    numbers = range(len(pieces))
    for _ in range(rounds):
        for kind, how in access.items():
            began = time.perf_counter()
            await fetch_pieces([Holder("n", "127.0.0.1", how, frozenset(numbers))], pieces, numbers, memory, 1)
            found[kind].append(size / (time.perf_counter() - began) / 1e9)
    return found


def measure_shards(mib: int, rounds: int) -> dict[str, list[float]]:
    """GB/s of one stream of pieces between two processes over loopback, digests included, by kind of stream."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(mib, theirs))
    server.start()
    try:
        access, pieces = ours.recv()
        return asyncio.run(_measure_streams(access, pieces, rounds))
    finally:
        ours.send(None)
        server.join()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What TLS costs a recovery, in pairs.")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--faults", nargs="+", choices=[f.name for f in FAULTS], default=["xid", "node_crash"])
    parser.add_argument("--shards", action="store_true", help="only measure one stream of pieces")
    return parser.parse_args()


def main() -> int:
    """Measure, print, end the clusters."""
    args = arguments()
    console = Console(stderr=True)
    if args.shards:
        found = measure_shards(1024, args.pairs)
        rates = {kind: {"median": statistics.median(values), "worst": min(values)} for kind, values in found.items()}
        print(json.dumps({"shard_gb_per_s": rates}))
        return 0
    clusters = {kind: Cluster.up(ClusterSpec(nodes=10, plain_text=kind == "plain")) for kind in ("tls", "plain")}
    try:
        pairs = {f.name: measure_pairs(clusters, f, args.pairs, console) for f in FAULTS if f.name in args.faults}
    finally:
        for cluster in clusters.values():
            cluster.down()
    found_pairs = summary(pairs)
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(found_pairs, indent=2) + "\n")
    print(json.dumps(found_pairs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
