"""The records and the series of a job that never ran: as a coordinator and agents write them.

The job trains 18 hours. A GPU falls off the bus, a rank is killed, a node goes silent; one rank is slow for a while.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

from google.protobuf import json_format

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import GangSpec, Version
from muster.daemon.coordinator.core.state.fact_text import describe
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.journal.history import Record
from muster.daemon.host.metric_series import NodeSeries, NumberPoint, RankPoint, write_node
from muster.node_health import NodeHealth
from muster.v1.common_pb2 import JobSpec

GANG, JOB = "g20270115-080000-1000-pretraining-7b", 42
SUBMITTED = 1_800_000_000.0
STARTED = SUBMITTED + 700
TRAINS = SUBMITTED + 780
STEP_S = 0.65
STEPS = 100_000
ENDS = TRAINS + STEPS * STEP_S
SLOW_RANK = 11


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault. `node`: the number of the node that leaves; -1: none does."""

    at_s: float
    cause: str
    node: int = -1
    detect_s: float = 0.3


STRIKES = (
    Strike(TRAINS + 9_000, "Xid 79: GPU 0000:18:00 has fallen off the bus", 3, 0.0),
    Strike(TRAINS + 24_000, "rank 5 on n1 was killed by signal 9"),
    Strike(TRAINS + 51_000, "n2 is lost: agent and daemon silent to the coordinator and to other nodes", 2, 1.4),
)


