"""kill -9 of a real agent process at every labelled point between a slot and its commit: the job goes on from the
newest committed step, or from a newer one, with every byte of that step."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import connection, get_context
from pathlib import Path

import pytest
from tests.unit.test_checkpoint_flush_crashes import whole_checkpoints

from muster.checkpoint.durable.posix_folder import PosixFolder
from muster.checkpoint.format.versions import Version
from muster.checkpoint.testing.gang_in_one_process import TorchlessRank, contents, durable_metadata_of
from muster.checkpoint.testing.gang_of_processes import Gang
from muster.checkpoint.testing.kill_points import KillPoint, MortalAgent
from muster.checkpoint.training.agent_connection import AgentConnection
from muster.v1 import agent_pb2

NODES = ("n0", "n1", "n2")
"""Rank i is on node i, and the next node is its buddy. n0 is the commit leader."""
SHARED_BYTES = 3 << 20
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Case:
    """`at`: which node passes the point with step 2. `victim`: which node's agent is killed then. `restored`: from
    which steps the job may go on; step 1 is committed before."""

    point: KillPoint
    at: str
    victim: str
    restored: tuple[int, ...] = (1, 2)


CASES = [
    Case(KillPoint.OFFERING, "n1", "n1", (1,)),
    Case(KillPoint.OFFERED, "n2", "n2"),
    Case(KillPoint.OFFERED, "n2", "n1", (1,)),
    Case(KillPoint.STREAMING, "n2", "n2"),
    Case(KillPoint.STREAMING, "n2", "n1"),
    Case(KillPoint.FETCHED, "n2", "n2"),
    Case(KillPoint.FETCHED, "n2", "n1"),
    Case(KillPoint.SEALED, "n2", "n2"),
    Case(KillPoint.SEALED, "n2", "n1", (2,)),
    Case(KillPoint.COPIED, "n1", "n1", (2,)),
    Case(KillPoint.REPORTING, "n1", "n1", (2,)),
    Case(KillPoint.COUNTING, "n0", "n0"),
    Case(KillPoint.COUNTED, "n0", "n0"),
    Case(KillPoint.DECIDED, "n0", "n0", (2,)),
    Case(KillPoint.ANNOUNCED, "n0", "n0", (2,)),
    Case(KillPoint.HEARING, "n1", "n1", (2,)),
    Case(KillPoint.HEARD, "n1", "n1", (2,)),
]


@lru_cache(16)
def shared(rank: int, step: int) -> bytes:
    """Bytes that no other rank has, so that all of them must be copied."""
    return random.Random(f"{rank} {step}").randbytes(SHARED_BYTES)


def own(rank: int, step: int) -> bytes:
    return f"rank {rank} step {step}".encode()


class TrainingGang(Gang):
    """Agents as processes, and their ranks in this process."""

    def __init__(self) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["muster.checkpoint.testing.kill_points"])
        super().__init__(MortalAgent, "forkserver")
        self.ranks: list[TorchlessRank] = []

    def start(self, places: dict[int, str], restore: agent_pb2.RestorePlan | None = None) -> list[dict[str, bytes]]:
        """Begin a generation; returns what each rank starts from, empty if from nothing."""
        for rank in self.ranks:
            rank.connection.close()
        ring = [places[rank] for rank in sorted(places)]
        generation = self.begin(places, dict(zip(ring, [*ring[1:], ring[0]], strict=True)), restore)
        self.ranks = [
            TorchlessRank(
                AgentConnection(self.connect(rank, node), rank, generation),
                rank,
                len(places),
                b"" if rank else durable_metadata_of(places),
            )
            for rank, node in places.items()
        ]
        states = [rank.join().shard for rank in self.ranks]
        for rank in self.ranks:
            assert not rank.layout(SHARED_BYTES)
        return [dict(contents(state)) if state is not None else {} for state in states]

    def step(self, step: int) -> None:
        """All ranks finish a step and keep it. A rank whose agent is gone does not."""
        for rank in self.ranks:
            kept = rank.step(step, shared(rank.rank, step), own(rank.rank, step), TIMEOUT_S)
            assert kept or not rank.connection.alive

    def end(self) -> None:
        for rank in self.ranks:
            rank.connection.close()


@pytest.fixture
def gang() -> Iterator[TrainingGang]:
    with TrainingGang() as gang:
        yield gang
        gang.end()


def newest(gang: TrainingGang) -> agent_pb2.RestorePlan:
    """The plan that a coordinator makes: the newest version of which each rank's shard is left."""
    held: dict[Version, dict[int, list[tuple[str, agent_pb2.ShardStatus]]]] = {}
    for node, shards in gang.shards().items():
        for shard in shards:
            held.setdefault(Version.from_wire(shard.version), {}).setdefault(shard.rank, []).append((node, shard))
    version = max(version for version, ranks in held.items() if len(ranks) == len(NODES))
    plan = agent_pb2.RestorePlan(version=version.to_wire())
    for rank, found in held[version].items():
        for node, shard in found:
            plan.sources.add(rank=rank, tier=shard.tier, node=node, digest=shard.digest)
    return plan


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.point.name.lower()}-{case.victim}_at_{case.at}")
def test_the_newest_committed_step_survives_kill_9(gang: TrainingGang, case: Case) -> None:
    gang.add(*NODES)
    places = dict(enumerate(NODES))
    gang.start(places)
    gang.step(1)
    gang.committed_at(1)

    victim = gang.process(case.victim)
    gang.call(case.at, "arm", case.point, 2, victim.pid)
    gang.step(2)
    assert connection.wait([victim.sentinel], TIMEOUT_S), "nobody has passed the point"
    gang.remove(case.victim)
    assert victim.exitcode == -9

    gang.fence()
    committed = max(gang.committed())
    plan = newest(gang)
    restored = plan.version.step
    assert restored in case.restored
    assert restored >= committed.step
    gang.add("spare")
    places = {rank: "spare" if node == case.victim else node for rank, node in places.items()}
    for rank, state in enumerate(gang.start(places, plan)):
        assert state == {"shared": shared(rank, restored), "own": own(rank, restored)}
    gang.step(restored + 1)
    gang.committed_at(restored + 1)


