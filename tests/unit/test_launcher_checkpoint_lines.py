"""What `muster status` says of a gang's checkpoints."""

from dataclasses import replace
from pathlib import Path

import pytest

from muster.daemon.coordinator.core.state.events import (
    AgentReported,
    AgentStatus,
    FlushProgress,
    SnapshotCost,
    Version,
)
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.services.views import gang_view
from muster.launcher.output.checkpoint_lines import checkpoint_lines
from muster.simulator.scenario import Scenario
from muster.v1.api_pb2 import CheckpointView, FlushView, RestoreView


def lines(view: CheckpointView) -> dict[str, str]:
    return dict(checkpoint_lines(view))


def test_nothing_is_said_of_what_is_not_known() -> None:
    assert lines(CheckpointView()) == {}


def test_what_was_chosen_what_it_costs_and_what_a_fault_loses() -> None:
    view = CheckpointView(
        mtbf_s=28_800,
        every=9,
        auto_interval=True,
        stall_s=0.043,
        step_s=5.0,
        delay_s=0.2,
        cost=0.0054,
        loses_steps=7,
        loses_s=35.0,
    )
    assert lines(view) == {
        "snapshots": "every 9 steps (auto); each stops the training for 43 ms, and slows it by 200 ms while it is "
        "copied, 0.54% of the time; "
        "a fault now loses 7 steps, 35 s",
        "failures": "one of the job's nodes fails every 8 h, as the site's policy says, or as observed",
    }
    view.mtbf_of_job = True
    assert lines(view)["failures"] == "one of the job's nodes fails every 8 h, as job.toml says"


def test_a_user_s_own_interval_is_shown_with_its_cost() -> None:
    view = CheckpointView(mtbf_s=1, every=1, stall_s=0.007, cost=0.065, slots_s=1.3, loses_steps=1, loses_s=0.1)
    assert lines(view) == {
        "snapshots": "every step; each stops the training for 7 ms, 6.50% of the time; their memory was made in 1.3 s; "
        "a fault now loses 1 step, 100 ms"
    }


def test_on_which_nodes_a_state_is_kept() -> None:
    def words(**kept: object) -> str:
        return lines(CheckpointView(every=1, **kept))["copies"]  # type: ignore[arg-type]

    assert words(copies=1) == "none: what is in memory is lost with its node"
    assert words(copies=2) == "each rank's state is on 2 nodes; one of them may be lost"
    assert words(copies=3) == "each rank's state is on 3 nodes; 2 of them may be lost"
    groups = [{"nodes": [f"n{first}", f"n{first + 1}"]} for first in range(0, 10, 2)]
    assert words(parity_groups=groups[:2]) == (
        "a parity of each group of nodes (n0 n1, n2 n3); one node of a group may be lost"
    )
    assert "(n0 n1, n2 n3, n4 n5, n6 n7, ...)" in words(parity_groups=groups)
    assert "copies" not in lines(CheckpointView(copies=2)), "no snapshot was taken yet"


def test_no_share_of_the_time_is_claimed_before_a_step_was_measured() -> None:
    """The first snapshot of a generation comes before the pace of its steps is known."""
    assert SnapshotCost(every=1, auto=False, stall_s=0.14, step_s=0.0).share == 0
    assert SnapshotCost(every=1, auto=False, stall_s=0.14, step_s=6.86).share == pytest.approx(0.02)
    assert lines(CheckpointView(every=1, stall_s=0.14)) == {
        "snapshots": "every step; each stops the training for 140 ms"
    }


def test_durable_checkpoints() -> None:
    view = CheckpointView(
        durable_every_s=1800, durable_auto=True, flush_s=6.2, flush_stall_s=0.25, durable_cost=0.00014,
        durable_loses_steps=214, durable_loses_s=1070, durable_path="/d/step_00000800_g1_g", flush_serial=3,
    )  # fmt: skip
    assert lines(view)["durable"] == (
        "every 30 min (auto); each takes 6.2 s, and stops the training for 250 ms, 0.01% of the time; "
        "without any memory a fault now loses 214 steps, 17.8 min; newest: /d/step_00000800_g1_g"
    )
    view.flush_s = view.flush_stall_s
    assert "each takes 250 ms, and the training stands still meanwhile, 0.01%" in lines(view)["durable"]
    assert "flush 4 runs" in lines(CheckpointView(flush_serial=4, flushing=True))["durable"]
    failed = CheckpointView(durable_every_steps=500, flush_serial=4, flush_error="n1: /d is full")
    assert lines(failed)["durable"] == "every 500 steps; flush 4 failed: n1: /d is full"