@dataclass(slots=True)
class MadeUpJob:
    """So many nodes with ranks. A leaf has 16 nodes."""

    nodes: int = 8
    spares: int = 2
    ranks_per_node: int = 8
    strikes: tuple[Strike, ...] = STRIKES
    name: str = "pretraining-7b"
    run_dir: str = ""
    node_prefix: str = "n"

    def node(self, number: int) -> str:
        """The name of a node."""
        return f"{self.node_prefix}{number}"

    def job_spec(self) -> JobSpec:
        """What job.toml says: with 41 % of the peak of its GPUs."""
        return JobSpec(
            run_dir=self.run_dir,
            estimate_tables=json.dumps({"gpus_per_node": self.ranks_per_node}),
            tokens_per_step=2**22,
            flops_per_step=0.41 * STEP_S * self.nodes * self.ranks_per_node * 989e12,
            peak_flops=989e12,
        )

    def records(self) -> list[Record]:
        """The records of a job that goes on."""
        return [
            Record(position, at, getattr(fact, "gang", ""), getattr(fact, "node", ""), *facts.encode(fact),
                   describe(fact), "")
            for position, (at, fact) in enumerate(sorted(self._facts(), key=lambda one: one[0]), 1)
        ]  # fmt: skip

    def _facts(self) -> Iterator[tuple[float, facts.Fact]]:
        spec = GangSpec(self.nodes, self.spares, self.ranks_per_node, durable_dir="/shared/checkpoints",
                        durable_every_s=1800.0)  # fmt: skip
        text = json_format.MessageToJson(self.job_spec())
        yield SUBMITTED, facts.GangRegistered(GANG, JOB, 1000, self.name, spec, text)
        names = tuple(self.node(number) for number in range(self.nodes + self.spares))
        yield STARTED, facts.JobChanged(GANG, names)
        yield STARTED, facts.PhaseChanged(GANG, Phase.GATHERING, "")
        for number, name in enumerate(names):
            yield STARTED + 8, facts.MemberJoined(GANG, name, JOB, "i", f"{name}:1", number == 0, f"leaf{number // 16}")
        yield STARTED + 12, facts.GenerationFenced(GANG, 0, facts.PREFLIGHT_CAUSE, False, names[0], 0, STARTED + 12)
        seats = list(names[: self.nodes])
        yield from self._start(1, seats, STARTED + 14, STARTED + 13, None, "start")
        yield (
            TRAINS + 40_000,
            facts.StragglerDetected(
                GANG, 3, SLOW_RANK, self.node(1), f"rank {SLOW_RANK} computes 15 % longer than the other ranks"
            ),
        )
        for number, strike in enumerate(self.strikes, 1):
            yield from self._strike(number, strike, seats)

    def _strike(self, generation: int, strike: Strike, seats: list[str]) -> Iterator[tuple[float, facts.Fact]]:
        at, step = strike.at_s, int((strike.at_s - TRAINS) / STEP_S)
        detected, fenced = at + strike.detect_s, at + strike.detect_s + 0.6
        hardware = strike.node >= 0
        progress = facts.Progress(Version(generation, step), Version(generation, step - 1))
        if hardware:
            health = NodeHealth.UNFIT if strike.detect_s == 0 else NodeHealth.LOST
            yield detected, facts.NodeJudged(self.node(strike.node), health, strike.cause, failure=1)
        yield (
            detected,
            facts.GenerationFenced(
                GANG, generation, strike.cause, hardware, seats[0], step, at, "" if hardware else seats[1], progress
            ),
        )
        if hardware:
            earlier = sum(one.node >= 0 for one in self.strikes[: generation - 1])
            left, came = self.node(strike.node), self.node(self.nodes + earlier)
            yield detected, facts.MemberRemoved(GANG, left, strike.cause, strike.detect_s == 0)
            seats[:] = [came if name == left else name for name in seats]
        action = "swap" if hardware else "restart in place"
        yield from self._start(generation + 1, seats, fenced + 0.2, fenced, Version(generation, step - 1), action)

    def _start(
        self, generation: int, seats: list[str], at: float, fenced: float, version: Version | None, action: str
    ) -> Iterator[tuple[float, facts.Fact]]:
        placed = tuple(facts.Seat(name, number, "", ()) for number, name in enumerate(seats))
        yield (
            at,
            facts.GenerationStarted(GANG, generation, placed, (), seats[0], 29500, version, (), "", fenced, action),
        )
        first = version.step + 2 if version else 1
        runs = at + (0.5 if version else 40)
        yield runs, facts.PhaseChanged(GANG, Phase.RUNNING, "every rank runs")
        if version:
            yield runs + 0.9, facts.StateRestored(GANG, generation, version, 1 << 30, 0, 1 << 30, (), 0.8)
        yield (runs + 1.7 if version else TRAINS), facts.FirstStep(GANG, generation, first)

    def write_series(self, bins: int = 300) -> None:
        """What the nodes have noted, in the run folder."""
        for number in range(self.nodes):
            write_node(self.run_dir, GANG, self.series(number, bins))

    def series(self, number: int, bins: int) -> NodeSeries:
        """What one node has noted."""
        width = max(1, math.ceil((ENDS - TRAINS) / bins))
        found, chance = NodeSeries(self.node(number), width), Random(number)
        ranks = range(number * self.ranks_per_node, (number + 1) * self.ranks_per_node)
        for count in range(bins):
            at, step = int(TRAINS) // width * width + count * width, (count + 1) * STEPS // bins
            for rank in ranks:
                slow = 0.09 if rank == SLOW_RANK and 0.55 < count / bins < 0.7 else 0.0
                compute_s = 0.58 + slow + 0.012 * chance.random()
                found.ranks.setdefault(rank, {})[at] = RankPoint(STEPS // bins, step, STEP_S + slow, compute_s, 0.03)
            for name, point in self._numbers(step, ranks, chance):
                found.numbers.setdefault(name, {})[at] = point
        return found

    def _numbers(self, step: int, ranks: Iterable[int], chance: Random) -> Iterator[tuple[str, NumberPoint]]:
        first, *_, last = ranks
        loss = 1.9 + 8 * math.exp(-step / 15_000) + 0.04 * chance.random()
        norm = 0.4 + 2 * math.exp(-step / 9_000) + 0.15 * chance.random()
        yield "loss", NumberPoint(step, len(list(ranks)), loss - 0.05, loss, loss + 0.06, first, last)
        yield "gradient_norm", NumberPoint(step, 1, norm, norm, norm, first, first)
        yield "lr", NumberPoint(step, 1, *(3e-4 * min(1, step / 2000) * (1 - 0.9 * step / STEPS),) * 3, first, first)
