"""`make bench-core`: measures the cost of the coordinator's decisions and of its journal.

    python -m benchmarks.bench_core [--folder DIR]

- The journal: one event of a node's loss (three facts), written as the coordinator writes it, with 12,500 nodes in
  1,000 gangs. `--folder` is the place (default: a new folder in the current one, because /tmp may not be a disk).
- The pure core: heartbeats per second; an agent's report, a gang's start and a recovery at several sizes.
- A restart: from the start of a process to its first answer, with 12,500 nodes and 1,000 gangs in the journal.
- The simulator: seeds per second, on all processors; and of a seed, its events and its CPU time. A busy machine changes
  the first, and what seeds do changes the second.

The output is a table of all figures. The last line is a JSON object with the main figures. Names contain the units.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
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
from benchmarks.restart import wait_serving
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.core.turn.turn import Outcome
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.shell.agent_streams import AgentOutbox, AgentStreams
from muster.daemon.coordinator.shell.order_dispatch import OrderDispatcher
from muster.daemon.transport.identity import SecretCredentials
from muster.node_health import NodeHealth
from muster.simulator import parallel

ROOT = Path(__file__).resolve().parents[1]
NODES, GANGS = 12_500, 1_000
SIZES = (64, 256, 1_024)
HEARTBEATS = 100_000
EVENTS = 2_000
REPORTS = 400
SILENCE_S = 10.0
"""Virtual seconds in which a third of the gang's nodes is silent."""
SEEDS = 400

REPORTED_FIGURES = (
    "heartbeats_per_s",
    "journal_p50_ms",
    "journal_p99_ms",
    "restart_12500_s",
    "seeds_per_s",
    "seed_cpu_ms",
)
"""The figures of the last line."""

Figures = dict[str, float]


def heartbeats(fleet: Fleet, gangs: list[TrainingGang]) -> Figures:
    """Heartbeats of agents and of node daemons, alternating, that one processor core handles per second."""
    pings: list[events.Event] = [events.AgentHeartbeat(gang.id, node) for gang in gangs for node in gang.nodes]
    beats: list[events.Event] = [events.NodeHeartbeat(node) for gang in gangs for node in gang.nodes]
    received = list(islice(cycle([event for pair in zip(pings, beats, strict=True) for event in pair]), HEARTBEATS))
    core, now = fleet.core, fleet.now
    start = time.perf_counter()
    for event in received:
        core.decide(event, now)
    return {"heartbeats_per_s": round(HEARTBEATS / (time.perf_counter() - start))}


def journal(fleet: Fleet, folder: Path) -> Figures:
    """Milliseconds for one event: its facts, and a snapshot if one is due."""
    disk_journal = Journal(folder)
    state = fleet.core.state
    took = []
    for number, node in enumerate(islice(cycle(state.nodes), EVENTS)):
        facts = _node_loss_facts(node, number)
        start = time.perf_counter()
        disk_journal.append(facts, fleet.now, "Probed of a witness: the node did not answer")
        disk_journal.snapshot_if_due(state)
        took.append((time.perf_counter() - start) * 1000)
    disk_journal.close()
    cuts = statistics.quantiles(took, n=100)
    return {
        "journal_p50_ms": round(cuts[49], 3),
        "journal_p99_ms": round(cuts[98], 3),
        "journal_mean_ms": round(statistics.mean(took), 3),
        "journal_worst_ms": round(max(took), 1),
    }


def _node_loss_facts(node: str, number: int) -> list[facts.Fact]:
    reason = f"{node} is lost: agent and daemon silent to the coordinator and to other nodes"
    return [
        facts.NodeJudged(node, NodeHealth.LOST, reason),
        facts.SlurmCallOwed("gang0000", number, "down", 1, node, f"muster: {reason}"),
        facts.MemberRemoved("gang0000", node, reason, False),
    ]