def test_how_far_a_flush_is() -> None:
    flush = FlushView(serial=4, version={"step": 1200}, written=3 << 30, bytes=8 << 30, seconds=6.0, quiet_s=0.5)
    view = CheckpointView(flush_serial=4, flushing=True, flush=flush)
    assert lines(view)["durable"] == "flush 4 of step 1200: 3.0 of 8.0 GiB, 0.54 GB/s, for 6 s so far"
    flush.seconds, flush.quiet_node, flush.quiet_s, flush.nodes_holding_slots = 600.0, "n3", 45.0, 2
    assert lines(CheckpointView(flush_serial=4, flushing=True, flush=flush))["durable"] == (
        "flush 4 of step 1200: 3.0 of 8.0 GiB, 5.4 MB/s, for 10 min so far; n3 has written nothing for 45 s; "
        "it holds a slot of each rank on 2 nodes"
    )
    begun = CheckpointView(flush_serial=4, flushing=True, flush=FlushView(serial=4, seconds=0.5))
    assert lines(begun)["durable"] == "flush 4 of step 0, for 500 ms so far"


def test_the_view_of_a_flush_adds_what_its_nodes_report() -> None:
    world = Scenario(2, 0, durable_dir="/durable", durable_every_steps=20)
    world.world.durable_storage.hangs_until = 1e9
    world.run_until(lambda: world.gang.checkpoint.flush is not None)
    assert world.gang.checkpoint.flush is not None
    newer = Version(1, world.gang.checkpoint.flush.version.step + 1)
    for written, nodes in ((100, ("n0", "n1")), (300, ("n1",)), (700, ("n1",))):
        for node in nodes:
            report = FlushProgress(world.gang.checkpoint.flush.serial, written, 700, newer, holds_slots=node == "n0")
            agent = world.core.observed.gang("g").agents[node]
            status = replace(agent.status, flush_progress=report)
            world.post_event(AgentReported("g", node, agent.incarnation, status))
        world.run_for(20.0)
    view = gang_view(world.core.state, world.core.observed, world.gang, world.now).checkpoint.flush
    assert (view.serial, view.version.step, view.written, view.bytes) == (1, newer.step, 800, 1400)
    assert (view.quiet_node, round(view.quiet_s), view.nodes_holding_slots) == ("n0", 60, 1)
    assert view.seconds >= 60.0


def test_a_restore_from_a_folder() -> None:
    folder = "/d/step_00001200_g3_g"
    view = RestoreView(version={"step": 1200}, folder=folder, bytes=8 << 30, loaded_bytes=3 << 30, seconds=2.0, ranks=4)
    assert lines(CheckpointView(restore=view)) == {"restore": f"step 1200 from {folder}: 3.0 of 8.0 GiB, 1.61 GB/s"}
    view.damage, view.loaded_bytes, view.ranks_done = "/d/b is damaged", 8 << 30, 4
    assert lines(CheckpointView(restore=view))["restore"] == (
        f"step 1200 from {folder}: 8.0 of 8.0 GiB, 4.29 GB/s; not the newest checkpoint, because /d/b is damaged; "
        "complete after 2 s"
    )


def test_why_nothing_is_kept() -> None:
    view = CheckpointView(no_slots="n3: rank 4 needs 20480 MiB for 2 slots, and 900 MiB are left")
    assert lines(view)["no snapshots"] == "n3: rank 4 needs 20480 MiB for 2 slots, and 900 MiB are left"
    refused = "n0: n1 has taken nothing for 34 s: the munge credential is refused: it has expired"
    assert lines(CheckpointView(copies_wait=refused))["copies wait"] == refused


