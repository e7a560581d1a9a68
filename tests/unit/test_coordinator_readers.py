"""Whom the owner has named as a reader: they see the job, and change nothing. Everybody else sees nothing of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.services.callers_gangs import LastingRight
from muster.daemon.coordinator.services.conversion import InvalidMessage
from muster.daemon.coordinator.services.job_specs import gang_spec
from muster.daemon.coordinator.services.login_names import GROUPS_KEPT_S, ReaderNames, look_up_reader
from muster.daemon.host import clock
from muster.daemon.testing.chosen_users import ChosenUser
from muster.daemon.testing.scripted_world import DEADLINE_S, NODES, ScriptedWorld, spec
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.channel import open_channel
from muster.launcher.errors import WrongInput
from muster.launcher.spec.spec import parse
from muster.v1 import api_pb2, api_pb2_grpc

SLURM, OWNER, RITA, OTTO = 64030, 1001, 1004, 1005
JOB = api_pb2.GangRef(slurm_job_id=1)
REFUSED = "no such job, or not yours"


class Directory:
    """Who is who. `moved`: what changes."""

    def __init__(self) -> None:
        self.names: dict[int, set[str]] = {RITA: {"rita", "group:vision"}, OTTO: {"otto", "group:audio"}}
        self.asked: list[int] = []

    def __call__(self, uid: int) -> frozenset[str]:
        self.asked.append(uid)
        return frozenset(self.names.get(uid, ()))


@asynccontextmanager
async def site(
    folder: Path,
    readers: Iterable[str],
    look_up: Callable[[int], frozenset[str]],
    now: Callable[[], float] = lambda: 0.0,
    kept_s: float = GROUPS_KEPT_S,
) -> AsyncIterator[Callable[[int], Any]]:
    """A coordinator with a job of OWNER. Yields a function that gives the API as a user calls it."""
    world = ScriptedWorld.create(folder, owner_uid=OWNER)
    world.credentials = user = ChosenUser(SLURM)
    world.rights = Rights(frozenset(), own_uid=SLURM)
    world.settings["reader_names"] = ReaderNames(look_up, now, timeout_s=0.2, kept_s=kept_s)
    await world.start_coordinator()
    assert world.coordinator
    engine = world.coordinator.engine
    engine.post(
        events.GangSubmitted("g1", 1, OWNER, "train", events.GangSpec(2, 1, readers=tuple(readers)), '{"run_dir": ""}')
    )
    engine.post(events.SlurmJobChanged("g1", 1, NODES, 0, None))
    await world.coordinator.roster.refresh()
    async with (
        open_channel(world.address, user.as_uid(RITA)) as rita,
        open_channel(world.address, user.as_uid(OTTO)) as otto,
        open_channel(world.address, user.as_uid(OWNER)) as owner,
    ):
        channels = {RITA: rita, OTTO: otto, OWNER: owner}
        yield lambda uid: api_pb2_grpc.MusterStub(channels[uid])
    await world.close()


async def jobs_listed(api: Any) -> int:
    return len((await api.List(api_pb2.ListRequest())).gangs)


@pytest.mark.parametrize("readers", [["rita"], ["group:vision"], ["nobody", "group:vision"]])
async def test_a_reader_sees_the_job_and_another_user_does_not(tmp_path: Path, readers: list[str]) -> None:
    async with site(tmp_path, readers, Directory()) as api:
        assert (await api(RITA).Describe(JOB)).gang_id == "g1"
        assert (await api(RITA).Describe(api_pb2.GangRef(gang_id="g1"))).gang_id == "g1"
        assert [one.name async for one in api(RITA).Events(api_pb2.EventsRequest(gang=JOB))]
        assert await jobs_listed(api(RITA)) == 1
        nodes = (await api(RITA).Nodes(api_pb2.ListRequest())).nodes
        assert [list(node.slurm_job_ids) for node in nodes] == [[1]] * 3
        with pytest.raises(grpc.aio.AioRpcError, match=REFUSED):
            await api(OTTO).Describe(JOB)
        assert await jobs_listed(api(OTTO)) == 0


@pytest.mark.parametrize("readers", [[], ["otto-"], ["group:rita"], ["vision"]])
async def test_whoever_is_not_named_is_no_reader(tmp_path: Path, readers: list[str]) -> None:
    async with site(tmp_path, readers, Directory()) as api:
        with pytest.raises(grpc.aio.AioRpcError, match=REFUSED):
            await api(RITA).Describe(JOB)


async def test_a_reader_changes_nothing_and_is_told_why(tmp_path: Path) -> None:
    async with site(tmp_path, ["rita"], Directory()) as api:
        calls = (
            lambda stub: stub.Cancel(JOB),
            lambda stub: stub.Flush(JOB),
            lambda stub: stub.Swap(api_pb2.SwapRequest(gang=JOB, node="n1")),
        )
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError, match="you may read this job, and change nothing") as refused:
                await call(api(RITA))
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            with pytest.raises(grpc.aio.AioRpcError, match=REFUSED):
                await call(api(OTTO))
        assert (await api(OWNER).Describe(JOB)).phase == "GATHERING"


async def test_who_leaves_a_group_reads_no_more_within_a_minute(tmp_path: Path) -> None:
    directory, now = Directory(), [0.0]
    async with site(tmp_path, ["group:vision"], directory, lambda: now[0]) as api:
        await api(RITA).Describe(JOB)
        directory.names[RITA] = {"rita"}
        now[0] += GROUPS_KEPT_S
        await api(RITA).Describe(JOB)
        assert directory.asked == [RITA], "within a minute nobody is asked twice"
        now[0] += 1
        with pytest.raises(grpc.aio.AioRpcError, match=REFUSED):
            await api(RITA).Describe(JOB)


@pytest.mark.parametrize("follows", [True, False])
async def test_who_leaves_a_group_while_a_stream_is_open_reads_no_more(tmp_path: Path, follows: bool) -> None:
    """Nothing happens to the job meanwhile, and nothing is sent."""
    directory = Directory()
    async with site(tmp_path, ["group:vision"], directory, clock.monotonic, kept_s=0.05) as api:
        events_of_job = api_pb2.EventsRequest(gang=JOB, follow=True)
        answers = aiter(api(RITA).Events(events_of_job) if follows else api(RITA).Watch(JOB))
        await anext(answers)
        directory.names[RITA] = {"rita"}
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(grpc.aio.AioRpcError, match=REFUSED) as refused:
                async for _ in answers:
                    pass
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_right_is_asked_again_and_again_while_a_call_waits() -> None:
    asked, coming = [0], asyncio.Event()

    async def learn() -> None:
        asked[0] += 1

    def check() -> None:
        if asked[0] == 3:
            coming.set()

    async with asyncio.timeout(DEADLINE_S):
        assert await LastingRight(learn, check, 0.01).wait_for(coming.wait)
    assert asked == [3]


async def test_a_silent_directory_gives_no_rights_and_takes_none(tmp_path: Path) -> None:
    answers = threading.Event()

    def look_up(uid: int) -> frozenset[str]:
        answers.wait()
        return frozenset({"rita"})

    async with site(tmp_path, ["rita"], look_up) as api:
        with pytest.raises(grpc.aio.AioRpcError, match=REFUSED):
            await api(RITA).Describe(JOB)
        assert (await api(OWNER).Describe(JOB)).gang_id == "g1"
        answers.set()


async def test_where_no_job_names_readers_nobody_is_looked_up(tmp_path: Path) -> None:
    directory = Directory()
    async with site(tmp_path, [], directory) as api:
        await jobs_listed(api(RITA))
    assert directory.asked == []


async def test_readers_of_a_job_that_was_forgotten_see_its_events(tmp_path: Path) -> None:
    world = ScriptedWorld.create(tmp_path, owner_uid=OWNER)
    world.credentials = user = ChosenUser(SLURM)
    world.rights = Rights(frozenset(), own_uid=SLURM)
    world.settings["reader_names"] = ReaderNames(Directory())
    await world.start_coordinator()
    assert world.coordinator
    engine = world.coordinator.engine
    for gang, job, readers in (("g1", 1, ("rita",)), ("g2", 2, ("rita",))):
        engine.post(events.GangSubmitted(gang, job, OWNER, "train", events.GangSpec(2, 1, readers=readers), "{}"))
    engine.core.state.gangs.pop("g1")
    request = api_pb2.EventsRequest(gang=JOB)
    async with (
        open_channel(world.address, user.as_uid(RITA)) as rita,
        open_channel(world.address, user.as_uid(OTTO)) as otto,
    ):
        names = [one.name async for one in api_pb2_grpc.MusterStub(rita).Events(request) if one.name]
        assert names == ["GangRegistered"]
        with pytest.raises(grpc.aio.AioRpcError, match=REFUSED):
            await anext(aiter(api_pb2_grpc.MusterStub(otto).Events(request)))
    await world.close()


def test_this_host_knows_the_groups_of_its_users() -> None:
    assert {"root", "group:root"} <= look_up_reader(0)
    assert look_up_reader(4_000_000_001) == frozenset()


@pytest.mark.parametrize("name", ["", "group:", "two words", "-x", "group:a,b", "x" * 80])
def test_a_name_that_nobody_can_have_is_refused(name: str) -> None:
    with pytest.raises(InvalidMessage, match="a reader"):
        gang_spec(spec(readers=[name]))
    job = f'name = "t"\nnodes = 1\ncommand = ["true"]\nrun_dir = "/shared/t"\nreaders = [{name!r}]\n'
    with pytest.raises(WrongInput, match="readers"):
        parse(job, "job.toml")


def test_more_readers_than_a_job_may_have_are_refused() -> None:
    with pytest.raises(InvalidMessage, match="readers"):
        gang_spec(spec(readers=[f"user{number}" for number in range(65)]))


def test_readers_go_from_job_toml_to_the_journal() -> None:
    job = parse(
        'name = "t"\nnodes = 1\ncommand = ["true"]\nrun_dir = "/s"\nreaders = ["rita", "group:vision"]\n', "job.toml"
    )
    found = gang_spec(job.to_proto("/work"))
    assert found.readers == ("rita", "group:vision")
    name, text = facts.encode(facts.GangRegistered("g", 1, OWNER, "t", found, "{}"))
    assert facts.decode(name, text) == facts.GangRegistered("g", 1, OWNER, "t", found, "{}")
    older = text.replace(',"readers":["rita","group:vision"]', "")
    assert older != text
    assert facts.decode(name, older).spec.readers == ()  # type: ignore[union-attr]