def one_gang(nodes: int) -> Figures:
    """The costs for one gang of `nodes` nodes.

    They are CPU seconds of its start, of the loss of one node, and of ten seconds without contact to a third of the
    nodes; and CPU microseconds of an agent's report.
    """
    fleet = Fleet()
    gang = TrainingGang(fleet, "gang", 1, [f"node{number:05d}" for number in range(nodes)], spares=max(1, nodes // 64))
    fleet.on_outcome = OrderDelivery(fleet)
    gang.begin()
    start_s, fleet.cpu_s = fleet.cpu_s, 0.0
    reports = list(islice(cycle(gang.reports()), REPORTS))
    for event in reports:
        fleet.post(event)
    report_us, fleet.cpu_s = fleet.cpu_s / REPORTS * 1e6, 0.0
    gang.fail_node(gang.nodes[nodes // 2])
    recovery_s, fleet.cpu_s = fleet.cpu_s, 0.0
    gang.fail_nodes(gang.nodes[: nodes // 3], SILENCE_S)
    return {
        f"start_{nodes}_cpu_s": round(start_s, 3),
        f"report_{nodes}_us": round(report_us, 1),
        f"recovery_{nodes}_cpu_s": round(recovery_s, 3),
        f"silence_{nodes}_cpu_s": round(fleet.cpu_s, 3),
    }


class OrderDelivery:
    """Puts orders into the agents' outboxes, as the coordinator does."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._streams = AgentStreams()
        self._dispatcher = OrderDispatcher(fleet.core.state, 1, self._streams.of_gang, self._later)
        self._late: list[tuple[float, Callable[[str], None], str]] = []

    def __call__(self, event: events.Event, outcome: Outcome) -> None:
        """Delivers the orders that follow from one event."""
        while self._late and self._late[0][0] <= self._fleet.now:
            _, action, gang = self._late.pop(0)
            action(gang)
        self._dispatcher.send_changes(outcome.facts)
        if isinstance(event, events.AgentAttached):
            stream = AgentOutbox(event.gang, event.node, event.incarnation)
            self._streams.add(stream)
            self._dispatcher.send_to(stream)

    def _later(self, delay: float, action: Callable[[str], None], gang: str) -> None:
        self._late.append((self._fleet.now + delay, action, gang))


async def restart(fleet: Fleet, folder: Path) -> Figures:
    """Seconds from a coordinator's start to its first answer, and the journal's part of this time."""
    disk_journal = Journal(folder)
    state = disk_journal.load()
    for at, decided in fleet.decided:
        for fact in decided:
            apply(state, fact, at)
        disk_journal.append(decided, at, "a measurement")
        disk_journal.snapshot_if_due(state)
    disk_journal.close()
    SecretCredentials.create(folder / "secret")
    start = time.perf_counter()
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.restart", str(folder), cwd=ROOT, stdout=pipe, stdin=pipe
    )
    assert process.stdout
    assert process.stdin
    port = int(await process.stdout.readline())
    await wait_serving(port, folder)
    took = time.perf_counter() - start
    load_s = float(await process.stdout.readline())
    process.stdin.close()
    await process.wait()
    return {"restart_12500_s": round(took, 2), "load_12500_s": round(load_s, 2)}


def simulator_rate() -> Figures:
    """Simulated runs per second, and the events and the CPU time of one.

    Raises:
        RuntimeError: a run broke an invariant, so the measurement is worthless.
    """
    before_s = _children_cpu_s()
    outcome = parallel.run(0, SEEDS)
    cpu_s = _children_cpu_s() - before_s
    if outcome.failures:
        raise RuntimeError(f"seed {outcome.failures[0].seed}: {outcome.failures[0].violation}")
    return {
        "seeds_per_s": round(outcome.count / outcome.seconds, 1),
        "seed_events": round(outcome.coverage.total("event") / outcome.count, 1),
        "seed_cpu_ms": round(1000 * cpu_s / outcome.count, 1),
    }


def _children_cpu_s() -> float:
    """CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What the coordinator's decisions and its journal cost.")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="folder for the journals, on a real disk")
    return parser.parse_args()


async def measure(folder: Path, say: Any) -> Figures:
    """Runs all measurements."""
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
    """Measures and prints."""
    args = arguments()
    figures = asyncio.run(measure(args.folder, Console(stderr=True).print)) | simulator_rate()
    shown = Table("figure", "value")
    for name, value in figures.items():
        shown.add_row(name, f"{value:,}")
    Console().print(shown)
    print(json.dumps({name: figures[name] for name in REPORTED_FIGURES}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
