"""How a gang trains, as its view says it: from statuses of agents whose ranks report, and from what job.toml says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.events import AgentReported, AgentStatus, NodeNumber, NodeTraining
from muster.daemon.coordinator.core.state.facts import Progress
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.services import conversion
from muster.daemon.coordinator.services.views import gang_view
from muster.launcher.plan.arithmetic import Arithmetic, arithmetic_of, peak_on_nodes
from muster.launcher.spec.spec import Job
from muster.launcher.submission.job_message import job_message, lacks_peak
from muster.simulator.scenario import Scenario
from muster.slurm.client.types import Node
from muster.v1 import agent_pb2
from muster.v1.api_pb2 import GangView, GoodputView
from muster.v1.common_pb2 import RankNumber


def view_of(world: Scenario, *, brief: bool = False, for_people: bool = True) -> GangView:
    core = world.core
    return gang_view(core.state, core.observed, world.gang, world.now, brief=brief, for_people=for_people)


def trained(nodes: int = 3) -> Scenario:
    world = Scenario(nodes, 0)
    world.run_until(lambda: view_of(world).committed.step >= 3)
    return world


def report(world: Scenario, **training: object) -> None:
    """All agents report this of the running generation, and of loss 1, 2, 3 ... on their nodes."""
    seen = world.core.observed.gang(world.gang.id)
    for value, seat in enumerate(world.gang.roster.seats, start=1):
        loss = NodeNumber("loss", 40, 1, value, value, value, value - 1, value - 1)
        tokens = NodeNumber("tokens", 40, 1, 500.0, 500.0, 500.0, value - 1, value - 1)
        said = NodeTraining(world.gang.newest.generation, (loss, tokens))
        agent = seen.agents[seat.node]
        agent.status = replace(agent.status, training=replace(said, **training))  # type: ignore[arg-type]


def pace(world: Scenario, step_s: float) -> None:
    world.core.observed.gang(world.gang.id).pace.median_step_s = step_s


def test_a_gang_whose_ranks_say_nothing_has_a_pace_and_no_numbers() -> None:
    world = trained()
    pace(world, 0.5)
    training = view_of(world).training
    assert (training.steps_per_s, training.done_s, training.mfu, len(training.metrics)) == (2.0, 0, 0, 0)


def test_numbers_of_all_nodes_are_one_number() -> None:
    world = trained()
    report(world)
    loss, tokens = view_of(world).training.metrics
    assert loss == RankNumber(
        name="loss", step=40, ranks=3, least=1, median=2, greatest=3, least_rank=0, greatest_rank=2
    )
    assert tokens.name == "tokens"


def test_the_end_follows_from_the_pace_and_moves_with_no_clock() -> None:
    world = trained()
    report(world, last_step=1000)
    pace(world, 0.5)
    view = view_of(world)
    stepped_at = world.core.observed.gang(world.gang.id).last_step_at
    assert view.training.last_step == 1000
    assert view.training.done_s == stepped_at + (1000 - view.step) * 0.5


def test_the_first_number_after_a_recovery_ends_it_for_a_script_that_only_logs() -> None:
    world = trained()
    world.kill_rank(world.gang.roster.seats[1].node)
    world.run_until(lambda: (world.gang.phase, world.gang.newest.generation) == (Phase.RUNNING, 2))
    newest = world.gang.recovery.recoveries[-1]
    assert (newest.generation, newest.first_step_at) == (2, 0.0)
    world.core.observed.gang(world.gang.id).last_step = (0, 0)
    assert view_of(world).recoveries[-1].first_step_s == 0.0
    report(world, step=7, first_step=5, first_at_s=world.now + 3)
    assert view_of(world).recoveries[-1].first_step_s == world.now + 3
    report(world, step=7, first_step=5, first_at_s=1.0)  # another clock
    assert view_of(world).recoveries[-1].first_step_s == max(newest.running_at, newest.started_at)


def test_a_script_that_only_logs_has_a_step_and_a_pace() -> None:
    world = trained()
    world.core.observed.gang(world.gang.id).last_step = (0, 0)
    pace(world, 0.0)
    report(world, step=77, step_s=0.25, last_step=100)
    world.gang.newest.progress = Progress()
    for agent in world.core.observed.gang(world.gang.id).agents.values():
        silent = [replace(rank, step=0, progressed=False) for rank in agent.status.ranks]
        agent.status = replace(agent.status, ranks=tuple(silent))
    view = view_of(world)
    assert (view.step, {rank.step for rank in view.ranks}, view_of(world, brief=True).step) == (77, {77}, 77)
    assert (view.training.steps_per_s, view.training.step_s) == (4.0, 0.25)
    assert view.training.done_s > 0


def test_steps_that_ranks_report_count_before_those_of_their_numbers() -> None:
    world = trained()
    before = view_of(world)
    report(world, step=77)
    view = view_of(world)
    assert (view.step, [rank.step for rank in view.ranks]) == (before.step, [rank.step for rank in before.ranks])


def test_a_job_without_ranks_shows_the_step_that_its_account_knows() -> None:
    world = trained()
    core = world.core
    world.gang.phase, world.gang.newest.progress = Phase.DONE, Progress()
    account = GoodputView(logged_step=77)
    assert gang_view(core.state, core.observed, world.gang, world.now, goodput=lambda *_: account).step == 77


def test_what_an_older_generation_has_said_is_not_shown() -> None:
    world = trained()
    report(world, generation=world.gang.newest.generation + 1)
    assert list(view_of(world).training.metrics) == []


def test_utilization_is_that_of_the_model_else_of_what_was_counted() -> None:
    world = trained()
    pace(world, 0.5)
    report(world, flops=1e12)
    said = {"run_dir": "/r", "peak_flops": 1e13}
    world.gang.account.shown_spec = json.dumps(said)
    assert view_of(world).training.mfu == pytest.approx(3e12 / (0.5 * 3 * 1e13))
    world.gang.account.shown_spec = json.dumps({**said, "flops_per_step": 6e12})
    assert view_of(world).training.mfu == pytest.approx(6e12 / (0.5 * 3 * 1e13))
    assert view_of(world).training.tokens_per_gpu_s == 1000.0


def test_tokens_are_those_of_job_toml_where_no_rank_reports_any() -> None:
    world = trained()
    pace(world, 0.5)
    world.gang.account.shown_spec = json.dumps({"tokens_per_step": 3000.0})
    assert view_of(world).training.tokens_per_gpu_s == 2000.0


def test_a_brief_view_has_the_pace_and_a_program_nothing() -> None:
    world = trained()
    pace(world, 0.5)
    report(world, last_step=1000)
    training = view_of(world, brief=True).training
    assert (training.steps_per_s, training.last_step, len(training.metrics)) == (2.0, 1000, 0)
    assert not view_of(world, for_people=False).HasField("training")


def test_numbers_of_an_agent_that_are_impossible_are_left_out() -> None:
    good = RankNumber(name="loss", step=1, ranks=1, least=1, median=1, greatest=1)
    wrong = RankNumber(name="loss", step=1, ranks=1, least=1, median=float("nan"), greatest=1)
    empty = RankNumber(name="loss", step=1)
    many = agent_pb2.NodeTraining(generation=1, numbers=[wrong, empty, *[good] * 100], step_s=float("inf"))
    found = conversion.status(agent_pb2.AgentStatus(training=many), ()).training
    assert found is not None
    assert (len(found.numbers), found.step_s) == (30, 0.0)


def test_times_that_no_step_takes_make_no_view_impossible() -> None:
    world = trained()
    pace(world, 0.0)
    world.gang.account.shown_spec = json.dumps({"peak_flops": 5e-324})
    for step_s in (5e-324, 1e9, 1e308):
        report(world, step_s=step_s, flops=1e30, last_step=10**9)
        assert view_of(world).training.done_s == 0 or step_s < 1
    sent = [agent_pb2.NodeTraining(step_s=step_s, flops=1e308) for step_s in (5e-324, 1e308, float("nan"), 0.5)]
    found = [conversion.status(agent_pb2.AgentStatus(training=one), ()).training for one in sent]
    assert [(one.step_s, one.flops) for one in found if one] == [(0, 1e30), (0, 1e30), (0, 1e30), (0.5, 1e30)]


def test_the_largest_that_a_node_says_is_read() -> None:
    number = RankNumber(name="\U0001f600" * 64, step=10**9, ranks=8, least=1.5, median=2, greatest=3)
    sent = agent_pb2.NodeTraining(generation=9, numbers=[number] * 32, last_step=10**9, step_s=1.5, flops=1e15)
    found = conversion.status(agent_pb2.AgentStatus(training=sent), ()).training
    assert found is not None
    assert len(found.numbers) == 32


def test_the_journal_keeps_no_numbers() -> None:
    training = NodeTraining(1, (NodeNumber("loss", 1, 1, 1.5, 1.5, 1.5, 0, 0),))
    event = AgentReported("g", "n1", "i", AgentStatus(training=training))
    assert "loss" not in events.stored_text(event)


def job(**tables: object) -> Job:
    return Job(name="j", nodes=2, command=["python", "t.py"], run_dir="/r", **tables)  # type: ignore[arg-type]


def test_a_step_computes_what_job_toml_says_and_nothing_is_guessed() -> None:
    model = {"parameters": 7e9, "layers": 32, "hidden_size": 4096, "sequence_length": 4096, "global_batch": 256}
    whole = arithmetic_of(job(model=model, slurm={"gres": "gpu:H100-SXM:8"}))
    per_token = 6 * 7e9 + 12 * 32 * 4096 * 4096
    assert whole == Arithmetic(per_token * 4096 * 256, 4096 * 256, 989.4e12)
    assert arithmetic_of(job(model={"parameters": 7e9})) == Arithmetic()
    assert arithmetic_of(job(model={"parameters": 7e9, "sequence_length": 8, "global_batch": 2})).tokens == 16
    assert arithmetic_of(job(slurm={"gres": "gpu:8"})).peak == 0


@pytest.mark.parametrize(
    ("gres", "peak"),
    [
        (["gpu:h100-sxm:8(S:0-1)", "gpu:h100-sxm:8", "gpu:mi300x:8"], 989.4e12),
        (["gpu:h100-sxm:8", "gpu:a100-sxm-80gb:8", ""], 0.0),
        (["gpu:8", "gpu:8", "gpu:h100-sxm:8"], 0.0),
    ],
    ids=["one type in the partition", "two types", "no type"],
)
def test_without_a_type_in_job_toml_the_peak_is_that_of_the_nodes(gres: list[str], peak: float) -> None:
    partitions = [("main", "all"), ("main", "all"), ("old", "all")]
    nodes = [Node("n", frozenset(), gres=text, partitions=names) for text, names in zip(gres, partitions, strict=True)]
    assert peak_on_nodes(job(gpus_per_node=8, slurm={"partition": "spare,main"}), nodes) == peak


def test_slurm_is_asked_for_the_peak_only_where_mfu_needs_it() -> None:
    typed = {"gres": "gpu:H100-SXM:8"}
    known = {"parameters": 7e9, "layers": 32, "hidden_size": 4096, "sequence_length": 8, "global_batch": 16}
    counts = {"MUSTER_COUNT_FLOPS": "1"}

    def lacks(**tables: object) -> bool:
        asked = job(**tables)
        return lacks_peak(job_message(asked, []), asked)

    assert lacks(gpus_per_node=8, model=known)
    assert lacks(slurm={"gres": "gpu:8"}, env=counts)
    assert not lacks(gpus_per_node=8)
    assert not lacks(model=known), "it trains on CPUs"
    assert not lacks(slurm=typed, model=known)
