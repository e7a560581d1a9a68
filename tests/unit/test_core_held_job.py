"""Jobs that Slurm holds, or puts back into its queue, before an agent has attached."""

import pytest

from muster.daemon.coordinator.core.recovery.requeueing import FAILED_LAUNCHES
from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import HELD_AFTER_LAUNCH
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.services.views import waiting_for
from muster.daemon.coordinator.slurm.pending_reasons import pending_words
from muster.simulator.scenario import Scenario
from muster.simulator.world.slurm_jobs import JobSubmission


def failing(nodes: int, idle_nodes: int, *bad: str, **spec: object) -> Scenario:
    """Beside the gang of n0, a job h begins on the other nodes, of which some can't launch it."""
    world = Scenario(1, 0, idle_nodes=idle_nodes)
    world.run_until(lambda: world.is_running(1))
    world.world.cluster.prolog_fails_on.update(bad)
    world.world.submit(JobSubmission("h", events.GangSpec(nodes, 0, **spec)))  # type: ignore[arg-type]
    return world


def held(world: Scenario) -> Gang:
    return world.core.state.gangs["h"]


def waits_for(world: Scenario) -> str:
    return waiting_for(world.core.state, world.core.observed, held(world))


def releases(world: Scenario) -> list[str]:
    return [call.text for call in world.slurm if call.verb == "requeue"]


def test_a_launch_that_fails_on_one_node_needs_no_operator() -> None:
    world = failing(2, 3, "n1")
    world.run_until(lambda: held(world).newest.stepped_generation == 1, 120)
    (why,) = releases(world)
    assert "the launch of the job failed, and Slurm holds it" in why
    assert world.world.cluster.nodes()["n1"].reason == "Prolog error"
    assert {seat.node for seat in held(world).roster.seats} == {"n2", "n3"}


def test_a_launch_that_fails_on_each_node_drains_no_more_than_a_few() -> None:
    world = failing(1, 9, *(f"n{at}" for at in range(10)))
    world.run_for(600)
    assert len(releases(world)) == FAILED_LAUNCHES
    assert sum(node.drained for node in world.world.cluster.nodes().values()) == FAILED_LAUNCHES + 1
    assert f"scontrol release {held(world).slurm.job} lets it start" in waits_for(world)
    world.world.cluster.prolog_fails_on.clear()
    world.world.cluster.requeue(held(world).slurm.job, (), None)
    world.run_until(lambda: held(world).newest.stepped_generation == 1, 120)
    assert held(world).slurm.runs_without_start == 0


def test_a_job_that_may_not_be_requeued_is_left_held_and_says_how_it_starts() -> None:
    world = failing(1, 2, "n1", requeue=False)
    world.run_for(60)
    assert releases(world) == []
    assert "launch failed requeued held: held because its launch failed" in waits_for(world)
    assert f"scontrol release {held(world).slurm.job}" in waits_for(world)


def test_a_job_that_goes_back_into_the_queue_before_an_agent_attached_says_why() -> None:
    world = Scenario(2, 0, absent=["n0", "n1"], gather_timeout_s=40.0)
    world.run_until(lambda: world.gang.phase is Phase.GATHERING)
    world.post_event(events.SlurmJobChanged("g", 1, (), 1, None, pending_reason="BeginTime"))
    assert world.gang.phase is Phase.REQUEUED
    assert "put the job back into the queue, and no agent is attached: BeginTime" in world.gang.reason


@pytest.mark.parametrize("reason", ["", "Prolog"])
def test_a_job_that_waits_for_the_end_of_its_last_run_names_the_node(reason: str) -> None:
    """A Prolog that hangs keeps the node, and Slurm gives no reason, or that of the last run."""
    world = Scenario(2, 0, absent=["n0", "n1"])
    world.run_until(lambda: world.gang.phase is Phase.GATHERING)
    world.post_event(events.SlurmJobChanged("g", 1, (), 1, None, pending_reason=reason, completing=("n1",)))
    waits = waiting_for(world.core.state, world.core.observed, world.gang)
    before = f"{reason}; " * bool(reason)
    assert waits.startswith(
        f"Slurm to start job 1 ({before}its last run has not ended on n1: if that lasts, a Prolog, "
    )


