"""The account of goodput in a coordinator: in the view of a job, over all jobs, and after restarts."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from muster.daemon.coordinator.accounting.account_store import FILE, AccountStore, Job, Reader, Row
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.diagnosis.side_database import SideDatabaseError
from muster.daemon.coordinator.goodput.intervals import Category, Fault, FaultKind, Interval, Measured, Wait
from muster.daemon.host import clock
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld
from muster.daemon.transport.channel import open_channel
from muster.v1 import agent_pb2, api_pb2, api_pb2_grpc, goodput_pb2, goodput_pb2_grpc

REF = api_pb2.GangRef(slurm_job_id=1)
LOST = Fault(FaultKind.NODE, "n7", "n7 is lost", 1050.0)


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ScriptedWorld]:
    """A job of two ranks, on n1 and n2, and a spare trains."""
    made = ScriptedWorld.create(tmp_path)
    await made.start_coordinator()
    await made.start_agents(NODES, node_options=["--account=physics", "--gres=gpu:1"])
    await made.wait_for_duty("RUN 1", ["n1", "n2"])
    for node in ("n1", "n2"):
        await made.agents[node].step(40)
    await made.wait_for_facts(facts.FirstStep)
    yield made
    await made.close()


async def described(world: ScriptedWorld, seen: Callable[[api_pb2.GoodputView], bool]) -> api_pb2.GoodputView:
    """The account in the view of the job, once `seen` holds."""
    async with asyncio.timeout(60), open_channel(world.address, world.credentials) as channel:
        stub: Any = api_pb2_grpc.MusterStub(channel)
        while True:
            view: api_pb2.GoodputView = (await stub.Describe(REF)).goodput
            if seen(view):
                return view


async def account(world: ScriptedWorld, by: int, since: float = 1.0) -> dict[str, dict[str, float]]:
    """By key, the seconds of nodes by category."""
    async with open_channel(world.address, world.credentials) as channel:
        stub: Any = goodput_pb2_grpc.GoodputStub(channel)
        pages = [page async for page in stub.Account(goodput_pb2.GoodputRequest(since_s=since, by=by))]
    return {row.key: {part.category: part.node_s for part in row.parts} for page in pages for row in page.rows}


async def test_the_parts_of_a_running_job_add_up(world: ScriptedWorld) -> None:
    view = await described(world, lambda view: view.useful_node_s > 0)
    lost = {one.category: one.node_s for one in view.lost}
    assert view.useful_node_s + sum(lost.values()) == pytest.approx(view.allocated_node_s)
    assert {"start", "rendezvous", "spare"} <= lost.keys()
    assert view.since_s < view.until_s
    by_account = await account(world, goodput_pb2.GOODPUT_GROUP_ACCOUNT)
    assert set(by_account) == {"physics"}
    assert {"queue", "start", "useful", "spare"} <= by_account["physics"].keys()


async def test_the_account_is_the_one_that_slurm_charges(world: ScriptedWorld) -> None:
    """What a job says of itself would let a user charge anybody."""

    async def charged() -> set[str]:
        async with asyncio.timeout(60):
            while (found := set(await account(world, goodput_pb2.GOODPUT_GROUP_ACCOUNT))) != {"biology"}:
                pass  # the coordinator asks Slurm every two seconds
        return found

    world.cluster.charge(1, "biology")
    assert await charged() == {"biology"}
    await world.stop_coordinator()
    assert AccountStore(world.folder).account_of("g1") == "biology"
    await world.start_coordinator()
    assert await charged() == {"biology"}


async def test_the_account_of_a_recovery_outlives_the_coordinator_and_the_store(world: ScriptedWorld) -> None:
    await world.agents["n1"].end_ranks(1)
    await world.wait_for_duty("RUN 2", ["n1", "n2"])
    before = await account(world, goodput_pb2.GOODPUT_GROUP_CAUSE)
    assert {"fence", "place"} & before["crash"].keys()
    for damage in (False, True):
        await world.stop_coordinator()
        if damage:
            (world.folder / FILE).write_bytes(b"no database" * 1000)
        await world.start_coordinator()
        await described(world, lambda view: view.useful_node_s > 0)
        after = await account(world, goodput_pb2.GOODPUT_GROUP_CAUSE)
        for category in ("detect", "fence", "place"):
            assert after["crash"].get(category) == before["crash"].get(category)


async def test_what_is_settled_while_the_store_is_read_is_in_the_account(world: ScriptedWorld) -> None:
    assert world.coordinator
    accounts, until, store_answers = world.coordinator._accounts, clock.wall(), threading.Event()

    async def node_s() -> dict[str, float]:
        found = await accounts.summary(1.0, until, "job", None)
        return found[0].node_s if found else {}

    def slow_disk() -> None:
        store_answers.wait(60)

    accounts._thread.write(slow_disk)
    meanwhile = asyncio.create_task(node_s())
    try:
        await world.agents["n1"].end_ranks(1)
        await world.wait_for_duty("RUN 2", ["n1", "n2"])
    finally:
        store_answers.set()
    assert sum((await meanwhile).values()) == pytest.approx(sum((await node_s()).values()))


async def test_what_agents_measure_of_a_generation_is_no_useful_time(world: ScriptedWorld) -> None:
    for node in ("n1", "n2"):
        agent = world.agents[node]
        times = agent_pb2.BlockTimes(first_block=1, compute_us=[900_000] * 3, wait_us=[100_000] * 3)
        times.fetch_us.extend([300_000] * 3)
        agent.status.ranks[0].block_times.CopyFrom(times)
        await agent.step(60)
    await world.agents["n1"].end_ranks(1)
    await world.wait_for_duty("RUN 2", ["n1", "n2"])
    parts = (await account(world, goodput_pb2.GOODPUT_GROUP_CAUSE))[""]
    assert parts["data"] / (parts["data"] + parts["useful"]) == pytest.approx(0.3)


async def test_a_job_that_only_logs_keeps_its_steps_and_their_time_over_a_restart(tmp_path: Path) -> None:
    world = ScriptedWorld.create(tmp_path)
    await world.start_coordinator()
    try:
        await world.start_agents(NODES)
        await world.wait_for_duty("RUN 1", ["n1", "n2"])
        for node in ("n1", "n2"):
            await world.agents[node].log(1, 40)
        await described(world, lambda view: view.useful_node_s > 0 and view.logged_step == 40)
        await world.agents["n1"].end_ranks(1)
        await world.wait_for_duty("RUN 2", ["n1", "n2"])
        before = (await account(world, goodput_pb2.GOODPUT_GROUP_CAUSE))[""]
        await world.stop_coordinator()
        await world.start_coordinator()
        view = await described(world, lambda view: view.allocated_node_s > 0)
        after = (await account(world, goodput_pb2.GOODPUT_GROUP_CAUSE))[""]
        assert (view.logged_step, after["useful"]) == (40, before["useful"])
    finally:
        await world.close()


async def test_steps_that_are_done_again_are_the_same_in_the_view_and_over_all_jobs(world: ScriptedWorld) -> None:
    await world.agents["n1"].end_ranks(1)
    await world.wait_for_duty("RUN 2", ["n1", "n2"])
    (before,) = (await account(world, goodput_pb2.GOODPUT_GROUP_JOB)).values()
    for step in (1, 79):
        for node in ("n1", "n2"):
            await world.agents[node].step(step)
    view = await described(world, lambda view: view.useful_node_s > before["useful"])
    assert "steps_again" in {one.category for one in view.lost}
    (parts,) = (await account(world, goodput_pb2.GOODPUT_GROUP_JOB)).values()
    assert parts["useful"] >= view.useful_node_s


async def test_a_wrong_window_or_group_is_refused(world: ScriptedWorld) -> None:
    for since, by, words in (
        (1.0, 0, "one of job, account"),
        (1e12, 1, "earlier since_s"),
        (math.nan, 1, "since_s = nan"),
        (-math.inf, 1, "since_s = -inf"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await account(world, by, since)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in str(caught.value.details())


def used(folder: Path, gang: str, uid: int, *intervals: Interval, waits: tuple[Wait, ...] = ()) -> AccountStore:
    store = AccountStore(folder)
    store.note(Job(gang, 7, "train", uid, "physics", 8), {"n7": "s0"}, intervals, waits, anew=False)
    return store


def span(category: Category, since: float, until: float, fault: Fault | None = None) -> Interval:
    return Interval(category, 1, since, until, frozenset(("n7", "n8")), fault)


def test_a_window_cuts_what_lies_across_its_edges(tmp_path: Path) -> None:
    store = used(tmp_path, "g", 1, span(Category.USEFUL, 1000, 1050), span(Category.FENCE, 1050, 1060, LOST))
    assert store.summary(1040, 1055, "node", None) == {
        "": Row("", {"useful": 20.0}, {"useful": 160.0}),
        "n7": Row("n7", {"fence": 10.0}, {"fence": 80.0}, faults=1),
    }
    assert set(store.summary(1040, 1055, "leaf", None)) == {"", "s0"}
    assert set(store.summary(1040, 1055, "job", None)) == {"7 train"}
    assert store.summary(1070, 1080, "job", None) == {}


def test_users_see_their_own_and_what_they_may_read(tmp_path: Path) -> None:
    store, waits = AccountStore(tmp_path), (Wait(1000, 300, 2, swap=False), Wait(1600, 10, 2, swap=True))
    for uid, readers in ((1, "[]"), (2, '["carol", "group:physics"]'), (3, '["carole"]')):
        job = Job(f"g{uid}", uid, "train", uid, "physics", 8, readers=readers)
        store.note(job, {}, [span(Category.USEFUL, 1000, 1050)], waits, anew=False)

    def seen(uid: int, *names: str) -> set[str]:
        return set(store.summary(0, 2000, "job", Reader(uid, frozenset(names))))

    assert seen(1) == {"1 train"}
    assert seen(9, "carol") == seen(9, "dan", "group:physics") == {"2 train"}
    assert seen(3, "group:physics") == {"2 train", "3 train"}
    assert seen(9, "physics") == seen(9) == set()
    assert store.summary(0, 2000, "account", Reader(9, frozenset(("carol",))))["physics"].saved_node_s == 580.0
    assert len(store.summary(0, 2000, "job", None)) == 3
    assert Job("g", 1, "", 2, "", 8, readers='["carol"]').is_shown_to(Reader(9, frozenset(("carol",))))
    assert not Job("g", 1, "", 2, "", 8).is_shown_to(Reader(9, frozenset(("carol",))))


def test_the_store_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    used(tmp_path, "g", 1, span(Category.USEFUL, 1000, 1050))
    with closing(sqlite3.connect(tmp_path / FILE)) as database:
        database.execute("ALTER TABLE jobs DROP COLUMN readers")
    store = AccountStore(tmp_path)
    assert set(store.summary(0, 2000, "job", Reader(1))) == {"7 train"}
    assert store.summary(0, 2000, "job", Reader(2, frozenset(("carol",)))) == {}


def test_a_spare_has_saved_what_a_run_of_the_job_took_to_start(tmp_path: Path) -> None:
    waits = (Wait(1000, 300, 2, swap=False), Wait(1500, 500, 2, swap=False), Wait(1600, 10, 2, swap=True))
    store = used(tmp_path, "g", 1, span(Category.USEFUL, 1000, 2000), waits=waits)
    (row,) = store.summary(0, 3000, "job", None).values()
    assert (row.saved_node_s, row.saved_gpu_s) == (2 * (400 - 10), 16 * (400 - 10))


def test_an_account_that_is_made_again_counts_once(tmp_path: Path) -> None:
    store = used(tmp_path, "g", 1, span(Category.USEFUL, 1000, 1050))
    store.note(Job("g", 7, "train", 1, "", 8, complete=True), {}, [span(Category.USEFUL, 1000, 1060)], (), anew=True)
    assert store.summary(0, 3000, "account", None)[""].node_s == {"useful": 120.0}
    assert store.complete() == {"g"}
    store.note_measured("g", 3, Measured(0.1, 0.2, 0.3, 900.5, 7, 40))
    assert store.measured("g") == {3: Measured(0.1, 0.2, 0.3, 900.5, 7, 40)}


def test_what_is_older_than_the_policy_says_is_forgotten_and_its_job_is_not_made_again(tmp_path: Path) -> None:
    day = 86_400.0
    store = AccountStore(tmp_path, kept_s=10 * day)
    for number, since in enumerate((0.0, 5 * day, 20 * day), start=1):
        job = Job(f"g{number}", number, "train", 1, "", 8, complete=True)
        store.note_measured(job.gang, 1, Measured(0.1))
        waits = [Wait(since + 1, 5.0, 2, swap=False)]
        store.note(job, {}, [span(Category.USEFUL, since, since + 1000)], waits, anew=False)
    assert set(store.summary(0, 30 * day, "job", None)) == {"3 train"}
    assert [bool(store.measured(f"g{number}")) for number in (1, 2, 3)] == [False, False, True]
    assert store.complete() == {"g1", "g2", "g3"}
    with closing(sqlite3.connect(tmp_path / FILE)) as database:
        assert database.execute("SELECT DISTINCT gang FROM waits").fetchall() == [("g3",)]


def test_a_store_that_somebody_else_holds_loses_nothing(tmp_path: Path) -> None:
    store = used(tmp_path, "g", 1, span(Category.USEFUL, 1000, 1050))
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(SideDatabaseError, match="locked"):
            store.complete()
    assert list(store.summary(0, 3000, "account", None)) == ["physics"]
