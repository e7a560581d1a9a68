"""The lines of Muster in Slurm's comment and AdminComment of a job."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState, Node
from muster.daemon.coordinator.core.state.events import GangSpec, Version
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.policy.policy import Policy, PolicyError
from muster.daemon.coordinator.slurm.job_comments import INTERVAL_S, MOST_ADMIN_CHARS, JobComments, with_own_part
from muster.node_health import NodeHealth
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.slurm.client.parsing.sbatch_request import JobRequest
from muster.slurm.client.types import Job


class CommentedJob:
    """Job 1 of a Slurm in memory, a state in which it trains, and what writes its comments. `now`: of the clock."""

    def __init__(self, *, comment: bool = True, admin_comment: bool = True, nodes: int = 4) -> None:
        self.now = 1000.0
        names = tuple(f"n{number}" for number in range(1, nodes + 1))
        self.slurm = FakeSlurm(FakeCluster(names, now=lambda: self.now))
        self.slurm.cluster.submit(JobRequest(nodes=3, no_kill=True))
        self.state = DurableState()
        self.comments: JobComments | None = None
        self.decide(facts.GangRegistered("g", 1, 0, "x", GangSpec(3, 0), "{}"))
        self.comments = JobComments(
            self.slurm, self.state, comment=comment, admin_comment=admin_comment, now=lambda: self.now
        )

    def decide(self, *decided: facts.Fact) -> None:
        for fact in decided:
            apply(self.state, fact, self.now)
        if self.comments is not None:
            self.comments.note(decided)

    def run(self, step: int, gang: str = "g") -> None:
        """The ranks train, and have come to `step`."""
        path = {Phase.SUBMITTED: (Phase.GATHERING, Phase.PREFLIGHT), Phase.RUNNING: (Phase.RECOVERING,)}
        for phase in (*path.get(self.state.gangs[gang].phase, ()), Phase.STARTING):
            self.decide(facts.PhaseChanged(gang, phase, ""))
        progress = facts.Progress(Version(1, step), None)
        self.decide(facts.PhaseChanged(gang, Phase.RUNNING, "", progress=progress))

    def lose(self, node: str, why: str) -> None:
        """A recovery begins that leaves the node of a job that trains."""
        self.decide(facts.GenerationFenced("g", 1, f"rank 0 said: secret words of {node}", True, "n1", 20, self.now))
        recovery = self.state.gangs["g"].recovery.recoveries[-1]
        recovery.action, recovery.nodes_out = "swap", [node]
        self.state.nodes[node] = Node(node, health=NodeHealth.UNFIT, reason=why)

    def lose_and_go_on(self, node: str, why: str) -> None:
        """The job trains, loses the node and trains again."""
        if self.state.gangs["g"].phase is not Phase.RUNNING:
            self.run(1)
        self.lose(node, why)
        self.run(21)

    async def write(self) -> None:
        assert self.comments
        await self.comments.write_due()

    async def shown(self) -> Job:
        await self.write()
        return self.slurm.cluster.jobs()[1]


@pytest.fixture
def job() -> CommentedJob:
    return CommentedJob()


async def test_a_user_sees_phase_step_and_recoveries(job: CommentedJob) -> None:
    assert (await job.shown()).comment == ""
    job.run(1)
    assert (await job.shown()).comment == ""  # the look at the start has found nothing to say, and counts as one
    job.now += INTERVAL_S
    assert (await job.shown()).comment == "muster: RUNNING from step 1"
    job.lose("n2", "Xid 79: GPU has fallen off the bus")
    job.now += INTERVAL_S
    assert (await job.shown()).comment == "muster: RUNNING from step 1"
    job.run(21)
    assert (await job.shown()).comment == "muster: RUNNING from step 21, 1 recovery, the last: swap of n2"
    job.decide(facts.GangEnded("g", Phase.FAILED, 93, "rank 0 said: secret"))
    assert (await job.shown()).comment == (
        "muster: FAILED with exit code 93 at step 21, 1 recovery, the last: swap of n2"
    )


async def test_an_administrator_sees_which_nodes_were_lost_and_why(job: CommentedJob) -> None:
    job.now += INTERVAL_S
    job.run(1)
    assert (await job.shown()).admin_comment == ""
    for node, why in (("n2", "Xid 79: GPU [0] has fallen off the bus"), ("n3", "no heartbeat")):
        job.lose_and_go_on(node, why)
        job.now += INTERVAL_S
        line = (await job.shown()).admin_comment
    assert line == (
        "[muster: n3 left in generation 2 (swap), UNFIT: no heartbeat; "
        "n2 left in generation 2 (swap), UNFIT: Xid 79: GPU (0) has fallen off the bus]"
    )


async def test_a_requeue_names_no_node_against_which_nothing_is_held(job: CommentedJob) -> None:
    """Slurm has preempted the job: the agent on n2 has left before the others."""
    job.run(1)
    job.lose("n2", "")
    recovery = job.state.gangs["g"].recovery.recoveries[-1]
    recovery.action, recovery.nodes_out = "requeue", ["n2", "n3"]
    job.state.nodes["n2"].health = NodeHealth.FIT
    job.run(21)
    shown = await job.shown()
    assert shown.comment == "muster: RUNNING from step 21, 1 recovery, the last: requeue"
    assert shown.admin_comment == ""
    job.decide(facts.SlurmCallOwed("g", 7, "requeue", 1, "", "broken", exclude=("n3",)))
    job.run(40)
    job.now += INTERVAL_S
    assert (await job.shown()).admin_comment == "[muster: n3 left in generation 2 (requeue), not known]"


async def test_while_a_requeued_job_waits_it_names_no_node_against_which_nothing_is_held(job: CommentedJob) -> None:
    """Nothing says yet how it will go on. Only of n3 is something known."""
    for node in ("n2", "n3"):
        job.decide(facts.MemberJoined("g", node, 1, f"{node}-i", "[fd00::1]:5000", False, ""))
        job.state.nodes[node] = Node(node)
    job.run(1)
    job.decide(facts.GenerationFenced("g", 1, "the agents left", True, "n1", 20, job.now))
    job.decide(*(facts.MemberRemoved("g", node, "its agent left", False) for node in ("n2", "n3")))
    job.state.nodes["n3"] = Node("n3", health=NodeHealth.UNFIT, reason="Xid 79")
    job.decide(facts.SlurmCallOwed("g", 1, "requeue", 1, "", "preempted"))
    job.decide(facts.PhaseChanged("g", Phase.REQUEUED, "preempted"), facts.SlurmCallSettled("g", 1, ""))
    job.now += INTERVAL_S
    shown = await job.shown()
    assert shown.comment == "muster: REQUEUED at step 1, 1 recovery: preempted"
    assert shown.admin_comment == "[muster: n3 left in generation 2 (recovering), UNFIT: Xid 79]"


@pytest.mark.parametrize("theirs", ["for the paper", "for the paper; muster: an older reason"])
async def test_a_users_own_comment_stays(job: CommentedJob, theirs: str) -> None:
    await job.slurm.set_comments(1, theirs)
    job.lose_and_go_on("n2", "broken")
    shown = await job.shown()
    assert shown.comment == theirs
    assert shown.admin_comment.startswith("[muster: n2 left")


@pytest.mark.parametrize("theirs", ["JS1:H4sIAAAA", "JS1:H4sIAAAA [muster: of yesterday]", "[muster: old]JS1:H4sIAAAA"])
async def test_what_others_wrote_into_the_admin_comment_stays(job: CommentedJob, theirs: str) -> None:
    await job.slurm.set_comments(1, admin_comment=theirs)
    job.lose_and_go_on("n2", "broken")
    assert (await job.shown()).admin_comment == ("JS1:H4sIAAAA [muster: n2 left in generation 2 (swap), UNFIT: broken]")


def test_a_long_admin_comment_leaves_room_for_a_part_of_the_line_or_for_none() -> None:
    own = f"[muster: {'x' * 2000}]"
    shown = with_own_part("a" * 900, own)
    assert (len(shown), shown[:905], shown[-5:]) == (MOST_ADMIN_CHARS, f"{'a' * 900} [mus", " ...]")
    assert with_own_part(shown, "[muster: short]") == f"{'a' * 900} [muster: short]"
    assert with_own_part("a" * 990, own) == ""


async def test_a_job_whose_lines_have_not_changed_is_left_alone(job: CommentedJob) -> None:
    job.run(1)
    await job.shown()
    job.slurm.cluster.update("", 1, comment="muster: touched")
    await job.shown()
    job.now += 10 * INTERVAL_S
    assert (await job.shown()).comment == "muster: touched"


async def test_two_lines_of_one_job_that_runs_are_some_time_apart(job: CommentedJob) -> None:
    job.run(1)
    await job.shown()
    job.run(5)
    job.now += INTERVAL_S - 1
    assert (await job.shown()).comment == "muster: RUNNING from step 1"
    job.now += 1
    assert (await job.shown()).comment == "muster: RUNNING from step 5"
    job.decide(facts.GangEnded("g", Phase.DONE, 0, ""))
    assert (await job.shown()).comment == "muster: DONE at step 5"


async def test_a_requeue_is_shown_once_slurm_has_made_it(job: CommentedJob) -> None:
    call = facts.SlurmCallOwed("g", 1, "requeue", 1, "", "muster: no spare is left")
    job.run(7)
    await job.shown()
    job.decide(facts.PhaseChanged("g", Phase.REQUEUED, "no spare is left"), call)
    assert (await job.shown()).comment == "muster: RUNNING from step 7"
    job.decide(facts.SlurmCallSettled("g", 1, ""))
    assert (await job.shown()).comment == "muster: REQUEUED at step 7: no spare is left"


async def test_while_slurm_is_silent_only_the_newest_line_waits(job: CommentedJob) -> None:
    job.slurm.unavailable_reason = "slurmctld is away"
    job.run(1)
    await job.write()
    job.decide(facts.GangEnded("g", Phase.DONE, 0, ""))
    await job.write()
    job.slurm.unavailable_reason = ""
    job.now += INTERVAL_S
    assert (await job.shown()).comment == "muster: DONE at step 1"


async def test_a_job_that_slurm_has_ended_or_lost_is_given_up(job: CommentedJob) -> None:
    job.run(1)
    job.slurm.cluster.cancel(1)
    assert (await job.shown()).comment == ""
    job.decide(facts.GangForgotten("g"))
    job.decide(facts.SlurmCallSettled("g", 7, ""))  # of a gang that is no longer known
    await job.write()


async def test_a_coordinator_that_starts_writes_what_is_missing(job: CommentedJob) -> None:
    job.run(1)
    again = JobComments(job.slurm, job.state, now=lambda: job.now)
    task = asyncio.create_task(again.run())
    await asyncio.sleep(0)
    task.cancel()
    assert job.slurm.cluster.jobs()[1].comment == "muster: RUNNING from step 1"


async def test_an_end_does_not_wait_for_many_jobs_that_are_due() -> None:
    job = CommentedJob(nodes=200)
    job.run(1)
    for number in range(2, 200):
        job.slurm.cluster.submit(JobRequest(nodes=1, no_kill=True))
        job.decide(facts.GangRegistered(f"g{number}", number, 0, "x", GangSpec(1, 0), "{}"))
        job.run(1, f"g{number}")
    assert job.comments
    writing = asyncio.create_task(job.comments.write_due())
    for _ in range(3):
        await asyncio.sleep(0)
    assert any(one.comment for one in job.slurm.cluster.jobs().values())
    job.decide(facts.GangEnded("g150", Phase.DONE, 0, ""))
    await writing
    await job.comments.write_due()
    shown = job.slurm.cluster.jobs()
    assert shown[150].comment == "muster: DONE at step 1"
    assert not shown[149].comment
    for _ in range(200):
        await job.comments.write_due()
    assert all(one.comment for one in job.slurm.cluster.jobs().values())


async def test_a_site_may_want_one_line_or_none(tmp_path: Path) -> None:
    for comment, admin in ((True, False), (False, True)):
        job = CommentedJob(comment=comment, admin_comment=admin)
        job.lose_and_go_on("n2", "broken")
        shown = await job.shown()
        assert (bool(shown.comment), bool(shown.admin_comment)) == (comment, admin)
    neither = CommentedJob(comment=False, admin_comment=False)
    assert neither.comments
    await neither.comments.run()  # has nothing to do
    site = tmp_path / "policy.toml"
    site.write_text("[comments]\nadmin_comment = false\n")
    wanted = Policy.load(site).comments
    assert (wanted.comment, wanted.admin_comment) == (True, False)
    site.write_text("[comments]\nadmin = false\n")
    with pytest.raises(PolicyError, match=r"unknown key comments.admin; known: comment, admin_comment"):
        Policy.load(site)
