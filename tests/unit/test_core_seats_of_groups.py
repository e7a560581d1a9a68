"""Seats of gangs whose ranks form groups: those that communicate most are packed, at the start and after a loss."""

from __future__ import annotations

import pytest

from muster.daemon.coordinator.core.state.events import GangSpec
from muster.daemon.coordinator.core.turn import placement
from muster.daemon.coordinator.core.turn.communication import axes_of, communicating_seats
from muster.daemon.coordinator.services import conversion, job_specs
from muster.fabric.groups.axes import Axis
from muster.fabric.model.fabric import Fabric
from muster.fabric.sources.nesting import NodeSet, fabric_of
from muster.fabric.sources.tiers import Tiers
from muster.simulator.scenario import Scenario
from muster.v1 import common_pb2


def network(**switches: str) -> Fabric:
    """Nodes with their switches, the leaf first: `n0="s0 pod0"`."""
    below: dict[str, set[str]] = {}
    for node, words in switches.items():
        for switch in words.split():
            below.setdefault(switch, set()).add(node)
    return fabric_of([NodeSet(frozenset(nodes), switch) for switch, nodes in below.items()], switches, Tiers())


def leaves(world: Scenario, size: int) -> list[set[str]]:
    """The leaves of each tensor group of `size` nodes."""
    of = {name: machine.leaf for name, machine in world.world.machines.items()}
    seats = [of[seat.node] for seat in world.gang.roster.seats]
    return [set(seats[at : at + size]) for at in range(0, len(seats), size)]


def test_tensor_groups_start_on_one_leaf_each_and_stay_there_after_a_loss() -> None:
    world = Scenario(6, 2, tensor=3)  # two leaves of four nodes
    world.run_until(lambda: world.gang.newest.stepped_generation == 1)
    assert [len(group) for group in leaves(world, 3)] == [1, 1]
    before = [seat.node for seat in world.gang.roster.seats]
    world.crash(before[4])
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    after = [seat.node for seat in world.gang.roster.seats]
    assert [at for at in range(6) if after[at] != before[at]] == [4]
    assert [len(group) for group in leaves(world, 3)] == [1, 1]


def test_only_the_seat_of_the_lost_node_gets_another_node() -> None:
    fabric = network(**{f"n{number}": f"s{number // 4} pod0" for number in range(12)})
    groups = communicating_seats(GangSpec(8, 4, tensor=4))
    seats = placement.first_seats(fabric, fabric.nodes, 8, groups=groups)
    assert [len({fabric.leaf_name(node) for node in seats[at : at + 4]}) for at in (0, 4)] == [1, 1]
    after = placement.refill_seats(fabric, seats, fabric.nodes - {seats[5]}, 8, groups=groups)
    assert after is not None
    assert [at for at in range(8) if after[at] != seats[at]] == [5]


def test_of_two_spares_the_one_in_the_pod_of_its_group_is_taken() -> None:
    fabric = network(
        a0="s0 pod0", a1="s0 pod0", b0="s1 pod1", b1="s1 pod1", far="s3 pod2", near="s2 pod1",
    )  # fmt: skip
    groups = communicating_seats(GangSpec(4, 2, tensor=2))
    after = placement.refill_seats(fabric, ["a0", "a1", "b0", "b1"], fabric.nodes - {"b1"}, 4, groups=groups)
    assert after == ["a0", "a1", "b0", "near"]


def test_a_node_that_is_chosen_last_has_no_seat_while_others_suffice() -> None:
    fabric = network(**{f"n{number}": f"s{number // 2}" for number in range(6)})
    groups = communicating_seats(GangSpec(4, 2, tensor=2))
    assert "n1" not in placement.first_seats(fabric, fabric.nodes, 4, {"n1": 1}, groups)
    four = {"n0", "n1", "n2", "n3"}
    assert set(placement.first_seats(fabric, four, 4, {"n1": 1}, groups)) == four


def test_replicas_alone_have_no_groups_that_matter() -> None:
    assert communicating_seats(GangSpec(8, 1, ranks_per_node=8)) == ()
    assert communicating_seats(GangSpec(8, 1, ranks_per_node=8, tensor=8)) != ()


def test_the_axes_of_a_spec_are_those_of_its_degrees() -> None:
    axes = axes_of(GangSpec(4, 0, ranks_per_node=4, tensor=2, pipeline=2, axis_order="tp-pp-dp"))
    assert (axes.tensor, axes.pipeline, axes.data, axes.order[:3]) == (2, 2, 4, (Axis.TENSOR, Axis.PIPELINE, Axis.DATA))


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"tensor_parallel": 3}, "must divide nodes * ranks_per_node = 16"),
        ({"expert_parallel": 5}, "expert = 5 must divide data * context"),
        ({"parallel_order": "tp-xx"}, "xx"),
        ({"tensor_parallel": 2**31}, "tensor_parallel"),
    ],
)
def test_axes_that_do_not_fit_are_refused_at_registration(degrees: dict[str, int], words: str) -> None:
    with pytest.raises(conversion.InvalidMessage, match=words.replace("*", r"\*")):
        job_specs.gang_spec(common_pb2.JobSpec(nodes=4, ranks_per_node=4, **degrees))  # type: ignore[arg-type]


def test_nodes_that_the_script_knows_as_its_own_have_the_first_seats_in_its_order() -> None:
    world = Scenario(3, 2, own_nodes=("n4", "n1", "n2"))
    world.run_until(lambda: world.gang.newest.stepped_generation == 1)
    assert [seat.node for seat in world.gang.roster.seats] == ["n4", "n1", "n2"]
    world.crash("n4")
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert [seat.node for seat in world.gang.roster.seats][1:] == ["n1", "n2"]


def test_after_a_requeue_the_first_seats_are_those_of_the_new_runs_own_nodes() -> None:
    world = Scenario(3, 0, idle_nodes=1, own_nodes=("n0", "n1", "n2"))
    world.run_until(lambda: world.gang.newest.stepped_generation == 1)
    world.crash("n0")
    world.run_until(lambda: world.gang.slurm.restart_count == 1 and bool(world.gang.roster.seats), 120)
    assert [seat.node for seat in world.gang.roster.seats] == ["n1", "n2", "n3"]


@pytest.mark.parametrize(
    ("usable", "last", "seats"),
    [
        ("n0 n1 n2 n3 n4 n5", {}, ["n5", "n0", "n3", "n1"]),
        ("n0 n1 n2 n4 n5", {}, ["n5", "n0", "n2", "n1"]),
        ("n0 n1 n2 n3 n4 n5", {"n5": 1}, ["n2", "n0", "n3", "n1"]),
        ("n0 n1 n3 n5", {"n5": 1}, ["n5", "n0", "n3", "n1"]),
        ("n1 n3", {}, ["n3", "n1"]),
    ],
)
def test_own_nodes_come_before_groups_and_after_what_nodes_can(
    usable: str, last: dict[str, int], seats: list[str]
) -> None:
    own = ("n5", "n0", "n3", "n1")
    nodes = usable.split()
    fabric = network(**{node: f"s{int(node[1]) // 2}" for node in nodes})
    groups = communicating_seats(GangSpec(4, 2, tensor=2))
    assert placement.first_seats(fabric, nodes, 4, last, groups, own=own) == seats
