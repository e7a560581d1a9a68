"""Slurm: owed calls are made, changes in Slurm become events, simultaneous look-ups share one call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import replace

import pytest

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import GangSpec
from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.slurm.lookup import SlurmLookup
from muster.daemon.coordinator.slurm.owed_calls import BUG_ATTEMPTS, OwedCalls, make_call
from muster.daemon.coordinator.slurm.roster import SlurmRoster
from muster.daemon.coordinator.slurm.watch import SlurmWatch, job_seen
from muster.node_health import NodeHealth
from muster.slurm.client.errors import SlurmRefused, SlurmUnavailable
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.slurm.client.parsing.sbatch_request import JobRequest
from muster.slurm.client.states import JobFlag, JobState, NodeState
from muster.slurm.client.types import GONE, Gone, Job, JobAnswers, Node, NodeAnswers, Unknown

NODES = ("n1", "n2", "n3")


class Clock:
    """A clock that the test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def slurm(clock: Clock) -> FakeSlurm:
    """Job 1 holds n1, n2 and n3; n4 is free."""
    cluster = FakeCluster((*NODES, "n4"), now=clock)
    cluster.submit(JobRequest(nodes=3, no_kill=True))
    return FakeSlurm(cluster)


class Owing:
    """A durable state with one gang (job 1) and owed calls, and the events that follow."""

    def __init__(self, slurm: FakeSlurm, phase: Phase = Phase.GATHERING) -> None:
        self.state = DurableState()
        self.answers: asyncio.Queue[events.Event] = asyncio.Queue()
        self.calls = OwedCalls(slurm, self._post)
        for fact in (
            facts.GangRegistered("g", 1, 0, "x", GangSpec(3, 0), "{}"),
            facts.PhaseChanged("g", Phase.GATHERING, ""),
            *(facts.MemberJoined("g", n, 1, "i", f"{n}:1", n == "n1", "") for n in NODES),
        ):
            apply(self.state, fact, 1.0)
        if phase is not Phase.GATHERING:
            apply(self.state, facts.PhaseChanged("g", phase, ""), 1.0)

    def _post(self, event: events.Event) -> None:
        assert isinstance(event, events.SlurmAnswered)
        apply(self.state, facts.SlurmCallSettled(event.gang, event.call, event.error or ""), 1.0)
        self.answers.put_nowait(event)

    async def answer(self, verb: facts.SlurmVerb, node: str = "", job: int = 1, **more: object) -> str | None:
        """Owe this call and wait until it is settled. Returns the error, or None."""
        call = facts.SlurmCallOwed("g", self.state.last_call + 1, verb, job, node, "muster: why", **more)  # type: ignore[arg-type]
        apply(self.state, call, 1.0)
        self.calls.start_owed(self.state)
        self.calls.start_owed(self.state)  # a call that is under way is not started twice
        async with asyncio.timeout(120):
            answered = await self.answers.get()
        assert isinstance(answered, events.SlurmAnswered)
        assert answered.call == call.call
        return answered.error


async def test_every_verb_makes_its_call(slurm: FakeSlurm) -> None:
    owing, cluster = Owing(slurm), slurm.cluster
    assert await owing.answer("drain", "n2") is None
    assert cluster.nodes()["n2"].drained
    assert cluster.nodes()["n2"].reason == "muster: why"
    assert await owing.answer("let_go", "n2") is None
    assert cluster.jobs()[1].nodes == ("n1", "n3")
    assert await owing.answer("down", "n3") is None
    assert cluster.nodes()["n3"].down
    assert cluster.jobs()[1].nodes == ("n1",)
    assert await owing.answer("requeue_off") is None
    assert not cluster.jobs()[1].requeue
    assert await owing.answer("complete", exit_code=3) is None
    assert (cluster.jobs()[1].state, cluster.jobs()[1].exit_code) == (JobState.FAILED, 3)
    assert await owing.answer("cancel") is None
    assert owing.answers.empty()


