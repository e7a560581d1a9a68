"""Registration: one live gang for each job, and a budget for each user, whatever the user's jobs are worth to Slurm."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.coordinator.services.registration import BUDGET_WINDOW_S, check_budget, check_job_is_free
from muster.daemon.testing.chosen_users import ChosenUser
from muster.daemon.testing.scripted_agent import ScriptedAgent
from muster.daemon.testing.scripted_world import DEADLINE_S, ScriptedWorld, spec
from muster.daemon.transport import gang_ids
from muster.daemon.transport.calls.call_refused import CallRefused
from muster.daemon.transport.channel import open_channel
from muster.daemon.transport.site_config import Site
from muster.launcher.commands.submit import prepare
from muster.launcher.coordinator_client import CoordinatorClient
from muster.launcher.errors import NotAllowed
from muster.launcher.main import parser
from muster.slurm.client.parsing.sbatch_request import JobRequest
from muster.v1 import api_pb2, api_pb2_grpc, diagnosis_pb2, diagnosis_pb2_grpc
from muster.v1.common_pb2 import JobSpec

KIB, MIB = 1024, 1024 * 1024
ALICE, EVE = os.geteuid(), os.geteuid() + 1


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ScriptedWorld]:
    """A job of three nodes runs in Slurm, and four more wait. A coordinator with small budgets has just started."""
    made = ScriptedWorld.create(tmp_path)
    for _ in range(4):
        made.cluster.submit(JobRequest(nodes=3, no_kill=True))
    made.settings["policy"] = _policy(tmp_path, "gangs_per_user = 3\nspec_mib_per_user = 2\n")
    await made.start_coordinator()
    yield made
    await made.close()


@pytest_asyncio.fixture
async def api(world: ScriptedWorld) -> AsyncIterator[Any]:
    """The public API, as a user calls it."""
    async with open_channel(world.address, world.credentials) as channel:
        yield api_pb2_grpc.MusterStub(channel)


def _policy(folder: Path, limits: str) -> Policy:
    path = folder / "policy.toml"
    path.write_text(f"[limits]\n{limits}")
    return Policy.load(path)


def _request(gang: str, job: int, size: int = 0) -> api_pb2.RegisterRequest:
    return api_pb2.RegisterRequest(gang_id=gang, slurm_job_id=job, spec=spec(env={"BIG": "x" * size}))


async def _refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


def _journal_bytes(world: ScriptedWorld) -> int:
    return sum(file.stat().st_size for file in world.folder.glob("journal.db*"))


async def test_one_held_job_can_not_fill_the_journal(world: ScriptedWorld, api: Any) -> None:
    """The attack: a user registers gangs with the largest specs for one job, which Slurm holds for ever."""
    refused: set[tuple[grpc.StatusCode, str]] = set()
    for number in range(8):
        try:
            await api.Register(_request(f"g{number}", 2, MIB - 4 * KIB))
        except grpc.aio.AioRpcError as error:
            refused.add((error.code(), error.details() or ""))
    assert _journal_bytes(world) < 4 * MIB
    assert len(await world.wait_for_facts(facts.GangRegistered)) == 1
    assert len(refused) == 7
    words = "job 2 runs gang g0, which is SUBMITTED: a job has one gang at a time. Submit another job for gang g1"
    assert (grpc.StatusCode.ALREADY_EXISTS, words) in refused


async def test_a_job_whose_gang_is_final_may_have_another_one(world: ScriptedWorld, api: Any) -> None:
    await api.Register(_request("g1", 2))
    assert world.coordinator
    world.coordinator.engine.post(events.CancelRequested("g1", "alice"))
    assert world.gang.final
    await api.Register(_request("g2", 2))
    assert {record.gang for record in await world.wait_for_facts(facts.GangRegistered, 2)} == {"g1", "g2"}


async def test_an_agent_of_another_gang_of_the_job_is_dismissed(world: ScriptedWorld) -> None:
    await world.start_agents(["n1"])
    await world.wait_for_facts(facts.MemberJoined)
    other = ScriptedAgent("n2", spec(), world.credentials, gang="g2")
    await other.open()
    async with asyncio.timeout(DEADLINE_S):
        await other.attach(world.address)
    await other.die()
    assert other.dismissed.startswith("job 1 runs gang g1, which is GATHERING: a job has one gang at a time.")
    assert len(await world.wait_for_facts(facts.GangRegistered)) == 1


def _gang_with_pool_job(owner_uid: int, pool_job: int) -> DurableState:
    """Gang g1 of this user, in job 2. An agent of the gang has said that `pool_job` is its pool job."""
    state = DurableState()
    for fact in (
        facts.GangRegistered("g1", 2, owner_uid, "train", events.GangSpec(1, 0), "{}"),
        facts.PoolNodeRequested("g1", 1, "n1", ()),
        facts.PoolJobQueued("g1", 1, pool_job),
    ):
        apply(state, fact, 1.0)
    return state


def test_a_pool_job_belongs_to_the_gang_that_asked_for_it() -> None:
    gangs = _gang_with_pool_job(1000, 3).gangs.values()
    with pytest.raises(CallRefused, match=r"^job 3 runs gang g1"):
        check_job_is_free(gangs, "g2", 3, 1000)
    check_job_is_free(gangs, "g1", 3, 1000)
    check_job_is_free(gangs, "g2", 4, 1000)


def test_an_agent_that_names_another_users_job_as_its_pool_job_keeps_it_from_nobody() -> None:
    """The attack: the pool job that a user's own agent reports is the job that another user has just submitted."""
    gangs = _gang_with_pool_job(1000, 3).gangs.values()
    check_job_is_free(gangs, "g2", 3, 1001)
    with pytest.raises(CallRefused, match=r"^job 2 runs a gang of another user"):
        check_job_is_free(gangs, "g2", 2, 1001)


