"""`make bench-core`: what the coordinator's decisions and its journal cost.

    python -m benchmarks.bench_core [--folder DIR]

- the journal: one event of a node's loss (three facts), written as the coordinator does, beside 12,500 nodes in 1,000
  gangs; `--folder` is where (default: a folder of its own in the current one, for /tmp may not be a disk);
- the pure core: heartbeats a second, and an agent's report, a gang's start and a recovery at several sizes;
- a restart: from the start of a process to its first answer, with 12,500 nodes and 1,000 gangs in the journal;
- the simulator: seeds a second, on all processors.

A table of all figures, then the main ones as one JSON object, the last line; in the units that the names say.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fleet import Fleet, TrainingGang
from benchmarks.restart import answered
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import apply
from muster.daemon.coordinator.core.state.state_tables import Verdict
from muster.daemon.coordinator.core.state.turn import Outcome
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.shell.agent_streams import AgentStream, AgentStreams
from muster.daemon.coordinator.shell.order_dispatch import OrderDispatcher
from muster.daemon.transport.identity import SecretCredentials
from muster.simulator import parallel

ROOT = Path(__file__).resolve().parents[1]
NODES, GANGS = 12_500, 1_000
SIZES = (64, 256, 1_024)
HEARTBEATS = 100_000
EVENTS = 2_000
REPORTS = 400
SILENCE_S = 10.0
SEEDS = 400

PROMISED = ("heartbeats_per_s", "journal_p50_ms", "journal_p99_ms", "restart_12500_s", "seeds_per_s")
"""What the last line holds."""

Figures = dict[str, float]


def heartbeats(fleet: Fleet, gangs: list[TrainingGang]) -> Figures:
    """Pings of agents and heartbeats of node daemons, in turn, that one core takes in a second."""
    pings: list[events.Event] = [events.AgentHeard(gang.id, node) for gang in gangs for node in gang.nodes]
    beats: list[events.Event] = [events.NodeHeard(node) for gang in gangs for node in gang.nodes]
    received = list(islice(cycle([event for pair in zip(pings, beats, strict=True) for event in pair]), HEARTBEATS))
    core, now = fleet.core, fleet.now
    start = time.perf_counter()
    for event in received:
        core.decide(event, now)
    return {"heartbeats_per_s": round(HEARTBEATS / (time.perf_counter() - start))}


def journal(fleet: Fleet, folder: Path) -> Figures:
    """Milliseconds for one event: its facts, and a snapshot where one is due."""
    kept = Journal(folder)
    state = fleet.core.state
    took = []
    for number, node in enumerate(islice(cycle(state.nodes), EVENTS)):
        facts = _loss(node, number)
        start = time.perf_counter()
        kept.append(facts, fleet.now, "Probed of a witness: the node did not answer")
        kept.snapshot_if_due(state)
        took.append((time.perf_counter() - start) * 1000)
    kept.close()
    cuts = statistics.quantiles(took, n=100)
    return {
        "journal_p50_ms": round(cuts[49], 3),
        "journal_p99_ms": round(cuts[98], 3),
        "journal_mean_ms": round(statistics.mean(took), 3),
        "journal_worst_ms": round(max(took), 1),
    }


def _loss(node: str, number: int) -> list[facts.Fact]:
    reason = f"{node} is lost: agent and daemon silent to the coordinator and to other nodes"
    return [
        facts.NodeJudged(node, Verdict.LOST, reason),
        facts.SlurmOwed("gang0000", number, "down", 1, node, f"muster: {reason}"),
        facts.MemberOut("gang0000", node, reason, False),
    ]


def one_gang(nodes: int) -> Figures:
    """One gang of `nodes` nodes: CPU time of its start, of an agent's report, of a node's loss, and of ten seconds in
    which nobody hears a third of them."""
    fleet = Fleet()
    gang = TrainingGang(fleet, "gang", 1, [f"node{number:05d}" for number in range(nodes)], spares=max(1, nodes // 64))
    fleet.after = Telling(fleet)
    gang.begin()
    start_s, fleet.cpu_s = fleet.cpu_s, 0.0
    reports = list(islice(cycle(gang.reports()), REPORTS))
    for event in reports:
        fleet.post(event)
    report_us, fleet.cpu_s = fleet.cpu_s / REPORTS * 1e6, 0.0
    gang.lose(gang.nodes[nodes // 2])
    recovery_s, fleet.cpu_s = fleet.cpu_s, 0.0
    gang.lose_many(gang.nodes[: nodes // 3], SILENCE_S)
    return {
        f"start_{nodes}_cpu_s": round(start_s, 3),
        f"report_{nodes}_us": round(report_us, 1),
        f"recovery_{nodes}_cpu_s": round(recovery_s, 3),
        f"silence_{nodes}_cpu_s": round(fleet.cpu_s, 3),
    }


class Telling:
    """Puts orders into the agents' outboxes, as the coordinator does."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._streams = AgentStreams()
        self._dispatcher = OrderDispatcher(fleet.core.state, 1, self._streams.of_gang, self._later)
        self._late: list[tuple[float, Callable[[str], None], str]] = []

    def __call__(self, event: events.Event, outcome: Outcome) -> None:
        """What follows from one event."""
        while self._late and self._late[0][0] <= self._fleet.now:
            _, action, gang = self._late.pop(0)
            action(gang)
        self._dispatcher.send_changes(outcome.facts)
        if isinstance(event, events.AgentAttached):
            stream = AgentStream(event.gang, event.node, event.incarnation)
            self._streams.add(stream)
            self._dispatcher.send_to(stream)

    def _later(self, delay: float, action: Callable[[str], None], gang: str) -> None:
        self._late.append((self._fleet.now + delay, action, gang))