async def test_a_pool_job_is_cancelled_if_it_is_the_gang_users(slurm: FakeSlurm) -> None:
    """The attack: an agent of the gang (uid 0) says that another user's job is its pool job, and gives it up."""
    owing, cluster = Owing(slurm), slurm.cluster
    own, other = (cluster.submit(JobRequest(nodes=1), user) for user in ((0, "root"), (1001, "bob")))
    refusal = f"Slurm refused to cancel job {other}: the job does not belong to the gang's user"
    assert await owing.answer("cancel", job=other) == refusal
    assert not cluster.jobs()[other].state.ended
    assert await owing.answer("cancel", job=own) is None
    assert cluster.jobs()[own].state is JobState.CANCELLED


async def test_a_refusal_is_settled_with_slurms_error(slurm: FakeSlurm) -> None:
    error = await Owing(slurm).answer("let_go", "n1")
    assert error
    assert "You cannot remove the batch host" in error


class Away(FakeSlurm):
    """Signals each drain call, also those that Slurm does not answer."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__(cluster)
        self.asked = asyncio.Event()

    async def drain(self, node: str, reason: str, *, timeout_s: float = 5.0) -> None:
        try:
            await super().drain(node, reason, timeout_s=timeout_s)
        finally:
            self.asked.set()


async def test_a_call_is_retried_until_slurm_answers(slurm: FakeSlurm) -> None:
    away = Away(slurm.cluster)
    away.unavailable_reason = "slurmctld is away"
    owing = Owing(away)
    waiting = asyncio.create_task(owing.answer("drain", "n2"))
    async with asyncio.timeout(120):
        await away.asked.wait()
    assert owing.answers.empty()
    away.unavailable_reason = ""
    assert await waiting is None
    assert slurm.cluster.nodes()["n2"].drained


class Buggy(FakeSlurm):
    """The first `faults` drain calls fail with an error that is no SlurmError."""

    faults = 0
    drains = 0

    async def drain(self, node: str, reason: str, *, timeout_s: float = 5.0) -> None:
        self.drains += 1
        if self.drains <= self.faults:
            raise KeyError("node_state")
        await super().drain(node, reason, timeout_s=timeout_s)


async def test_an_unexpected_error_is_settled_and_the_queue_continues(
    slurm: FakeSlurm, caplog: pytest.LogCaptureFixture
) -> None:
    buggy = Buggy(slurm.cluster)
    buggy.faults = BUG_ATTEMPTS
    owing = Owing(buggy)
    assert await owing.answer("drain", "n2") == "a bug of Muster, not an answer of Slurm: KeyError: 'node_state'"
    assert buggy.drains == BUG_ATTEMPTS
    assert "Traceback" in caplog.text
    assert await owing.answer("down", "n2") is None
    assert slurm.cluster.nodes()["n2"].down


async def test_a_call_with_an_unexpected_error_is_retried(slurm: FakeSlurm) -> None:
    buggy = Buggy(slurm.cluster)
    buggy.faults = BUG_ATTEMPTS - 1
    assert await Owing(buggy).answer("drain", "n2") is None
    assert slurm.cluster.nodes()["n2"].drained


async def test_a_requeue_from_before_a_restart_is_not_repeated(slurm: FakeSlurm) -> None:
    assert await Owing(slurm, Phase.GATHERING).answer("requeue", exclude=("n1",)) is None
    assert slurm.cluster.jobs()[1].restart_count == 0
    assert await Owing(slurm, Phase.REQUEUED).answer("requeue", exclude=("n1",)) is None
    assert slurm.cluster.jobs()[1].restart_count == 1
    assert slurm.cluster.jobs()[1].nodes == ("n2", "n3", "n4")
    assert await Owing(slurm, Phase.REQUEUED).answer("requeue", exclude=("n1",)) is None
    assert slurm.cluster.jobs()[1].restart_count == 1


async def test_nodes_are_not_admitted_to_a_job_that_is_starting(slurm: FakeSlurm) -> None:
    """If the job were requeued now, the nodes would still be excluded."""
    state, call = DurableState(), facts.SlurmCallOwed("g", 1, "admit", 1, "", "muster: why", admit=("n1",))
    for fact in (
        facts.GangRegistered("g", 1, 0, "x", GangSpec(3, 0), "{}"),
        facts.PhaseChanged("g", Phase.GATHERING, ""),
        call,
    ):
        apply(state, fact, 1.0)
    with pytest.raises(SlurmUnavailable):
        await make_call(slurm, call, state)
    apply(state, facts.MemberJoined("g", "n1", 1, "i", "n1:1", True, ""), 1.0)
    await make_call(slurm, call, state)


async def test_nodes_are_not_admitted_to_a_job_that_a_later_call_requeues(slurm: FakeSlurm) -> None:
    owing = Owing(slurm, Phase.REQUEUED)
    verbs: tuple[facts.SlurmVerb, ...] = (
        "admit",
        "requeue",
    )  # Slurm has started the job: it is not pending now
    for call, verb in enumerate(verbs, 1):
        apply(owing.state, facts.SlurmCallOwed("g", call, verb, 1, "", "muster: why", admit=("n1",)), 1.0)
        owing.calls.start_owed(owing.state)
    for call in (1, 2):
        async with asyncio.timeout(120):
            answered = await owing.answers.get()
        assert answered == events.SlurmAnswered("g", call, None)
    assert slurm.cluster.jobs()[1].restart_count == 1


async def test_the_watch_posts_changes_only(slurm: FakeSlurm, clock: Clock) -> None:
    owing, seen = Owing(slurm), list[events.Event]()
    watch = SlurmWatch(slurm, owing.state, seen.append)
    await watch.poll_jobs()
    await watch.poll_jobs()
    assert seen == [events.SlurmJobChanged("g", 1, NODES, 0, None, batch_host=NODES[0], start_at=clock.now)]
    await watch.poll_nodes()
    await watch.poll_nodes()
    assert seen[1:] == [events.SlurmNodeChanged(name, True, "in service in Slurm (ALLOCATED)") for name in NODES]
    slurm.cluster.drain("n2", "a fan")
    slurm.unavailable_reason = "slurmctld is away"
    await watch.poll_nodes()
    await watch.poll_jobs()
    assert len(seen) == 4
    slurm.unavailable_reason = ""
    await watch.poll_nodes()
    text, drain = "out of service in Slurm (ALLOCATED+DRAIN: a fan)", events.SlurmDrain("a fan", idle=False)
    assert seen[4:] == [events.SlurmNodeChanged("n2", False, text, drain=drain)]
    slurm.cluster.fail_node("n3")
    clock.now += 60
    await watch.poll_jobs()
    assert [type(event) for event in seen[5:]] == [events.SlurmNodeChanged, events.SlurmJobChanged]
    assert (seen[5].down, seen[6].nodes) == (True, ("n1", "n2"))  # type: ignore[union-attr]


async def test_a_job_that_lost_a_node_is_not_posted_while_slurm_does_not_say_whether_the_node_is_down(
    slurm: FakeSlurm, clock: Clock
) -> None:
    seen = list[events.Event]()
    watch = SlurmWatch(_NodesUnknown(slurm), Owing(slurm).state, seen.append)
    await watch.poll_jobs()
    slurm.cluster.fail_node("n3")
    clock.now += 60
    await watch.poll_jobs()
    assert [type(event) for event in seen] == [events.SlurmJobChanged]


class _Booting:
    """A Slurm that configures the job, and powers up these of its nodes."""

    def __init__(self) -> None:
        self.booting, self.flags, self.in_doubt = set[str](), frozenset({JobFlag.CONFIGURING}), set[int]()
        self.reason = ""

    async def jobs(self, ids: Collection[int] | None = None, *, in_doubt: Collection[int] = ()) -> JobAnswers | Unknown:
        self.in_doubt.update(in_doubt)
        return {1: Job(1, JobState.RUNNING, self.flags, reason=self.reason, nodes=NODES, batch_host=NODES[0])}

    async def nodes(self, names: Collection[str] | None = None) -> NodeAnswers | Unknown:
        boots, up = frozenset({NodeState.ALLOCATED, NodeState.POWERING_UP}), frozenset({NodeState.ALLOCATED})
        return {name: Node(name, boots if name in self.booting else up) for name in names or ()}


async def test_a_job_waits_while_slurm_powers_up_its_nodes(slurm: FakeSlurm) -> None:
    site, owing, seen = _Booting(), Owing(slurm), list[events.Event]()
    watch = SlurmWatch(site, owing.state, seen.append, in_doubt=lambda: {1})  # type: ignore[arg-type]
    for site.booting in (set(), {"n1", "n3"}, {"n3"}, set(), set()):  # at first a Prolog runs
        await watch.poll_jobs()
    site.flags = frozenset()
    await watch.poll_jobs()
    found = [event for event in seen if isinstance(event, events.SlurmJobChanged)]
    assert [(event.nodes, event.pending_reason) for event in found] == [
        (NODES, ""),
        ((), "it boots n1 n3"),
        ((), "it boots n3"),
        ((), "its nodes have booted, and Slurm configures them"),
        (NODES, ""),
    ]
    assert site.in_doubt == {1}


@pytest.mark.parametrize("phase", [Phase.SUBMITTED, Phase.REQUEUED, Phase.GATHERING, Phase.RUNNING])
async def test_a_job_waits_while_the_prolog_of_its_nodes_runs(slurm: FakeSlurm, phase: Phase) -> None:
    """Slurm says RUNNING, and runs nothing of the job yet. What trains is no longer in its Prolog."""
    site, owing, seen = _Booting(), Owing(slurm), list[events.Event]()
    owing.state.gangs["g"].phase = phase
    watch = SlurmWatch(site, owing.state, seen.append)  # type: ignore[arg-type]
    site.flags = frozenset()
    for site.reason in ("Prolog", ""):
        await watch.poll_jobs()
    found = [event for event in seen if isinstance(event, events.SlurmJobChanged)]
    waits = [] if phase is Phase.RUNNING else [((), "the Prolog of its nodes runs")]
    assert [(event.nodes, event.pending_reason.partition(":")[0]) for event in found] == [*waits, (NODES, "")]


async def test_the_watch_posts_changes_of_a_pool_job(slurm: FakeSlurm) -> None:
    owing, seen = Owing(slurm), list[events.Event]()
    pool_job = slurm.cluster.submit(JobRequest(nodes=1, name="g", requeue=False))
    owing.state.gangs["g"].roster.members["n4"] = Member("n4", pool_job, "i1", "n4:9", batch_host=False, leaf="")
    watch = SlurmWatch(slurm, owing.state, seen.append)
    for _ in range(2):
        await watch.poll_jobs()
    assert seen[1:] == [events.PoolJobChanged("g", pool_job, ("n4",))]
    slurm.cluster.suspend(pool_job)
    await watch.poll_jobs()
    assert seen[2:] == [events.PoolJobChanged("g", pool_job, ("n4",), suspended=True)]
    slurm.cluster.cancel(pool_job)
    await watch.poll_jobs()
    assert seen[-1] == events.PoolJobChanged("g", pool_job, ())


@pytest.mark.parametrize(
    ("state", "flags", "suspended"),
    [
        (JobState.SUSPENDED, (), True),
        (JobState.RUNNING, (JobFlag.STOPPED,), True),  # scancel --signal=STOP
        (JobState.RUNNING, (JobFlag.SIGNALING,), False),
    ],
)
def test_a_job_stands_still_that_slurm_or_its_user_has_stopped(
    slurm: FakeSlurm, state: JobState, flags: tuple[JobFlag, ...], suspended: bool
) -> None:
    seen = job_seen(Owing(slurm).state.gangs["g"], Job(1, state, frozenset(flags), nodes=("n1",)))
    assert (seen.suspended, seen.nodes) == (suspended, ("n1",))


class _NodesUnknown:
    """A Slurm that answers for jobs only."""

    def __init__(self, slurm: FakeSlurm) -> None:
        self._slurm = slurm

    async def jobs(self, ids: Collection[int] | None = None, *, in_doubt: Collection[int] = ()) -> JobAnswers | Unknown:
        return await self._slurm.jobs(ids)

    async def nodes(self, names: Collection[str] | None = None) -> NodeAnswers | Unknown:
        return Unknown("slurmctld is busy")


async def test_a_drain_on_the_word_of_agents_is_refused_once_the_job_has_given_the_node_back(slurm: FakeSlurm) -> None:
    owing = Owing(slurm)
    call = facts.SlurmCallOwed("g", 7, "drain", 1, "n3", "muster: ranks could not be killed", if_run_has_node=0)
    slurm.cluster.remove_node(1, "n3")
    with pytest.raises(SlurmRefused, match="job 1 no longer has this node"):
        await make_call(slurm, call, owing.state)
    assert not slurm.cluster.nodes()["n3"].drained
    with pytest.raises(SlurmRefused, match="job 1 no longer has this node"):
        await make_call(slurm, replace(call, node="n2", if_run_has_node=1), owing.state)  # another run of the job
    await make_call(slurm, replace(call, node="n2"), owing.state)
    assert slurm.cluster.nodes()["n2"].drained


async def test_the_roster_keeps_slurms_last_answer(slurm: FakeSlurm) -> None:
    slurm.cluster.leaves = {"n4": "s1"}
    slurm.unavailable_reason = "slurmctld is away"
    roster = SlurmRoster(slurm)
    await roster.refresh()
    assert (dict(roster.nodes), roster.unknown) == ({}, "slurmctld is away")
    slurm.unavailable_reason = ""
    await roster.refresh()
    assert (sorted(roster.nodes), roster.unknown) == ([*NODES, "n4"], "")
    slurm.unavailable_reason = "slurmctld is away again"
    await roster.refresh()
    assert (sorted(roster.nodes), roster.unknown) == ([*NODES, "n4"], "")


async def test_a_slurm_that_is_down_for_long_is_logged_once_and_so_is_its_return(
    slurm: FakeSlurm, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    watch, roster = SlurmWatch(slurm, Owing(slurm).state, lambda _: None), SlurmRoster(slurm)
    for reason in ("slurmctld is down", ""):
        slurm.unavailable_reason = reason
        for _ in range(50):
            await watch.poll_jobs()
            await watch.poll_nodes()
            await roster.refresh()
    assert [record.getMessage() for record in caplog.records] == [
        "can't get the jobs from Slurm: slurmctld is down",
        "can't get the nodes from Slurm: slurmctld is down",
        "can't get the list of nodes from Slurm: slurmctld is down",
        "Slurm answers for its jobs again, after 0 s",
        "Slurm answers for its nodes again, after 0 s",
        "Slurm answers with its list of nodes again, after 0 s",
    ]


async def test_a_time_limit_is_posted_on_the_cores_clock_and_again_after_the_wall_clock_was_set(
    slurm: FakeSlurm, clock: Clock
) -> None:
    """The coordinator was started with a wall clock two hours ahead, which an operator has corrected since."""
    slurm.cluster.submit(JobRequest(nodes=1, time_limit_s=5400))
    owing, seen, ahead = Owing(slurm), list[events.Event](), [0.0]
    owing.state.gangs["g"].slurm.job = 2
    watch = SlurmWatch(slurm, owing.state, seen.append, lambda: ahead[0])
    await watch.poll_jobs()
    ahead[0] = 7200.0
    await watch.poll_jobs()
    ahead[0] = 7200.5
    await watch.poll_jobs()
    limits = [event.limit_at for event in seen if isinstance(event, events.SlurmJobChanged)]
    assert limits == [clock.now + 5400, clock.now + 5400 + 7200]


def test_the_grace_time_of_a_preemption_is_not_taken_for_the_time_limit(slurm: FakeSlurm) -> None:
    """The job would end there, and not be requeued. Slurm ends a job later that was suspended meanwhile."""
    gang = Owing(slurm).state.gangs["g"]
    running = Job(1, JobState.RUNNING, start_time=1000.0, end_time=4600.0, time_limit_s=3600)
    ends = [job_seen(gang, replace(running, end_time=end)).limit_at for end in (4600.0, 1060.0, 4900.0)]
    assert ends == [4600.0, 4600.0, 4900.0]


async def test_a_node_that_was_resumed_while_lost_is_posted_again_when_it_returns(slurm: FakeSlurm) -> None:
    owing, seen = Owing(slurm), list[events.Event]()
    watch = SlurmWatch(slurm, owing.state, seen.append)
    apply(owing.state, facts.NodeRegistered("n2", "boot", "host:1"), 1.0)
    apply(owing.state, facts.NodeJudged("n2", NodeHealth.LOST, "power"), 1.0)
    await watch.poll_nodes()  # in service already: this does not make a lost node fit
    apply(owing.state, facts.NodeJudged("n2", NodeHealth.RETURNING, "heard"), 2.0)
    seen.clear()
    await watch.poll_nodes()
    assert [event.node for event in seen if isinstance(event, events.SlurmNodeChanged) and event.in_service] == ["n2"]


async def test_a_node_that_is_being_drained_is_not_polled(slurm: FakeSlurm) -> None:
    owing, seen = Owing(slurm), list[events.Event]()
    apply(owing.state, facts.SlurmCallOwed("g", 1, "drain", 1, "n2", "why"), 1.0)
    await SlurmWatch(slurm, owing.state, seen.append).poll_nodes()
    assert [event.node for event in seen if isinstance(event, events.SlurmNodeChanged)] == ["n1", "n3"]


@pytest.mark.parametrize(
    ("found", "ended"),
    [
        (GONE, "GONE"),
        (Job(1, JobState.RUNNING), None),
        (Job(1, JobState.PENDING), None),
        (Job(1, JobState.CANCELLED), "CANCELLED"),
        (Job(1, JobState.TIMEOUT, frozenset({JobFlag.COMPLETING})), "TIMEOUT"),
        (Job(1, JobState.NODE_FAIL, frozenset({JobFlag.REQUEUED})), None),
        (Job(1, JobState.UNRECOGNISED), None),
    ],
)
def test_the_end_state_of_a_job(slurm: FakeSlurm, found: Job | Gone, ended: str | None) -> None:
    assert job_seen(Owing(slurm).state.gangs["g"], found).ended == ended


def test_a_job_whose_output_can_not_be_opened_says_where_and_why(slurm: FakeSlurm) -> None:
    gang = Owing(slurm).state.gangs["g"]
    gang.account.shown_spec = '{"run_dir": "/scratch/run"}'
    found = Job(1, JobState.FAILED, batch_host="n2", exit_code=0, exit_signal=53)
    words = "n2 could not open the job's output file: run_dir = '/scratch/run' must be a folder that all nodes share"
    assert job_seen(gang, found).end_words == words
    assert job_seen(gang, replace(found, exit_signal=9)).end_words == f"/scratch/run/slurm-{found.id}.out says why"


def test_a_job_whose_node_lacks_the_agent_says_where(slurm: FakeSlurm) -> None:
    found = Job(1, JobState.FAILED, batch_host="n2", exit_code=127)
    words = "n2 has no muster-agent, or no srun, in the PATH of the shell that submitted it"
    assert job_seen(Owing(slurm).state.gangs["g"], found).end_words == words


def test_a_job_in_the_queue_names_the_nodes_that_its_last_run_has_not_left(slurm: FakeSlurm) -> None:
    gang, completing = Owing(slurm).state.gangs["g"], frozenset({JobFlag.COMPLETING})
    found = Job(1, JobState.PENDING, completing, nodes=("n3",))
    assert job_seen(gang, found).completing == ("n3",)
    assert job_seen(gang, replace(found, flags=frozenset())).completing == ()
    assert job_seen(gang, replace(found, state=JobState.RUNNING)).completing == ()


class Counting(FakeSlurm):
    """Counts the calls about jobs."""

    asked = 0

    async def jobs(self, ids: Collection[int] | None = None, *, timeout_s: float = 5.0) -> JobAnswers | Unknown:
        self.asked += 1
        await asyncio.sleep(0)
        return await super().jobs(ids, timeout_s=timeout_s)


async def test_simultaneous_lookups_share_one_call(slurm: FakeSlurm) -> None:
    counting = Counting(slurm.cluster)
    lookup = SlurmLookup(counting)
    answers = await asyncio.gather(*(lookup.job(1, 1000) for _ in range(50)))
    assert {answer.id for answer in answers if isinstance(answer, Job)} == {1}
    assert counting.asked == 1


async def test_a_silent_slurm_is_unknown_and_never_gone(slurm: FakeSlurm) -> None:
    slurm.unavailable_reason = "slurmctld is away"
    lookup = SlurmLookup(slurm, retry_for_s=0.0)
    assert await lookup.job(1, 1000) == Unknown("slurmctld is away")
    slurm.unavailable_reason = ""
    assert isinstance(await lookup.job(1, 1000), Job)
    assert await lookup.job(9, 1000) == GONE
