"""What the coordinator has measured of jobs: the Diagnosis service, rates of links, the store of past generations."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.diagnosis import past_generations, run_recorder
from muster.daemon.coordinator.diagnosis.past_generations import FILE, PastGeneration, PastGenerations
from muster.daemon.coordinator.diagnosis.side_database import SideDatabaseError
from muster.daemon.coordinator.services.job_specs import settings_digest
from muster.daemon.coordinator.shell import link_rates
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld, spec
from muster.daemon.transport.channel import open_channel
from muster.v1 import agent_pb2, api_pb2, api_pb2_grpc, diagnosis_pb2, diagnosis_pb2_grpc

REF = api_pb2.GangRef(slurm_job_id=1)


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ScriptedWorld]:
    """A job of two ranks, on n1 and n2, and a spare trains."""
    made = ScriptedWorld.create(tmp_path)
    await made.start_coordinator()
    secrets = {"env": {"TOKEN": "s3cret"}, "command": ["train", "--key=s3cret"], "run_dir": "/r"}
    await made.start_agents(NODES, estimate_tables='{"model": {"layers": 2}}', **secrets)
    await made.wait_for_duty("RUN 1", ["n1", "n2"])
    yield made
    await made.close()


@pytest_asyncio.fixture
async def stub(world: ScriptedWorld) -> AsyncIterator[Any]:
    async with open_channel(world.address, world.credentials) as channel:
        yield diagnosis_pb2_grpc.DiagnosisStub(channel)


async def train(world: ScriptedWorld, steps: int = 40) -> None:
    """Both ranks finish steps, with times: rank 1 computes longer, so that rank 0 waits for it."""
    for node, compute, wait in (("n1", 800_000, 200_000), ("n2", 950_000, 50_000)):
        agent = world.agents[node]
        times = agent_pb2.BlockTimes(
            first_block=1, compute_us=[compute] * 3, wait_us=[wait] * 3, fetch_us=[300_000] * 3
        )
        agent.status.ranks[0].block_times.CopyFrom(times)
        await agent.step(steps)
    await world.wait_for_facts(facts.FirstStep)


async def until(stub: Any, seen: Any) -> diagnosis_pb2.JobMeasurements:
    """The measurements once `seen` holds: statuses and the store take a moment."""
    async with asyncio.timeout(60):
        while True:
            found: diagnosis_pb2.JobMeasurements = await stub.Measurements(REF)
            if seen(found):
                return found


async def test_step_times_and_the_spec_without_its_secrets(world: ScriptedWorld, stub: Any) -> None:
    await train(world)
    found = await until(stub, lambda reply: len(reply.ranks) == 2)
    assert [(one.rank, one.compute_s, one.wait_s) for one in found.ranks] == [(0, 0.8, 0.2), (1, 0.95, 0.05)]
    assert {one.fetch_s for one in found.ranks} == {0.3}
    assert found.step_s == pytest.approx(1.0)
    assert found.gang.gang_id == "g1"
    assert (found.spec.nodes, found.spec.estimate_tables) == (2, '{"model": {"layers": 2}}')
    assert "s3cret" not in str(found)
    assert found.past == []


async def test_a_generation_that_ends_is_kept_and_compared(world: ScriptedWorld, stub: Any) -> None:
    await train(world)
    await until(stub, lambda reply: len(reply.ranks) == 2)
    await world.agents["n1"].end_ranks(1)
    await world.wait_for_duty("RUN 2", ["n1", "n2"])
    (past,) = (await until(stub, lambda reply: reply.past)).past
    assert (past.slurm_job_id, past.generation, past.steps, list(past.nodes)) == (1, 1, 40, ["n1", "n2"])
    assert (past.step_s, past.best_step_s) == (pytest.approx(1.0), pytest.approx(1.0))
    assert (past.compute_s, past.wait_s) == (pytest.approx(0.875), pytest.approx(0.125))
    assert past.same_settings
    await world.stop_coordinator()  # and is there after a restart
    await world.start_coordinator()
    async with open_channel(world.address, world.credentials) as channel:
        again = await diagnosis_pb2_grpc.DiagnosisStub(channel).Measurements(REF)
    assert [one.generation for one in again.past] == [1]


async def test_copies_of_shards_tell_what_links_carry(world: ScriptedWorld, stub: Any) -> None:
    status = world.agents["n1"].status
    status.transfers.add(node="n2", bytes=8_000_000, seconds=2.0, number=1)
    status.transfers.add(node="elsewhere", bytes=8_000_000, seconds=2.0, number=2)
    status.transfers.add(node="n3", bytes=8_000_000, seconds=float("nan"), number=3)
    await world.agents["n1"].step(1)
    (link,) = (await until(stub, lambda reply: reply.links)).links
    assert (link.from_node, link.to_node, link.bytes, link.seconds) == ("n1", "n2", 8_000_000, 2.0)
    assert not link.requested


async def refusal(stub: Any, sender: str, receiver: str) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.MeasureLink(diagnosis_pb2.MeasureLinkRequest(gang=REF, from_node=sender, to_node=receiver))
    return caught.value.code(), caught.value.details() or ""


async def test_a_link_is_measured_by_the_agent_that_sends(world: ScriptedWorld, stub: Any) -> None:
    sender = world.agents["n1"]
    sender.link = agent_pb2.LinkMeasurement(bytes=5_000_000, seconds=0.5)
    link = await stub.MeasureLink(diagnosis_pb2.MeasureLinkRequest(gang=REF, from_node="n1", to_node="n3"))
    assert (link.from_node, link.to_node, link.bytes, link.seconds, link.requested) == (
        "n1",
        "n3",
        5_000_000,
        0.5,
        True,
    )
    assert [(one.node, one.peer_address) for one in sender.measured] == [("n3", world.agents["n3"].address)]
    assert [one.requested for one in (await stub.Measurements(REF)).links] == [True]


async def test_what_can_not_be_measured_is_refused_in_words(
    world: ScriptedWorld, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.agents["n1"].link = agent_pb2.LinkMeasurement(error="n1 can't send to n2: No route to host")
    assert await refusal(stub, "n1", "n2") == (grpc.StatusCode.ABORTED, "n1 can't send to n2: No route to host")
    code, words = await refusal(stub, "n1", "elsewhere")
    assert (code, words) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "elsewhere is no node of train (job 1): see muster status 1",
    )
    assert (await refusal(stub, "n1", "n1"))[0] is grpc.StatusCode.INVALID_ARGUMENT
    waiting = asyncio.create_task(refusal(stub, "n2", "n1"))  # n2 does not answer
    async with asyncio.timeout(60):
        await world.agents["n2"].wait_until(lambda: bool(world.agents["n2"].measured))
    assert await refusal(stub, "n1", "n2") == (
        grpc.StatusCode.ABORTED,
        "another link of this job is being measured: try again",
    )
    waiting.cancel()
    monkeypatch.setattr(link_rates, "ANSWER_S", 0.01)
    async with asyncio.timeout(60):
        while True:
            answer = await refusal(stub, "n2", "n1")
            if "another link" not in answer[1]:
                break
    assert answer == (grpc.StatusCode.ABORTED, "the agent on n2 does not answer within 0.01 s")


PAST = PastGeneration("g1", 1, 7, 1000, "train", "d1", 10.0, 20.0, 100, 1.0, 0.8, 0.2, 1.0, 20.0, ("n1", "n2"))


def test_the_newest_note_counts_and_the_best_step_of_all(tmp_path: Path) -> None:
    store = PastGenerations(tmp_path)
    store.note(PAST)
    store.note(replace(PAST, ended_at=30.0, step_s=0.9, best_step_s=0.9, best_at=30.0))
    store.note(replace(PAST, ended_at=40.0, step_s=2.0, best_step_s=2.0, best_at=40.0))
    (one,) = PastGenerations(tmp_path).of_job(1000, "train")
    assert (one.ended_at, one.step_s, one.best_step_s, one.best_at) == (40.0, 2.0, 0.9, 30.0)
    assert one.nodes == ("n1", "n2")
    assert store.of_job(1001, "train") == store.of_job(1000, "other") == []
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0


def test_more_steps_than_a_file_holds_are_kept_as_many(tmp_path: Path) -> None:
    store = PastGenerations(tmp_path)
    store.note(replace(PAST, steps=(1 << 64) - 1))
    assert [one.steps for one in store.of_job(1000, "train")] == [past_generations.MOST_STEPS]


def test_the_store_stays_small(tmp_path: Path) -> None:
    store = PastGenerations(tmp_path, kept_of_name=3, kept=5)
    for number in range(6):
        store.note(replace(PAST, generation=number, ended_at=float(number)))
    assert [one.generation for one in store.of_job(1000, "train")] == [5, 4, 3]
    for number in range(4):
        store.note(replace(PAST, gang=f"h{number}", name=f"job-{number}", ended_at=100.0 + number))
    assert [one.generation for one in store.of_job(1000, "train")] == [5]


def test_a_damaged_store_is_replaced(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database, but long enough to be taken for one by its size" * 100)
    store = PastGenerations(tmp_path)
    store.note(PAST)
    assert store.of_job(1000, "train") == [PAST]
    assert (tmp_path / FILE).with_suffix(".damaged").exists()


def test_a_store_of_another_form_is_no_end(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / FILE)) as database:
        database.execute("CREATE TABLE generations (gang, generation, more)")
    with pytest.raises(SideDatabaseError, match=r"past-generations\.db"):
        PastGenerations(tmp_path).note(PAST)


def test_settings_are_what_the_time_of_a_step_follows_from() -> None:
    one = spec(command=["train", "--batch=8"], env={"RUN": "1"}, run_dir="/a")
    assert settings_digest(one) == settings_digest(spec(command=["train", "--batch=8"], env={"RUN": "2"}, run_dir="/b"))
    others = [spec(command=["train", "--batch=9"]), spec(command=["train", "--batch=8"], tensor_parallel=2)]
    assert len({settings_digest(each) for each in (one, *others)}) == 3


async def test_a_job_that_is_cancelled_keeps_its_last_generation(world: ScriptedWorld, stub: Any) -> None:
    await train(world)
    await until(stub, lambda reply: len(reply.ranks) == 2)
    async with open_channel(world.address, world.credentials) as channel:
        await api_pb2_grpc.MusterStub(channel).Cancel(REF)
    found = await until(stub, lambda reply: reply.gang.final)
    assert [(one.generation, one.step_s) for one in found.past] == [(1, pytest.approx(1.0))]
    assert list(found.ranks) == []


async def test_a_generation_that_runs_is_noted_now_and_then_with_its_best_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_recorder, "INTERVAL_S", 0.01)
    world = ScriptedWorld.create(tmp_path)
    await world.start_coordinator()
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    async with open_channel(world.address, world.credentials) as channel:
        stub = diagnosis_pb2_grpc.DiagnosisStub(channel)
        await train(world)
        await until(stub, lambda reply: reply.past and reply.past[0].step_s == pytest.approx(1.0))
        for node in ("n1", "n2"):
            status = world.agents[node].status.ranks[0]
            status.block_times.CopyFrom(agent_pb2.BlockTimes(first_block=9, compute_us=[1_500_000], wait_us=[500_000]))
            await world.agents[node].step(4)
        found = await until(stub, lambda reply: reply.past[0].step_s == pytest.approx(2.0))
    (one,) = found.past
    assert (one.generation, one.steps, one.best_step_s) == (1, 44, pytest.approx(1.0))
    assert one.best_s <= one.ended_s
    await world.close()