@pytest.mark.parametrize("attaches", [False, True])
def test_a_job_that_could_not_start_says_why(attaches: bool) -> None:
    world = Scenario(1, 0, absent=[] if attaches else ["n0"])
    world.run_until(lambda: world.is_running(1) if attaches else world.gang.phase is Phase.GATHERING)
    world.post_event(events.SlurmJobChanged("g", 1, (), 0, "FAILED", end_words="n0 could not open its output"))
    assert world.gang.reason == "Slurm ended job 1: FAILED" + ": n0 could not open its output" * (not attaches)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("JobHeldUser", "scontrol release 7 lets it start"),
        ("job_requeued_in_held_state", "held since its requeue: scontrol release 7 lets it start"),
        ("JobHeldAdmin", "held by an administrator"),
        ("launch_failed_requeued_held", "failed on n1, n2: scontrol release 7"),
        ("launch_failure_limit_exceeded_requeued_held", "scontrol release 7 lets it start again"),
        ("JobHoldMaxRequeue", "the log of slurmd on its first node says why"),
        ("user_env_retrieval_failed_requeued_held", "scontrol release 7 lets it start again"),
        ("DependencyNeverSatisfied", "muster cancel 7"),
        ("BadConstraints", "muster cancel 7"),
        ("PartitionNodeLimit", "it asks for more nodes than its partition has, or gives to one job: muster cancel 7"),
        ("PartitionConfig", "more than the partition has or allows: muster cancel 7"),
        ("PartitionInactive", "an administrator has closed its partition"),
        ("ReqNodeNotAvail, May be reserved for other job", "sinfo -R says why nodes are out of service"),
        ("AssocMaxNodePerJobLimit", "more than its account may have in one job: muster cancel 7"),
        ("QOSMaxWallDurationPerJobLimit", "more than its QOS may have in one job: muster cancel 7"),
        ("QOSMaxGRESPerNode", "more than its QOS may have in one job: muster cancel 7"),
        ("AssocGrpNodeLimit", "its account has reached a limit: it starts once other jobs have ended"),
        ("QOSMaxNodePerUserLimit", "sacctmgr show qos shows the limits"),
        ("MaxGRESPerAccount", "sacctmgr show assoc shows the limits"),
        ("InvalidQOS", "scontrol update jobid=7 account=NAME qos=NAME"),
        ("BeginTime", "at its --begin time, or after the delay that follows a requeue"),
        ("Dependency", "scontrol show job 7 names them"),
        ("Licenses", "once enough of its licences are free"),
        ("Reservation", "it starts in its reservation"),
    ],
)
def test_what_does_not_go_away_by_itself_is_said_with_the_way_out(reason: str, words: str) -> None:
    told = pending_words(reason, 7, ["n1", "n2"])
    assert told.startswith(f"{reason}: ")
    assert words in told


def test_a_job_that_may_not_start_on_the_nodes_that_failed_it_says_which_and_the_way_out() -> None:
    told = pending_words("BadConstraints", 7, [], ["n0", "n1", "n2"])
    assert "without n0 n1 n2, on which earlier runs of this job failed" in told
    assert "muster cancel 7, and submit it again" in told


@pytest.mark.parametrize("reason", ["", "Resources", "Priority"])
def test_what_goes_away_by_itself_is_slurms_word(reason: str) -> None:
    assert pending_words(reason, 7, []) == reason


@pytest.mark.parametrize("drained", ["Prolog error", "batch job complete failure", "SlurmdSpoolDir is full"])
def test_only_nodes_of_this_launch_are_named(drained: str) -> None:
    """Another launch has failed on n2, perhaps of another user's job. n0 is drained for another reason."""
    world = Scenario(2, 0, absent=["n0", "n1"], requeue=False)
    world.run_until(lambda: world.gang.phase is Phase.GATHERING)
    drains = {"n0": "muster: [h] Xid 79", "n1": drained, "n2": drained}
    for name, reason in drains.items():
        world.core.observed.node(name).drain = events.SlurmDrain(reason, idle=True)
    world.post_event(events.SlurmJobChanged("g", 1, (), 1, None, pending_reason=HELD_AFTER_LAUNCH))
    told = waiting_for(world.core.state, world.core.observed, world.gang)
    assert "its launch failed on n1: scontrol release" in told
