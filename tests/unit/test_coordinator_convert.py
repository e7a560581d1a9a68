"""Conversion: an impossible spec is rejected before it reaches the journal."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import GangSpec
from muster.daemon.coordinator.core.state.state_updates import apply
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.services import conversion
from muster.daemon.transport import job_limits
from muster.v1 import agent_pb2, common_pb2


def spec(**more: object) -> common_pb2.JobSpec:
    wanted = {"nodes": 2, "ranks_per_node": 8, **more}
    return common_pb2.JobSpec(**wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("gather_timeout_s", math.inf, "gather_timeout_s = inf must be 0 to 604800"),
        ("gather_timeout_s", math.nan, "gather_timeout_s = nan must be 0 to 604800"),
        ("stop_before_s", math.inf, "stop_before_s = inf must be 0 to 86400"),
        ("hang_after_s", math.inf, "hang_after_s = inf must be 0 to 604800"),
        ("hang_after_s", -5.0, "hang_after_s = -5 must be 0 to 604800"),
        ("ranks_per_node", 3_000_000, "ranks_per_node = 3000000 must be 0 to 1024"),
        ("nodes", 4_000_000_000, "nodes = 4000000000 must be 0 to 100000"),
        ("nodes", 50_000, "nodes * ranks_per_node = 400000: a job has 250000 ranks at most"),
        ("spares", 200_000, "spares = 200000 must be 0 to 100000"),
        ("pool_nodes", 200_000, "pool_nodes = 200000 must be 0 to 100000"),
        ("name", "n" * 257, "name has 257 characters: 256 at most"),
        ("durable_dir", "/" * 4097, "durable_dir has 4097 characters: 4096 at most"),
    ],
)
def test_an_impossible_spec_is_rejected_with_its_reason(field: str, value: object, words: str) -> None:
    with pytest.raises(conversion.InvalidMessage) as error:
        conversion.submitted("g", 1, 1000, spec(**{field: value}))
    assert str(error.value) == words


def test_an_overlong_spec_is_rejected() -> None:
    with pytest.raises(conversion.InvalidMessage, match="environment included"):
        conversion.submitted("g", 1, 1000, spec(env={"BIG": "x" * job_limits.MAX_SPEC_CHARS}))
    with pytest.raises(conversion.InvalidMessage, match="gang_id has"):
        conversion.submitted("g" * 1000, 1, 1000, spec())


def test_the_largest_job_is_accepted() -> None:
    largest = spec(nodes=31_250, spares=100_000, gather_timeout_s=7 * 86400.0, stop_before_s=86400.0)
    assert conversion.submitted("g", 1, 1000, largest).spec.nodes == 31_250


def test_overlong_texts_of_an_agent_are_cut() -> None:
    rank = agent_pb2.RankStatus(rank=0, stderr_tail=f"{'x' * 10_000}the end")
    status = conversion.status(agent_pb2.AgentStatus(failure="y" * 10_000, notice="short", ranks=[rank]))
    assert len(status.failure) == job_limits.MAX_TEXT_CHARS + 3
    assert status.sigterm_notice == "short"
    assert status.ranks[0].stderr_tail.endswith("xthe end")
    assert len(status.ranks[0].stderr_tail) == job_limits.MAX_TEXT_CHARS


def test_nan_in_a_stored_spec_can_be_replayed(tmp_path: Path) -> None:
    """No spec should hold NaN. If one does, the coordinator must still be able to start."""
    fact = facts.GangRegistered("g", 1, 1000, "", GangSpec(1, 0, gather_timeout_s=math.inf), "{}")
    state = DurableState()
    apply(state, fact, 1.0)
    assert DurableState.load(state.dump()) == state
    journal = Journal(tmp_path)
    journal.append([fact], 1.0, "")
    journal.close()
    journal = Journal(tmp_path)
    assert journal.load() == state
    journal.close()