async def restart(fleet: Fleet, folder: Path) -> Figures:
    """Seconds from a coordinator's start to its first answer, and what of that is the journal's part."""
    kept = Journal(folder)
    state = kept.load()
    for at, decided in fleet.written:
        for fact in decided:
            apply(state, fact, at)
        kept.append(decided, at, "a measurement")
        kept.snapshot_if_due(state)
    kept.close()
    SecretCredentials.create(folder / "secret")
    start = time.perf_counter()
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.restart", str(folder), cwd=ROOT, stdout=pipe, stdin=pipe
    )
    assert process.stdout
    assert process.stdin
    port = int(await process.stdout.readline())
    await answered(port, folder)
    took = time.perf_counter() - start
    load_s = float(await process.stdout.readline())
    process.stdin.close()
    await process.wait()
    return {"restart_12500_s": round(took, 2), "load_12500_s": round(load_s, 2)}


def simulated() -> Figures:
    """Simulated worlds a second.

    Raises:
        RuntimeError: one of them broke a law; what was measured is worth nothing then.
    """
    outcome = parallel.run(0, SEEDS)
    if outcome.failures:
        raise RuntimeError(f"seed {outcome.failures[0].seed}: {outcome.failures[0].violation}")
    return {"seeds_per_s": round(outcome.count / outcome.seconds, 1)}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What the coordinator's decisions and its journal cost.")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where the journals stand; a real disk")
    return parser.parse_args()


async def measure(folder: Path, say: Any) -> Figures:
    """Everything, in turn."""
    figures: Figures = {}
    for nodes in SIZES:
        figures |= one_gang(nodes)
        say(f"a gang of {nodes} nodes: done")
    fleet = Fleet()
    gangs = fleet.train(NODES, GANGS)
    say(f"{NODES} nodes in {GANGS} gangs train")
    figures |= heartbeats(fleet, gangs)
    with tempfile.TemporaryDirectory(prefix="bench-core-", dir=folder) as place:
        figures |= journal(fleet, Path(place) / "events")
        say("journal: done")
        figures |= await restart(fleet, Path(place) / "fleet")
    return figures


def main() -> int:
    """Measure and print."""
    args = arguments()
    figures = asyncio.run(measure(args.folder, Console(stderr=True).print)) | simulated()
    shown = Table("figure", "value")
    for name, value in figures.items():
        shown.add_row(name, f"{value:,}")
    Console().print(shown)
    print(json.dumps({name: figures[name] for name in PROMISED}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
