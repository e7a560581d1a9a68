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
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc.aio
from rich.console import Console

from benchmarks.bench_recovery import FAULTS, PHASES, Fault, Figures, measure_fault
from muster.daemon.agent.failure_detector.peers import AgentIdentity, PeerChannels, PeerService, make_agent_server
from muster.daemon.transport import authority, call_binding
from muster.daemon.transport.channel import bind
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.transport.server_limits import agent_limits
from muster.daemon.transport.tls import ServerKey, certificate_name
from muster.slurm.cluster.cluster import Cluster
from muster.slurm.cluster.spec import ClusterSpec
from muster.slurm.cluster.training import Training, TrainingSpec
from muster.v1 import peer_pb2

OUTPUT = Path("build/tls_overhead.json")
MESSAGE_BYTES = 512 << 10
"""As muster.checkpoint.store.replication.transfer sends them."""


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


class _Pieces:
    """Serves pieces of random bytes, as a checkpoint service does."""

    def __init__(self, mib: int) -> None:
        self._data, self._count = os.urandom(MESSAGE_BYTES), (mib << 20) // MESSAGE_BYTES

    async def Fetch(self, request: peer_pb2.FetchRequest, context: Any) -> AsyncIterator[peer_pb2.ShardData]:
        for number in range(self._count):
            yield peer_pb2.ShardData(offset=number * MESSAGE_BYTES, data=self._data)


def _serve(secret: Path, mib: int, parent: Connection) -> None:
    asyncio.run(_serve_until_told(secret, mib, parent))


async def _serve_until_told(secret: Path, mib: int, parent: Connection) -> None:
    issuing, key = authority.Authority.create("bench"), ServerKey()
    key.use(issuing.issue(key.public_key, [certificate_name(call_binding.name_of_agent("g", "n"))]))
    identity, shards = AgentIdentity("g", "n", "i", os.getuid()), _Pieces(mib)
    service = PeerService(identity, shards, lambda: None)  # type: ignore[arg-type]  # fetches only
    server: grpc.aio.Server = make_agent_server(
        SecretCredentials(secret), agent_limits(members=2), identity, service, tls=True
    )
    ports = {"tls": bind(server, "127.0.0.1:0", key.certificates()), "plain": bind(server, "127.0.0.1:0")}
    await server.start()
    parent.send((ports, issuing.pem))
    await asyncio.to_thread(parent.recv)
    await server.stop(None)


async def _measure_stream(
    secret: Path, ports: dict[str, int], authorities: bytes, rounds: int
) -> dict[str, list[float]]:
    """GB/s of each round, by kind of connection."""
    found: dict[str, list[float]] = {"tls": [], "plain": []}
    channels = PeerChannels(SecretCredentials(secret), "g", plain_text=False)
    channels.use_authorities(authorities)
    for _ in range(rounds):
        for kind in found:
            stub = channels.stub_for("n", f"127.0.0.1:{ports[kind]}", plain=kind == "plain")
            size, began = 0, time.perf_counter()
            async for message in stub.Fetch(peer_pb2.FetchRequest(gang_id="g")):
                size += len(message.data)
            found[kind].append(size / (time.perf_counter() - began) / 1e9)
    await channels.close()
    return found


def measure_shards(folder: Path, mib: int, rounds: int) -> dict[str, list[float]]:
    """GB/s of one stream of pieces between two processes over loopback, by kind of connection."""
    secret = folder / "secret"
    SecretCredentials.create(secret)
    ours, theirs = multiprocessing.Pipe()
    # gRPC does not survive a fork.
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(secret, mib, theirs))
    server.start()
    try:
        ports, authorities = ours.recv()
        return asyncio.run(_measure_stream(secret, ports, authorities, rounds))
    finally:
        ours.send("stop")
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
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            found = measure_shards(Path(folder), 1024, args.pairs)
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
