"""What is known of a user's own script before it launches, and of what it launches unsupervised."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from muster.daemon.agent.batch.batch_process import RemoteCoordinator
from muster.daemon.agent.user_script import gang_launch
from muster.daemon.agent.user_script.own_nodes import divide
from muster.daemon.agent.user_script.script_job import ScriptJob
from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.goodput.ledger import Ledger
from muster.daemon.coordinator.services.job_specs import registered_spec
from muster.daemon.coordinator.services.views import gang_view
from muster.daemon.coordinator.slurm.watch import job_seen
from muster.daemon.testing.scripted_world import ScriptedWorld, spec
from muster.daemon.transport.channel import open_channel
from muster.slurm.client.launch_settings import LaunchSettings
from muster.slurm.client.srun_options import read_srun
from muster.slurm.client.states import JobState
from muster.slurm.client.types import Job
from muster.v1 import api_pb2, api_pb2_grpc

SCRIPT = events.GangSpec(1, 0, awaits_launch=True)
LAUNCH = events.GangSpec(2, 1, own_nodes=("n0", "n1"))


class Registered:
    """A core that knows the job of a script, as `muster submit` has registered it."""

    def __init__(self, known: events.GangSpec = SCRIPT) -> None:
        self.now, self.facts = 1000.0, list[facts.Fact]()
        self.core = Core(DurableState(), self.now)
        self.post(events.GangSubmitted("g", 7, 1000, "train", known, '{"run_dir": "/runs"}'))

    def post(self, *posted: events.Event) -> None:
        for event in posted:
            self.facts += self.core.decide(event, self.now).facts

    def starts(self) -> None:
        """Slurm starts the job."""
        self.post(events.SlurmJobChanged("g", 7, ("n0", "n1", "n2"), 0, None))

    @property
    def view(self) -> api_pb2.GangView:
        state = DurableState()
        for fact in self.facts:
            apply(state, fact, self.now)
        assert state.gangs["g"].spec == self.core.state.gangs["g"].spec, "a replay of the journal gives the same"
        return gang_view(self.core.state, self.core.observed, self.core.state.gangs["g"], self.now)


def test_a_script_waits_in_the_queue_and_then_runs_for_as_long_as_it_likes() -> None:
    job = Registered()
    job.post(events.SlurmJobChanged("g", 7, (), 0, None, pending_reason="Priority"))
    assert (job.view.phase, job.view.waiting_for) == ("SUBMITTED", "Slurm to start job 7 (Priority)")
    job.starts()
    job.now += 100_000
    job.post(events.Tick())
    assert (job.view.phase, job.view.waiting_for) == ("SUBMITTED", "a launch: its script runs")
    job.post(events.BatchHeartbeat("g", 7, 0))
    assert job.view.waiting_for == "agents: its script has launched, and none is attached"


def test_the_first_agent_brings_the_whole_spec_once() -> None:
    job = Registered()
    job.starts()
    job.post(events.GangSubmitted("g", 7, 1000, "train", LAUNCH, '{"run_dir": "/all"}'))
    assert (job.view.phase, job.view.run_dir, job.view.awaits_launch) == ("GATHERING", "/all", False)
    assert job.core.state.gangs["g"].slurm.job_nodes == ("n0", "n1", "n2")
    job.post(events.GangSubmitted("g", 7, 1000, "train", events.GangSpec(9, 0), "{}"))
    assert job.core.state.gangs["g"].spec == LAUNCH


@pytest.mark.parametrize(("state", "phase", "code"), [("FAILED", Phase.FAILED, 1), ("COMPLETED", Phase.DONE, 0)])
def test_a_script_that_ends_before_a_launch_says_so(state: str, phase: Phase, code: int) -> None:
    job = Registered()
    job.starts()
    job.post(events.SlurmJobChanged("g", 7, (), 0, state, end_words="its script has ended with exit code 3, before"))
    assert (job.view.phase, job.view.exit_code) == (phase, code)
    assert job.view.reason == f"Slurm ended job 7: {state}: its script has ended with exit code 3, before"
    job.post(events.GangSubmitted("g", 7, 1000, "train", LAUNCH, "{}"))
    assert job.core.state.gangs["g"].spec == SCRIPT, "an agent that comes too late changes nothing"


def test_what_is_not_supervised_is_said_until_the_job_runs_again() -> None:
    job = Registered()
    job.starts()
    for words in ("line 4, srun a: it runs in a container", "line 5, srun b: another"):
        job.post(events.BatchHeartbeat("g", 7, 0, unsupervised=words))
    assert job.view.unsupervised == "line 4, srun a: it runs in a container"
    assert job.view.waiting_for == "a launch: its script runs", "a helper is no launch"
    job.post(events.GangSubmitted("g", 7, 1000, "train", LAUNCH, "{}"))
    assert job.view.unsupervised == "line 4, srun a: it runs in a container"


def test_a_script_that_can_not_be_supervised_is_no_waiting_launch() -> None:
    job = Registered(events.GangSpec(1, 0, awaits_launch=True, unsupervised="line 1: csh runs the script"))
    job.starts()
    assert job.view.waiting_for == "job 7 to end: its script runs, and is not supervised"
    assert job.view.unsupervised == "line 1: csh runs the script"


def test_the_account_goes_on_where_the_launch_is_known() -> None:
    ledger = Ledger()
    ledger.note(facts.GangRegistered("g", 7, 1000, "train", SCRIPT, "{}"), 0.0)
    ledger.note(facts.JobChanged("g", ("n0", "n1", "n2")), 10.0)
    ledger.note(facts.GangRegistered("g", 7, 1000, "train", LAUNCH, "{}"), 20.0)
    held = [one for one in ledger.unsettled(30.0, 0) if one.nodes]
    assert [(one.since, one.until, sorted(one.nodes)) for one in held] == [(10.0, 30.0, ["n0", "n1", "n2"])]


async def test_agents_complete_what_submit_has_registered(world: ScriptedWorld) -> None:
    """Also if the guess does not fit the degrees of parallelism, which only the launch can say."""
    assert world.coordinator
    engine = world.coordinator.engine
    guess = spec(nodes=1, tensor_parallel=2, awaits_launch=True, command=["train.sbatch"])
    async with open_channel(world.address, world.credentials) as channel:
        api: Any = api_pb2_grpc.MusterStub(channel)
        await api.Register(api_pb2.RegisterRequest(gang_id="g1", slurm_job_id=1, spec=guess))
        said = api_pb2.BatchRef(gang_id="g1", slurm_job_id=1, unsupervised="line 3,\tsrun x: why")
        assert (await api.Attend(said)).unsupervised == "line 3, srun x: why"
        await world.start_agents(["n1", "n2", "n3"], tensor_parallel=2, command=["train"])
        await world.wait_for_duty("RUN 1", ["n1", "n2"])
    assert engine.core.state.gangs["g1"].spec.nodes == 2
    found = registered_spec(engine.journal, "g1")
    assert found is not None
    assert list(found.command) == ["train"]
    assert len(await world.wait_for_facts(facts.GangRegistered)) == 2


async def test_a_launch_of_which_no_agent_has_attached_is_said(
    world: ScriptedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its srun has ended. The coordinator is asked, and told; without a right to call it, nothing ends for that."""
    assert world.coordinator
    gangs = world.coordinator.engine.core.state.gangs
    settings = LaunchSettings("g1", world.address, "/bin/muster-agent", 1, spec())
    job = ScriptJob(settings, "g1", divide(["n1", "n2", "n3"], 1), 1, 0, (4,), 0)
    words = read_srun(["torchrun", "train.py"])
    remote = RemoteCoordinator(world.address, world.credentials, api_pb2.BatchRef(gang_id="g1", slurm_job_id=1))
    monkeypatch.setenv("MUSTER_CONNECTIONS", "plain text, the network is trusted")
    monkeypatch.setenv("MUSTER_AUTH", f"secret:{world.folder}/none")
    async with open_channel(world.address, world.credentials) as channel:
        api: Any = api_pb2_grpc.MusterStub(channel)
        guess = spec(awaits_launch=True)
        await api.Register(api_pb2.RegisterRequest(gang_id="g1", slurm_job_id=1, spec=guess))
        await asyncio.to_thread(gang_launch.tell_if_nothing_started, job, words, remote, 2)
        assert gangs["g1"].findings.unsupervised == ""
        monkeypatch.setenv("MUSTER_AUTH", f"secret:{world.folder.parent}/secret")
        await asyncio.to_thread(gang_launch.tell_if_nothing_started, job, words, remote, 2)
        said = "line 4, srun torchrun train.py: it has failed with exit code 2 before its ranks started"
        assert gangs["g1"].findings.unsupervised == said


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        ({"exit_code": 3}, "its script has ended with exit code 3, before a launch that is supervised"),
        ({"exit_code": 127}, "its script has ended with exit code 127, before a launch that is supervised"),
        ({"exit_signal": 9}, "its script has ended by signal 9, before a launch that is supervised"),
        ({"exit_signal": 53}, "n0 could not open the job's output file"),
    ],
)
def test_how_a_script_has_ended(ended: dict[str, int], words: str) -> None:
    gang = Registered().core.state.gangs["g"]
    assert job_seen(gang, Job(7, JobState.FAILED, batch_host="n0", **ended)).end_words == words  # type: ignore[arg-type]


def test_the_script_of_a_job_that_was_cancelled_in_the_queue_has_not_ended() -> None:
    gang = Registered().core.state.gangs["g"]
    assert job_seen(gang, Job(7, JobState.CANCELLED)).end_words == "it had not started"
    assert job_seen(gang, Job(7, JobState.CANCELLED, restart_count=1)).end_words == ""
    assert job_seen(gang, Job(7, JobState.CANCELLED, nodes=("n0",), exit_code=0)).end_words == ""
    started = Job(7, JobState.CANCELLED, nodes=("n0",), batch_host="n0", exit_signal=15)
    assert job_seen(gang, started).end_words.startswith("its script has ended by signal 15")
