"""Orders and views: pure functions of the durable state and the observed state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import AgentStatus, GangSpec, RankState, Version
from muster.daemon.coordinator.core.state.fact_text import describe
from muster.daemon.coordinator.core.state.observed_state import ObservedAgent, ObservedState, Stall
from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.services.views import gang_view
from muster.daemon.coordinator.shell.orders import Orders
from muster.launcher.output.screen import Screen
from muster.launcher.output.tables import gang_details
from muster.node_health import NodeHealth
from muster.v1 import agent_pb2 as pb

NODES = ("n1", "n2", "n3")
SEATS = (facts.Seat("n1", 0, "n2", ("n2", "n3")), facts.Seat("n2", 1, "n1", ("n1", "n3")))
SWAPPED = (SEATS[0], facts.Seat("n3", 1, "n1", ("n1",)))
SPARES = (facts.Seat("n3", -1, "", ("n1", "n2")),)
FROM_N2 = (facts.ShardSource(0, "n1", True, "a"), facts.ShardSource(1, "n2", True, "b"))

GATHERED: tuple[facts.Fact, ...] = (
    facts.GangRegistered("g", 7, 1000, "train", GangSpec(2, 1, ranks_per_node=2), '{"run_dir":"/run"}'),
    facts.PhaseChanged("g", Phase.GATHERING, ""),
    *(facts.MemberJoined("g", n, 7, f"{n}-i", f"[fd00::{n[1]}]:500{n[1]}", n == "n1", "") for n in NODES),
)
PREFLIGHT = (*GATHERED, facts.GenerationFenced("g", 0, "start", True, "n1", 0, 1.0))
STARTED = (*PREFLIGHT, facts.GenerationStarted("g", 1, SEATS, SPARES, "n1", 4001, None, (), "", 2.0, "start"))
RUNNING = (*STARTED, facts.PhaseChanged("g", Phase.RUNNING, ""), facts.FirstStep("g", 1, 1))
FENCED = (*RUNNING, facts.GenerationFenced("g", 1, "n2: Xid 79", True, "n1", 9, 3.0))
UNFIT = (*FENCED, facts.MemberRemoved("g", "n2", "Xid 79", True))
LOST = (*FENCED, facts.MemberRemoved("g", "n2", "lost", False))
SWAP = facts.GenerationStarted("g", 2, SWAPPED, (), "n1", 4002, Version(1, 8), FROM_N2, "", 4.0, "swap")
FLUSH = facts.FlushOrdered("g", 1, Version(1, 8), FROM_N2, "asked for")


def _state(*story: facts.Fact) -> DurableState:
    state = DurableState()
    for number, fact in enumerate(story):
        apply(state, fact, 10.0 + number)
    return state


def _order(state: DurableState, node: str) -> pb.Order:
    return Orders(state.gangs["g"]).for_node(node)


def _duties(*story: facts.Fact) -> list[str]:
    """The duty of n1, n2 and n3."""
    orders = [_order(_state(*story), node) for node in NODES]
    return [f"{pb.Duty.Name(o.duty).removeprefix('DUTY_')} {o.generation}" for o in orders]


def test_ranks_are_asked_to_leave_until_the_next_generation_starts() -> None:
    planned = (*RUNNING, facts.SwapPlanned("g", "n2", 1, "Xid 64"))
    assert [_order(_state(*planned), node).planned_swap for node in NODES[:2]] == ["Xid 64"] * 2
    assert _order(_state(*planned), "n1").serial > _order(_state(*RUNNING), "n1").serial
    fenced = (*planned, facts.GenerationFenced("g", 1, "Xid 64", True, "n1", 9, 3.0))
    assert _order(_state(*fenced), "n1").planned_swap == ""
    assert _order(_state(*fenced, facts.MemberRemoved("g", "n2", "Xid 64", True), SWAP), "n1").planned_swap == ""


def test_ranks_are_asked_to_stop_for_a_growth_and_then_told_how_many_wrote_the_version() -> None:
    planned = (*RUNNING, facts.GrowthPlanned("g", 1, 3, "grows from 4 to 6 ranks with n3"))
    assert _order(_state(*planned), "n1").planned_swap == "grows from 4 to 6 ranks with n3"
    fenced = (*planned, facts.GenerationFenced("g", 1, "the gang grows", True, "n1", 9, 3.0))
    seats = (*SEATS, facts.Seat("n3", 2, "n1", ("n1",)))
    grown = facts.GenerationStarted("g", 2, seats, (), "n1", 4002, Version(1, 8), FROM_N2, "", 4.0, "more replicas")
    order = _order(_state(*fenced, grown), "n3")
    assert (order.world_size, order.restore.written_ranks, order.planned_swap) == (6, 4, "")


@pytest.mark.parametrize(
    ("story", "duties"),
    [
        (GATHERED, ["HOLD 0"] * 3),
        (PREFLIGHT, ["FENCE 0"] * 3),
        (STARTED, ["RUN 1", "RUN 1", "HOLD 1"]),
        (RUNNING, ["RUN 1", "RUN 1", "HOLD 1"]),
        (FENCED, ["FENCE 1"] * 3),
        (LOST, ["FENCE 1", "EXIT 1", "FENCE 1"]),
        # Alive but unfit: its memory may be the only copy. It stays until the next generation has made a step.
        (UNFIT, ["FENCE 1"] * 3),
        ((*UNFIT, SWAP), ["RUN 2", "HOLD 2", "RUN 2"]),
        ((*UNFIT, SWAP, facts.FirstStep("g", 2, 9)), ["RUN 2", "EXIT 2", "RUN 2"]),
        ((*UNFIT, SWAP, FLUSH, facts.FirstStep("g", 2, 9)), ["RUN 2", "HOLD 2", "RUN 2"]),
        (
            (*UNFIT, SWAP, FLUSH, facts.FirstStep("g", 2, 9), facts.FlushEnded("g", 1, "/d", "")),
            ["RUN 2", "EXIT 2", "RUN 2"],
        ),
        ((*RUNNING, FLUSH, facts.PhaseChanged("g", Phase.DRAINING, "done")), ["FENCE 0"] * 3),
        ((*LOST, facts.PhaseChanged("g", Phase.REQUEUED, "no spare")), ["EXIT 1"] * 3),
        ((*RUNNING, facts.GangEnded("g", Phase.FAILED, 93, "again and again")), ["EXIT 1"] * 3),
    ],
)
def test_the_duty_of_every_node(story: tuple[facts.Fact, ...], duties: list[str]) -> None:
    assert _duties(*story) == duties


def test_a_run_order_names_places_store_and_sources() -> None:
    order = _order(_state(*UNFIT, SWAP), "n3")
    assert [(p.rank, p.node, p.local_rank) for p in order.places] == [
        (0, "n1", 0), (1, "n1", 1), (2, "n3", 0), (3, "n3", 1)
    ]  # fmt: skip
    assert (order.world_size, order.master_addr, order.master_port) == (4, "fd00::1", 4002)
    assert (order.restore.version.generation, order.restore.version.step) == (1, 8)
    assert [(s.rank, s.node, s.tier) for s in order.restore.sources] == [(0, "n1", pb.TIER_OWN), (1, "n2", pb.TIER_OWN)]
    members = {m.node: (m.group_rank, m.buddy, m.incarnation, m.peer_address) for m in order.members}
    assert members == {
        "n1": (0, "n2", "n1-i", "[fd00::1]:5001"),
        "n2": (-1, "", "n2-i", "[fd00::2]:5002"),  # kept for its memory
        "n3": (1, "n1", "n3-i", "[fd00::3]:5003"),
    }


def test_a_start_from_durable_storage_names_the_folder() -> None:
    start = facts.GenerationStarted("g", 1, SEATS, SPARES, "n1", 4001, None, (), "/d/step_8", 2.0, "start")
    flushed = (
        facts.FlushOrdered("g", 1, Version(0, 8), (), "the job is done"),
        facts.FlushEnded("g", 1, "/d/step_8", ""),
    )
    order = _order(_state(*PREFLIGHT, *flushed, start), "n1")
    assert order.restore.durable_path == "/d/step_8"
    assert not order.restore.HasField("version")
    assert not _order(_state(*STARTED), "n1").HasField("restore")


def test_an_exit_order_carries_code_and_reason() -> None:
    order = _order(_state(*RUNNING, facts.GangEnded("g", Phase.FAILED, 93, "again and again")), "n2")
    assert (order.exit_code, order.reason) == (93, "again and again")
    order = _order(_state(*LOST), "n2")
    assert (order.exit_code, order.reason) == (0, "lost")


@pytest.mark.parametrize(
    ("own_nodes", "alive", "output_node"),
    [(("n1", "n2"), False, "n2"), (("n1", "n2"), True, ""), ((), False, "")],
)
def test_one_node_goes_on_with_the_output_of_a_script_whose_node_is_lost(
    own_nodes: tuple[str, ...], alive: bool, output_node: str
) -> None:
    spec = GangSpec(2, 1, ranks_per_node=2, own_nodes=own_nodes)
    registered = facts.GangRegistered("g", 7, 1000, "train", spec, '{"run_dir":"/run"}')
    story = (registered, *FENCED[1:], facts.MemberRemoved("g", "n1", "lost", alive))
    assert {_order(_state(*story), node).output_node for node in NODES} == {output_node}
    assert _order(_state(*FENCED), "n2").output_node == ""


def test_only_the_agents_of_a_requeued_job_leave_their_memory() -> None:
    def leave(*story: facts.Fact) -> list[tuple[int, bool]]:
        orders = [_order(_state(*story), node) for node in NODES]
        return [(order.duty, order.requeued) for order in orders]

    requeued = facts.PhaseChanged("g", Phase.REQUEUED, "preempted")
    assert leave(*RUNNING, requeued) == [(pb.DUTY_EXIT, True)] * 3
    assert leave(*UNFIT, requeued) == [(pb.DUTY_EXIT, True), (pb.DUTY_EXIT, False), (pb.DUTY_EXIT, True)]
    for phase in (Phase.FAILED, Phase.CANCELLED):
        assert leave(*RUNNING, requeued, facts.GangEnded("g", phase, 1, "over")) == [(pb.DUTY_EXIT, False)] * 3


def test_orders_carry_a_flush_until_it_has_ended() -> None:
    order = _order(_state(*RUNNING, FLUSH), "n1")
    assert (order.flush.serial, order.flush.version.step, order.flush.reason) == (1, 8, "asked for")
    assert not _order(_state(*RUNNING, FLUSH, facts.FlushEnded("g", 1, "", "no space")), "n1").HasField("flush")


@pytest.mark.parametrize("length", range(len(UNFIT) + 3))
def test_a_shared_order_equals_a_nodes_own_order(length: int) -> None:
    story = (*UNFIT, SWAP, facts.FirstStep("g", 2, 9))[:length]
    state = _state(*story)
    for gang in state.gangs.values():
        orders = Orders(gang)
        for node in (*NODES, "n9"):
            assert orders.for_node(node) == Orders(gang).for_node(node)


NEWCOMERS = [facts.MemberJoined("g", f"n{n}", 8, "i", f"n{n}:1", False, "") for n in range(4, 9)]


@pytest.mark.parametrize(
    ("story", "watched"),
    [
        (GATHERED, {"n1": "", "n2": "", "n3": ""}),
        (RUNNING, {"n1": "n2 n3", "n2": "n1 n3", "n3": "n1 n2"}),
        ((*RUNNING, facts.MemberRemoved("g", "n3", "lost", False)), {"n1": "n2", "n2": "n1"}),
        ((*RUNNING, NEWCOMERS[0]), {"n1": "n2 n3", "n4": "n1 n2 n3"}),
        ((*LOST, SWAP, NEWCOMERS[0], facts.MemberRemoved("g", "n1", "lost", False)), {"n3": "n4", "n4": "n3"}),
        ((*LOST, SWAP, *NEWCOMERS), {"n1": "n3", "n6": "n7 n8 n1 n3"}),
    ],
)
def test_everybody_watches_somebody_once_ranks_have_started(
    story: tuple[facts.Fact, ...], watched: dict[str, str]
) -> None:
    order = _order(_state(*story), "n3")
    assert watched.items() <= {member.node: " ".join(member.neighbours) for member in order.members}.items()


def test_nodes_with_one_duty_share_one_order() -> None:
    orders = Orders(_state(*RUNNING).gangs["g"])
    assert orders.for_node("n1") is orders.for_node("n2")
    assert orders.for_node("n1") is not orders.for_node("n3")


KNOWN = facts.NewcomerKnown("g", "n4")
HANG = facts.HangDetected("g", 1, "hang: no step", 5.0)


def test_orders_ask_for_stacks_of_hanging_ranks_until_the_fence() -> None:
    orders = Orders(_state(*RUNNING, HANG).gangs["g"])
    assert [orders.for_node(node).keep_stacks for node in ("n1", "n2", "n3")] == [True, True, False]
    assert orders.for_node("n1").serial > Orders(_state(*RUNNING).gangs["g"]).for_node("n1").serial
    fenced = _state(*RUNNING, HANG, facts.GenerationFenced("g", 1, "hang: no step", False, "n1", 9, 5.0)).gangs["g"]
    assert not Orders(fenced).for_node("n1").keep_stacks


def test_a_view_shows_a_stall_and_declared_phases() -> None:
    state, observed = _state(*RUNNING), ObservedState(observing_since=0.0)
    status = AgentStatus(ranks=(RankState(0, 1, running=True, declared="evaluation"),))
    observed.gang("g").agents["n1"] = ObservedAgent("n1", "n1-i", True, 1.0, status)
    observed.gang("g").stall = Stall(90.0, {"n1", "n2"})
    view = gang_view(state, observed, state.gangs["g"], 100.0)
    assert view.waiting_for == "a step: no rank finished one for long; 2 agents have not answered"
    assert [rank.declared_phase for rank in view.ranks] == ["evaluation", "", "", ""]
    observed.gang("g").stall = Stall(90.0, set())
    silent_by_none = gang_view(state, observed, state.gangs["g"], 100.0)
    assert silent_by_none.waiting_for == "a step: no rank finished one for long"
    assert "declared\tevaluation, by 1 of 4 ranks: hangs are not detected" in gang_details(view, Screen())


class CountedSeats(tuple[facts.Seat, ...]):
    """Counts how often all seats are looked through."""

    looks = 0

    def __iter__(self) -> Iterator[facts.Seat]:
        type(self).looks += 1
        return super().__iter__()


def test_a_view_looks_through_the_seats_a_few_times_however_many_nodes_there_are() -> None:
    """The view of the largest gang, looked through once for each node, held the event loop up for three seconds."""
    state = _state(*RUNNING)
    gang, names = state.gangs["g"], [f"m{number}" for number in range(200)]
    gang.roster.members = {name: Member(name, 7, "i", "a:1", False, "") for name in names}
    gang.roster.seats = CountedSeats(facts.Seat(name, number, "", ()) for number, name in enumerate(names))
    view = gang_view(state, ObservedState(observing_since=0.0), gang, 100.0)
    assert {node.role for node in view.nodes if node.node in gang.roster.members} == {"rank"}
    assert CountedSeats.looks < 10


def _view_words(story: tuple[facts.Fact, ...], fenced: dict[str, int] | None = None) -> str:
    state, observed = _state(*story), ObservedState(observing_since=0.0)
    for node, generation in (fenced or {}).items():
        observed.gang("g").agents[node] = ObservedAgent(
            node, f"{node}-i", True, 1.0, AgentStatus(fenced_generation=generation)
        )
    return gang_view(state, observed, state.gangs["g"], 100.0).waiting_for


@pytest.mark.parametrize(
    ("story", "words"),
    [
        (GATHERED[:1], "Slurm to start job 7"),
        ((*GATHERED, facts.JobChanged("g", (*NODES, "n4"))), "agents: 1 of 3 are attached, missing n2 n3 n4"),
        (PREFLIGHT, "n1 to open the rendezvous store"),
        (STARTED, "ranks to start on n1 n2"),
        (RUNNING, ""),
        (FENCED, "the ranks of generation 1 to end on n2 n3"),
        ((*RUNNING, HANG), "the fence of the hanging generation: hang: no step"),
        ((*RUNNING, facts.SlurmCallOwed("g", 1, "let_go", 7, "n3", "")), "Slurm: remove n3 from job 7"),
    ],
)
def test_what_a_gang_waits_for(story: tuple[facts.Fact, ...], words: str) -> None:
    assert _view_words(story, {"n1": 1}) == words


def test_a_view_shows_node_health_and_recoveries() -> None:
    judged, runs = facts.NodeJudged("n2", NodeHealth.LOST, "silent"), facts.PhaseChanged("g", Phase.RUNNING, "")
    restored = facts.StateRestored("g", 2, Version(1, 8), 1, 0, 0, (), 0.1)
    state = _state(*LOST, judged, SWAP, runs, restored, facts.FirstStep("g", 2, 9))
    observed = ObservedState(observing_since=0.0)
    observed.gang("g").suspected_since["n3"] = 99.0
    view = gang_view(state, observed, state.gangs["g"], 100.0)
    assert [(n.node, n.verdict, n.role, n.reason) for n in view.nodes] == [
        ("n1", "FIT", "rank", ""),
        ("n2", "LOST", "out", "silent"),
        ("n3", "SUSPECT", "rank", "silent or accused for 1.0 s"),
    ]
    recovery = view.recoveries[0]
    assert (recovery.generation, recovery.action, list(recovery.nodes_out), list(recovery.nodes_in)) == (
        2, "swap", ["n2"], ["n3"]
    )  # fmt: skip
    assert (recovery.step_before, recovery.step_restored) == (9, 8)
    assert recovery.suspected_s < recovery.detected_s < recovery.started_s
    assert recovery.started_s < recovery.running_s < recovery.restored_s < recovery.first_step_s
    assert (view.run_dir, view.slurm_job_ids) == ("/run", [7])


def test_every_fact_has_a_line() -> None:
    lines = [describe(fact) for fact in (*UNFIT, SWAP, FLUSH, facts.FlushEnded("g", 1, "", "no space"), KNOWN)]
    assert all(line and "\n" not in line and not line.startswith("{") for line in lines)
    assert describe(SWAP) == (
        "generation 2 starts from memory at step 8 (generation 1), swap; ranks on n1 n3; spares: none"
    )
    assert describe(facts.SlurmCallOwed("g", 4, "requeue", 7, "", "no spare", exclude=("n2",))) == (
        "Slurm call 4: requeue job 7, excluding n2: no spare"
    )