async def test_another_users_gang_is_not_described_to_who_registers(world: ScriptedWorld, api: Any) -> None:
    """Slurm uses the numbers of jobs again, and two users may choose one id."""
    assert world.coordinator
    post, owner, of_two = world.coordinator.engine.post, os.getuid() + 1, events.GangSpec(2, 1)
    post(events.GangSubmitted("theirs", 2, owner, "train", of_two, "{}"))
    of_job = await _refusal(api.Register(_request("g1", 2)))
    of_id = await _refusal(api.Register(_request("theirs", 3)))
    words = "job 2 runs a gang of another user: a job has one gang at a time. Submit another job for gang g1"
    assert of_job == (grpc.StatusCode.ALREADY_EXISTS, words)
    words = "gang theirs is taken: use another id for the new gang"
    assert of_id == (grpc.StatusCode.ALREADY_EXISTS, words)


async def test_a_user_has_a_budget_of_gangs(world: ScriptedWorld, api: Any) -> None:
    for job in (1, 2, 3):
        await api.Register(_request(f"g{job}", job))
    await api.Register(_request("g1", 1))  # twice changes nothing, with a full budget too
    refusal = await _refusal(api.Register(_request("g4", 4)))
    words = (
        f"uid {os.getuid()} has 3 gangs that are live or were registered in the last 24 hours: the site allows 3 "
        "(gangs_per_user). Wait until some have ended, or ask the site for more"
    )
    assert refusal == (grpc.StatusCode.RESOURCE_EXHAUSTED, words)


