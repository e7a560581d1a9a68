"""What the coordinator tells of a restore from memory: the plan with further sources, the progress, the record."""

from dataclasses import replace

from muster.daemon.coordinator.core.recovery import shard_sources
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.events import RestoreProgress, Shard, Version
from muster.daemon.coordinator.core.state.fact_text import describe
from muster.daemon.coordinator.core.state.facts import ShardSource
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.services.views import gang_view
from muster.daemon.coordinator.shell.orders import Orders
from muster.launcher.output.checkpoint_lines import checkpoint_lines
from muster.simulator.scenario import Scenario

GIB = 1 << 30


def swapped() -> Scenario:
    """Three nodes with ranks and a spare. A node was lost, and the spare has its seat."""
    world = Scenario(3, 1)
    world.run_until(lambda: world.gang.phase is Phase.RUNNING and world.core.observed.gang("g").step_number >= 5)
    world.power_off("n1")
    world.run_until(lambda: world.gang.phase is Phase.STARTING and world.gang.newest.generation == 2)
    return world


def report(world: Scenario, node: str, progress: RestoreProgress) -> None:
    agent = world.core.observed.gang("g").agents[node]
    world.post_event(events.AgentReported("g", node, agent.incarnation, replace(agent.status, restore=progress)))


def line(world: Scenario) -> str | None:
    view = gang_view(world.core.state, world.core.observed, world.gang, world.now)
    return dict(checkpoint_lines(view.checkpoint)).get("restore")


def test_the_plan_names_every_node_that_holds_a_shard() -> None:
    world = Scenario(3, 1)
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 5)
    world.kill_rank("n1")
    world.run_until(lambda: world.gang.newest.generation == 2)
    (started,) = [fact for fact in world.facts(facts.GenerationStarted) if fact.generation == 2]
    homes = {seat.group_rank: seat.node for seat in world.gang.roster.seats}
    assert {source.rank: source.node for source in started.sources} == homes
    buddies = {seat.group_rank: seat.holder for seat in world.gang.roster.seats}
    assert {source.rank: source.node for source in started.other_sources} == buddies
    order = Orders(world.gang).for_node("n0")
    assert [(s.rank, s.node, bool(s.digest)) for s in order.restore.sources] == [
        *((rank, homes[rank], True) for rank in range(3)),
        *((rank, buddies[rank], False) for rank in range(3)),
    ]


def test_other_sources_hold_the_same_bytes_and_do_not_leave() -> None:
    version = Version(1, 5)

    def shard(rank: int, digest: str, *, primary: bool = False, at: Version = version) -> Shard:
        return Shard(rank, at, primary, digest)

    held = {
        "a": [shard(0, "x", primary=True), shard(1, "y")],
        "b": [shard(1, "y", primary=True), shard(0, "x")],
        "c": [shard(0, "other"), shard(1, "y", at=Version(1, 4)), shard(2, "z")],
        "gone": [shard(0, "x")],
    }
    chosen = (ShardSource(0, "a", True, "x"), ShardSource(1, "b", True, "y"))
    assert shard_sources.other_sources(held, version, chosen, frozenset({"gone"})) == (
        ShardSource(0, "b", False, ""),
        ShardSource(1, "a", False, ""),
    )


def test_the_progress_of_all_nodes_is_shown_until_the_first_step() -> None:
    world = swapped()
    assert line(world) == (
        f"step {world.gang.restore.restored_version.step if world.gang.restore.restored_version else 0} from memory; "
        "own memory 2 ranks, buddy 1 rank (n2)"
    )
    report(world, "n0", RestoreProgress(2, 1, 1, 2 * GIB, 2 * GIB, 0, {}, 0.5))
    report(world, "n3", RestoreProgress(2, 1, 0, 4 * GIB, 0, GIB // 2, {"n2": GIB // 2, "n0": GIB // 4}, 1.0))
    report(world, "n2", RestoreProgress(1, 1, 1, 9 * GIB, 9 * GIB, 0, {}, 9.0))  # of the generation before
    shown = line(world)
    assert shown is not None
    assert ": 3.2 of 6.0 GiB, 3.49 GB/s; own memory 2 ranks, buddy 1 rank (n2)" in shown
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert line(world) is None


def test_a_restore_is_recorded_once_when_all_nodes_have_their_states() -> None:
    world = swapped()
    report(world, "n0", RestoreProgress(2, 1, 1, 2 * GIB, 2 * GIB, 0, {}, 0.5))
    report(world, "n2", RestoreProgress(2, 1, 1, 2 * GIB, 2 * GIB, 0, {}, 0.5))
    report(world, "n3", RestoreProgress(2, 1, 0, 2 * GIB, 0, 0, {"n2": GIB}, 1.0))
    assert world.facts(facts.StateRestored) == []
    for _ in range(2):
        report(world, "n3", RestoreProgress(2, 1, 1, 2 * GIB, 0, GIB // 2, {"n2": GIB, "n0": GIB // 2}, 2.0))
    (found,) = world.facts(facts.StateRestored)
    assert (found.own_bytes, found.copied_bytes, found.fetched_bytes) == (4 * GIB, GIB // 2, 3 * GIB // 2)
    step = found.version.step
    assert describe(found) == (
        f"generation 2 has its state of step {step} (generation 1) from memory: 6.0 GiB in 2.0 s; "
        "4.0 GiB were in the ranks' own memory, 512.0 MiB in other memory of their nodes, 1.0 GiB came from n2, "
        "512.0 MiB came from n0"
    )
    assert "complete after 2 s" in (line(world) or "")


def test_a_restore_from_a_durable_checkpoint_is_shown_and_recorded() -> None:
    world = swapped()
    folder, damage = "/d/step_00000005_g1_g", "/d/step_00000009_g1_g/__0_0.distcp is damaged"
    part = RestoreProgress(2, 1, 0, 2 * GIB, 0, 0, {}, 0.5, folder, Version(1, 5), GIB, damage)
    for node in ("n0", "n2", "n3"):
        report(world, node, part)
    assert line(world) is not None
    assert f"step 5 from {folder}: 3.0 of 6.0 GiB" in (line(world) or "")
    for node in ("n0", "n2", "n3"):
        report(world, node, replace(part, ranks_done=1, loaded=2 * GIB, seconds=3.0))
    (found,) = world.facts(facts.StateRestored)
    assert (found.folder, found.version, found.loaded_bytes) == (folder, Version(1, 5), 6 * GIB)
    assert describe(found) == (
        f"generation 2 has loaded {folder}: 6.0 GiB in 3.0 s; not the newest one, because {damage}"
    )
    assert f"not the newest checkpoint, because {damage}; complete after 3 s" in (line(world) or "")


def test_a_record_names_eight_nodes_and_the_rest_by_its_size() -> None:
    fetched = tuple((f"n{number}", 1 << 20) for number in range(8))
    fact = facts.StateRestored("g", 3, Version(2, 7), 0, 0, (8 << 20) + (1 << 19), fetched, 0.25)
    assert describe(fact).endswith(
        "8.5 MiB in 0.2 s; "
        + ", ".join([f"1.0 MiB came from n{number}" for number in range(8)] + ["512.0 KiB from further nodes"])
    )