def test_the_lines_that_the_documents_show_are_those_of_muster_status() -> None:
    gib, page = 1 << 30, (Path(__file__).parents[2] / "docs" / "CHECKPOINT.md").read_text()
    kept = CheckpointView(every=9, auto_interval=True, stall_s=0.043, cost=0.001, slots_s=1.3, copies=2)
    durable = CheckpointView(mtbf_s=28_800, mtbf_of_job=True, durable_auto=True)
    kept.loses_steps, kept.loses_s = 7, 35.0
    durable.durable_every_s, durable.flush_s, durable.durable_cost = 1860, 6.2, 0.0001
    durable.durable_loses_steps, durable.durable_loses_s = 214, 1068
    flush = FlushView(serial=4, bytes=8 * gib, written=int(3.1 * gib), seconds=600, quiet_node="n3", quiet_s=45)
    flush.version.step = 1200
    restore = RestoreView(bytes=8 * gib, own_bytes=int(3.1 * gib), seconds=1.387)
    restore.version.step = 1234
    restore.shares.add(source="own memory", ranks=6)
    restore.shares.add(source="buddy", ranks=2, nodes=["n3"])
    flushing = CheckpointView(durable_every_s=1800, durable_auto=True, flush_serial=4, flush=flush)
    for view in (kept, durable, flushing, CheckpointView(restore=restore)):
        for title, text in checkpoint_lines(view):
            assert f"\n{title:11}{text}" in page


def test_the_view_of_a_gang_holds_what_its_agents_measure() -> None:
    world = Scenario(2, 0, flush_s=1.0, durable_dir="/durable", durable_every_steps=50, node_mtbf_s=7200.0)
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 70)
    seen = world.core.observed.gang("g")
    seen.agents["n0"].status = AgentStatus(
        committed=seen.agents["n0"].status.committed, snapshot_cost=SnapshotCost(4, True, 0.02, 0.18, 1.5, 0.1)
    )
    view = gang_view(world.core.state, world.core.observed, world.gang, world.now).checkpoint
    assert (view.every, view.auto_interval, view.slots_s) == (4, True, 1.5)
    assert abs(view.cost - 0.12 / (4 * 0.18 + 0.12)) < 1e-9
    assert view.mtbf_s == 3600.0
    assert view.mtbf_of_job
    assert (view.copies, len(view.parity_groups)) == (2, 0)
    assert view.HasField("loses_steps")
    assert 0 <= view.loses_steps <= 5
    assert view.durable_every_steps == 50
    assert world.gang.checkpoint.durable_version is not None
    assert view.durable_loses_steps == seen.step_number - world.gang.checkpoint.durable_version.step > 0
    assert view.flush_serial == 1
    assert view.durable_path == world.gang.checkpoint.durable_path


def test_what_a_fault_loses_is_not_known_while_the_gang_recovers_from_one() -> None:
    world = Scenario(2, 1)
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 5)
    world.power_off(world.gang.roster.seats[1].node)
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
    view = gang_view(world.core.state, world.core.observed, world.gang, world.now)
    assert view.step >= 5
    assert not view.checkpoint.HasField("loses_steps")


def test_what_a_fault_loses_is_not_known_of_a_script_without_the_library() -> None:
    world = Scenario(2, 0, step_s=1000.0)
    world.run_until(lambda: world.gang.phase is Phase.RUNNING)
    world.run_for(10)
    view = gang_view(world.core.state, world.core.observed, world.gang, world.now)
    assert not view.checkpoint.HasField("loses_steps")


def test_copies_are_told_once_the_nodes_of_the_generation_hold_them() -> None:
    def copies() -> int:
        return gang_view(world.core.state, world.core.observed, world.gang, world.now).checkpoint.copies

    world = Scenario(3, 1, more_holders=1)
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 5)
    assert copies() == 3
    world.power_off(world.gang.roster.seats[1].node)
    world.run_until(lambda: world.gang.newest.generation == 2)
    assert copies() == 0, "the newcomer holds no copy yet"
    world.run_until(lambda: copies() == 3)