async def test_a_user_has_a_budget_for_the_size_of_specs(world: ScriptedWorld, api: Any) -> None:
    await api.Register(_request("g2", 2, 900 * KIB))
    await api.Register(_request("g3", 3, 900 * KIB))
    code, words = await _refusal(api.Register(_request("g4", 4, 900 * KIB)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert words == (
        f"uid {os.getuid()} has 2 gangs that are live or were registered in the last 24 hours: their specs have "
        "1.76 MiB, this one has 0.88 MiB, and the site allows 2 MiB (spec_mib_per_user). Make [env] of job.toml "
        "smaller, wait until some have ended, or ask the site for more"
    )
    await api.Register(_request("g4", 4))


async def test_an_agent_that_registers_its_gang_has_the_same_budget(world: ScriptedWorld, api: Any) -> None:
    for job in (2, 3, 4):
        await api.Register(_request(f"g{job}", job))
    agent = ScriptedAgent("n1", spec(), world.credentials)
    await agent.open()
    async with asyncio.timeout(DEADLINE_S):
        code, words = await _refusal(agent.attach(world.address))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "the site allows 3 (gangs_per_user)" in words
    await agent.die()


async def test_a_gang_that_has_ended_counts_for_a_day(world: ScriptedWorld, api: Any) -> None:
    """Otherwise a user could register and cancel gangs without end."""
    assert world.coordinator
    engine = world.coordinator.engine
    for number in range(3):
        await api.Register(_request(f"g{number}", 2))
        engine.post(events.CancelRequested(f"g{number}", "alice"))
    code, _ = await _refusal(api.Register(_request("g3", 2)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    gangs, now = engine.core.state.gangs.values(), engine.clock.now()
    check_budget(gangs, os.getuid(), 100, engine.limits, now + BUDGET_WINDOW_S)
    check_budget(gangs, os.getuid() + 1, 100, engine.limits, now)


# -- whose id --


@pytest_asyncio.fixture
async def shared(tmp_path: Path) -> AsyncIterator[ScriptedWorld]:
    """Job 1 is of `EVE`, and runs; job 2 is of `ALICE`, and waits. The coordinator has just started."""
    made = ScriptedWorld.create(tmp_path, owner_uid=EVE)
    made.cluster.submit(JobRequest(nodes=3, no_kill=True), user=(ALICE, "alice"))
    made.credentials = ChosenUser(ALICE)
    await made.start_coordinator()
    yield made
    await made.close()


def _submitted_id(folder: Path) -> str:
    """The id that `muster submit` gives to a job of this process's user, `ALICE`."""
    (folder / "job.toml").write_text('name = "train"\nnodes = 2\ncommand = ["train"]\nrun_dir = "/run/train"\n')
    options = parser().parse_args(["submit", "--auth", "munge", str(folder / "job.toml")])
    return prepare(options, Site.load(coordinator="mgmt:7070", auth="munge")).gang


async def _register_as(world: ScriptedWorld, uid: int, gang: str, job: int) -> None:
    credentials = world.credentials
    assert isinstance(credentials, ChosenUser)
    async with open_channel(world.address, credentials.as_uid(uid)) as channel:
        await api_pb2_grpc.MusterStub(channel).Register(_request(gang, job))


async def test_nobody_takes_the_id_of_a_job_before_its_owner_registers_it(
    shared: ScriptedWorld, tmp_path: Path
) -> None:
    """The attack: Slurm shows everybody the path of the queued script, and so the id. `EVE` registers it for a job of
    hers. Then `ALICE`'s registration is refused, and her agents are."""
    gang = _submitted_id(tmp_path)
    code, words = await _refusal(_register_as(shared, EVE, gang, 1))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert words.startswith(f"the id {gang} is not for a gang of uid {EVE}: let muster submit make")
    await _register_as(shared, ALICE, gang, 2)
    assert shared.coordinator
    owners = {known.id: known.account.owner_uid for known in shared.coordinator.engine.core.state.gangs.values()}
    assert owners == {gang: ALICE}


async def test_nobody_learns_whether_another_user_has_a_job(shared: ScriptedWorld, tmp_path: Path) -> None:
    """The attack: ask for number after number, and for ids that were seen. What there is of others, and what there is
    not, has one answer, which names no user and no gang but the one that was asked for."""
    assert shared.coordinator
    assert isinstance(shared.credentials, ChosenUser)
    beside = events.GangSpec(2, 0, durable_dir="/d", resume_from="/d/step_00000007_g1_x")
    own = gang_ids.new_gang_id("eve", EVE)
    shared.coordinator.engine.post(events.GangSubmitted(own, 3, EVE, "eve", beside, '{"name": "eve"}'))
    named = gang_ids.new_gang_id("train", ALICE)
    for gang, job in ((named, 1), ("of-an-earlier-version", 2)):
        shared.coordinator.engine.post(events.GangSubmitted(gang, job, ALICE, "train", events.GangSpec(2, 0), "{}"))
    there = [("job", 1), ("gang", "of-an-earlier-version"), ("gang", named)]
    absent = [("job", 77), ("gang", "of-nobody-at-all-here"), ("gang", gang_ids.new_gang_id("train", ALICE))]
    async with open_channel(shared.address, shared.credentials.as_uid(EVE)) as channel:
        for call in _calls_for_a_job(channel):
            for (kind, one), (_, other) in zip(there, absent, strict=True):
                (code, words), (other_code, other_words) = [await _refusal(call(kind, name)) for name in (one, other)]
                words, other_words = words.replace(str(one), "IT"), other_words.replace(str(other), "IT")
                assert (code, words) == (other_code, other_words)
                assert str(ALICE) not in words


@pytest.mark.parametrize("resume_from", ["/d/step_00000007_g1_x", ""])
async def test_only_the_owner_learns_of_a_job_of_the_same_name_and_folder(
    shared: ScriptedWorld, resume_from: str
) -> None:
    """What differs is said of the caller's own job alone. Where the folder is not named, nothing is."""
    assert shared.coordinator
    assert isinstance(shared.credentials, ChosenUser)
    gang = gang_ids.new_gang_id("train", ALICE)
    known = events.GangSpec(2, 0, durable_dir="/d", resume_from=resume_from)
    registered = '{"name": "train", "command": ["a"], "env": {"LR": "1"}}'
    shared.coordinator.engine.post(events.GangSubmitted(gang, 1, ALICE, "train", known, registered))
    for uid, durable_dir, expected in ((ALICE, "/d", ["command", "env.LR"]), (ALICE, "", None), (EVE, "/d", None)):
        like = JobSpec(name="train", command=["b"], durable_dir=durable_dir)
        ref = api_pb2.GangRef(job_identity="of-another", like=like)
        async with open_channel(shared.address, shared.credentials.as_uid(uid)) as channel:
            call = api_pb2_grpc.MusterStub(channel).Describe(ref)
            if expected is not None:
                assert list((await call).differs) == expected
            else:
                code, words = await _refusal(call)
                assert code is grpc.StatusCode.NOT_FOUND
                assert words.startswith("an earlier run of this job: no such job, or not yours")


def _calls_for_a_job(channel: Any) -> list[Callable[[str, Any], Any]]:
    """Every method that names a job, by its number or its gang."""
    api, diagnosis = api_pb2_grpc.MusterStub(channel), diagnosis_pb2_grpc.DiagnosisStub(channel)

    def ref(kind: str, name: Any) -> api_pb2.GangRef:
        named = api_pb2.GangRef(slurm_job_id=name) if kind == "job" else api_pb2.GangRef(gang_id=name)
        named.like.CopyFrom(JobSpec(name="eve", durable_dir="/d"))
        return named

    async def read(stream: Any) -> None:
        async for _ in stream:
            return

    return [
        lambda kind, name: api.Describe(ref(kind, name)),
        lambda kind, name: read(api.Watch(ref(kind, name))),
        lambda kind, name: read(api.Events(api_pb2.EventsRequest(gang=ref(kind, name)))),
        lambda kind, name: api.Cancel(ref(kind, name)),
        lambda kind, name: api.Flush(ref(kind, name)),
        lambda kind, name: api.Swap(api_pb2.SwapRequest(gang=ref(kind, name), node="n1")),
        lambda kind, name: diagnosis.Measurements(ref(kind, name)),
        lambda kind, name: diagnosis.MeasureLink(diagnosis_pb2.MeasureLinkRequest(gang=ref(kind, name))),
    ]


async def test_no_agent_registers_the_id_of_another_users_job(shared: ScriptedWorld, tmp_path: Path) -> None:
    assert isinstance(shared.credentials, ChosenUser)
    agent = ScriptedAgent("n1", spec(), shared.credentials.as_uid(EVE), gang=_submitted_id(tmp_path))
    await agent.open()
    async with asyncio.timeout(DEADLINE_S):
        code, _ = await _refusal(agent.attach(shared.address))
    await agent.die()
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert shared.coordinator
    assert not shared.coordinator.engine.core.state.gangs


async def test_a_user_whose_uid_the_coordinator_knows_otherwise_is_told_before_the_job_is_queued(
    shared: ScriptedWorld, tmp_path: Path
) -> None:
    """In a container that maps users, `muster submit` may see another uid than munge."""
    gang = _submitted_id(tmp_path)
    credentials = shared.credentials
    assert isinstance(credentials, ChosenUser)
    async with CoordinatorClient(shared.address, credentials.as_uid(EVE)) as coordinator:
        with pytest.raises(NotAllowed, match=f"gang {gang} names another user than you, who are uid {EVE} here"):
            await coordinator.has_gang(gang)
    async with CoordinatorClient(shared.address, credentials) as coordinator:
        assert not await coordinator.has_gang(gang)


@pytest.mark.parametrize("gang", ["train-0a1b2c3d", "job-u1000-0a1b2c3d", "g1", "local-0a1b2c3d"])
async def test_an_id_of_an_earlier_version_is_registered_by_whoever_comes_first(
    shared: ScriptedWorld, gang: str
) -> None:
    await _register_as(shared, ALICE, gang, 2)
    assert shared.coordinator
    assert shared.coordinator.engine.core.state.gangs[gang].account.owner_uid == ALICE


@pytest.mark.parametrize(
    ("gang", "name"),
    [("train-u7-0a1b2c3d4e5f-u0-0a1b2c3d4e5f", "train-u7-0a1b2c3d4e5f"), ("local-0a1b2c3d", "local"), ("g1", "")],
)
def test_an_id_begins_with_the_name_of_the_job(gang: str, name: str) -> None:
    assert gang_ids.name_of(gang) == name


def test_an_id_names_its_owner_whatever_the_name_of_the_job() -> None:
    for job in ("train", "train-u7-0a1b2c3d4e5f", "x" * 64):
        first, second = gang_ids.new_gang_id(job, 1000), gang_ids.new_gang_id(job, 1000)
        assert first != second
        assert gang_ids.owner_of(first) == 1000
        assert len(first) <= 128
        for task in ("_0", "_4000000"):  # of an array job
            assert gang_ids.owner_of(first + task) == 1000
            assert gang_ids.name_of(first + task) == job
            assert gang_ids.why_not_registered(first + task, 1001)


async def test_two_registrations_at_once_take_one_place(world: ScriptedWorld, api: Any) -> None:
    calls = [api.Register(_request(f"g{number}", 2)) for number in range(5)]
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(answer, api_pb2.RegisterReply) for answer in done) == 1
    assert len(await world.wait_for_facts(facts.GangRegistered)) == 1