FLUSH_CASES = [
    *(("n1", label) for label in ("make_folder", "create", "write_part", "finish", "write")),
    *(("n0", label) for label in ("prepare", "write", "complete", "retire", "remove_folder")),
]
"""Which node is killed at which operation of a flush on storage. n0 is the flush leader: it completes the checkpoint,
and removes the one before."""


@pytest.mark.parametrize(("victim", "label"), FLUSH_CASES, ids=[f"{label}-{node}" for node, label in FLUSH_CASES])
def test_memory_and_storage_survive_kill_9_in_a_flush(
    gang: TrainingGang, tmp_path: Path, victim: str, label: str
) -> None:
    gang.add(*NODES)
    places = dict(enumerate(NODES))
    gang.start(places)
    for step in (1, 2):
        gang.step(step)
        gang.committed_at(step)
        if step == 1:
            gang.flush_all("flush_s", 1, 1, str(tmp_path))
    store = PosixFolder(tmp_path)
    assert whole_checkpoints(store, len(NODES)) == [1]

    dying = gang.process(victim)
    gang.flush_all("begin_flush", 2, 2, str(tmp_path), **{victim: label})
    assert connection.wait([dying.sentinel], TIMEOUT_S), f"the flush has no operation {label}"
    gang.remove(victim)
    assert dying.exitcode == -9
    assert whole_checkpoints(store, len(NODES)) in ([1], [2], [1, 2])

    gang.fence()
    plan = newest(gang)
    assert plan.version.step == 2
    gang.add("spare")
    places = {rank: "spare" if node == victim else node for rank, node in places.items()}
    for rank, state in enumerate(gang.start(places, plan)):
        assert state == {"shared": shared(rank, 2), "own": own(rank, 2)}
    gang.step(3)
    gang.committed_at(3)
    gang.flush_all("flush_s", 3, 3, str(tmp_path))
    assert whole_checkpoints(store, len(NODES))[-1] == 3


def test_every_point_is_tried() -> None:
    assert {case.point for case in CASES} == set(KillPoint)
