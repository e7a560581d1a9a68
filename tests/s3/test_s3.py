"""Flushes to a real S3 server on loopback (moto's), which throttles, fails, resets connections and does not answer.

`make object-store-test` installs the server and s3fs, and runs this.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

pytest.importorskip("s3fs", reason="s3fs is not installed: make object-store-test")
moto_server = pytest.importorskip("moto.server", reason="moto is not installed: make object-store-test")

import s3fs  # noqa: E402
import xxhash  # noqa: E402
from tests.s3.faulty_proxy import FaultyProxy, no_fault  # noqa: E402
from tests.unit.test_checkpoint_service import Gang, flush_order, running_gang, until  # noqa: E402

from muster.checkpoint.durable import locations, object_store  # noqa: E402
from muster.checkpoint.durable.newest import newest_checkpoint  # noqa: E402
from muster.checkpoint.durable.object_store import ObjectStore  # noqa: E402
from muster.checkpoint.format import durable_folders  # noqa: E402
from muster.checkpoint.format.errors import FlushError  # noqa: E402
from muster.checkpoint.format.versions import Version  # noqa: E402
from muster.checkpoint.store.flush import flush_part  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default")]  # warnings of the libraries are their business
PLACES = {0: "n0", 1: "n1"}
WHERE = "s3://bucket/jobs/tiny"
SIZE = 12 << 20
"""Of a rank's state in bytes: several parts of an upload."""


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyProxy]:
    real = moto_server.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    real.start()
    with FaultyProxy(real.get_host_and_port()[1]) as proxy:
        yield proxy
    real.stop()


@pytest.fixture
def proxy(server: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """An empty bucket."""
    for name, value in {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "2",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_store, "PART_BYTES", 5 << 20)  # the least that S3 allows
    monkeypatch.setattr(ObjectStore, "poll_s", 0.02)
    s3fs.S3FileSystem.clear_instance_cache()
    server.fault = no_fault
    files = s3fs.S3FileSystem()
    if files.exists("bucket"):
        files.rm("bucket", recursive=True)
    files.mkdir("bucket")
    server.requests.clear()
    yield server
    server.fault = no_fault


@pytest.fixture
async def gang() -> AsyncIterator[Gang]:
    async with running_gang() as gang:
        await gang.add(*PLACES.values())
        await gang.run(PLACES, size=SIZE)
        await keep(gang, 1)
        yield gang


async def keep(gang: Gang, step: int) -> None:
    await gang.step(step, lambda rank: random.Random(100 * step + rank).randbytes(SIZE))
    await gang.committed(Version(1, step))


async def flush(gang: Gang, step: int, **keep: int) -> list[object]:
    order = flush_order(gang, Version(1, step))
    work = [node.checkpoint_service.flush(order, WHERE, **keep) for node in gang.nodes.values()]
    return await asyncio.gather(*work, return_exceptions=True)


def names() -> list[str]:
    """All objects, below the job's prefix."""
    return sorted(path.removeprefix("bucket/jobs/tiny/") for path in s3fs.S3FileSystem().find("bucket"))


def check(where: str | None, step: int) -> None:
    """Every file of the checkpoint has the bytes that its manifest names."""
    assert where is not None
    store = ObjectStore(where)
    manifest = json.loads(store.read(durable_folders.MANIFEST, 1 << 20))
    assert manifest["step"] == step
    for note in manifest["ranks"].values():
        assert xxhash.xxh3_128_hexdigest(store.read(note["file"], 1 << 30)) == note["file_xxh3_128"]


async def newest() -> str | None:
    return await asyncio.to_thread(newest_checkpoint, WHERE)


async def test_a_checkpoint_is_uploaded_in_parts_and_older_ones_are_removed(gang: Gang, proxy: FaultyProxy) -> None:
    assert await newest() is None
    written = await flush(gang, 1)
    assert all(not isinstance(one, Exception) for one in written), written
    assert await newest() == f"{WHERE}/step_00000001_g1_g1.flush1"
    assert sum("__0_0.distcp?partNumber" in path for method, path, _ in proxy.requests if method == "PUT") >= 2
    await asyncio.to_thread(check, await newest(), 1)
    await keep(gang, 2)
    await flush(gang, 2, keep=1)
    assert await newest() == f"{WHERE}/step_00000002_g1_g1.flush2"
    folder = "step_00000002_g1_g1.flush2/"
    assert names() == sorted(folder + name for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"))


@pytest.mark.parametrize("fault", ["slow down", "reset", "reset in body"])
async def test_faults_that_pass_are_not_seen(gang: Gang, proxy: FaultyProxy, fault: str) -> None:
    seen: dict[tuple[str, str], int] = {}

    def every_first(method: str, path: str) -> str:
        seen[method, path] = seen.get((method, path), 0) + 1
        return fault if seen[method, path] == 1 and method == "PUT" else ""

    proxy.fault = every_first
    written = await flush(gang, 1)
    assert all(not isinstance(one, Exception) for one in written), written
    assert any(found for *_, found in proxy.requests)
    await asyncio.to_thread(check, await newest(), 1)


@pytest.mark.parametrize("part", ["__1_0.distcp", "__0_0.distcp", "manifest.json", ".metadata", ".part", ".flush-"])
@pytest.mark.parametrize("fault", ["slow down", "denied", "reset in body"])
async def test_faults_that_last_are_told_and_the_next_flush_is_whole(
    gang: Gang, proxy: FaultyProxy, part: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    proxy.fault = lambda method, path: fault if part in path and method in ("PUT", "POST") else ""
    failed = await flush(gang, 1)
    errors = [str(one) for one in failed if isinstance(one, FlushError)]
    assert errors
    assert any("can't be written" in error for error in errors), errors
    assert await newest() is None
    proxy.fault = no_fault
    written = await flush(gang, 1)
    assert all(not isinstance(one, Exception) for one in written), written
    await asyncio.to_thread(check, await newest(), 1)
    assert {name.partition("/")[0] for name in names()} == {"step_00000001_g1_g1.flush2"}


async def test_a_store_that_does_not_answer_is_given_up_and_holds_nothing(gang: Gang, proxy: FaultyProxy) -> None:
    proxy.fault = lambda method, path: "hang" if "__1_0.distcp" in path else ""
    order = flush_order(gang, Version(1, 1))
    work = [asyncio.create_task(n.checkpoint_service.flush(order, WHERE)) for n in gang.nodes.values()]
    await until(lambda: any(fault == "hang" for *_, fault in proxy.requests), 100.0)
    for step in (2,):
        await keep(gang, step)  # training goes on
    for task in work:
        task.cancel()
    for step in (3, 4):
        await keep(gang, step)
    proxy.fault = no_fault
    written = await flush(gang, 4)
    assert all(not isinstance(one, Exception) for one in written), written
    await asyncio.to_thread(check, await newest(), 4)
    await asyncio.gather(*work, return_exceptions=True)


async def test_metadata_that_arrives_after_its_flush_was_given_up_makes_no_checkpoint(
    gang: Gang, proxy: FaultyProxy
) -> None:
    await flush(gang, 1)
    folder = (await newest() or "").removeprefix("s3://")
    files = s3fs.S3FileSystem()
    for name in (durable_folders.MANIFEST, "__0_0.distcp", "__1_0.distcp"):
        await asyncio.to_thread(files.rm_file, f"{folder}/{name}")
    assert await newest() is None
    await flush(gang, 1)
    assert {name.partition("/")[0] for name in names()} == {"step_00000001_g1_g1.flush2"}


def test_what_submit_can_see_is_told_at_submit(proxy: FaultyProxy) -> None:
    assert locations.find_problem(WHERE) == ""
    assert names() == []
    problem = locations.find_problem("s3://absent/jobs")
    assert problem.startswith("durable_dir = 's3://absent/jobs': there is no such bucket")
    assert problem.endswith("create it, or name another one")
    proxy.fault = lambda method, path: "denied"
    assert "can't be written to or listed" in locations.find_problem(WHERE)
    assert "give the job's user the right" in locations.find_problem(WHERE)


def test_a_store_that_does_not_answer_is_no_problem_yet(proxy: FaultyProxy) -> None:
    proxy.fault = lambda method, path: "hang"
    assert locations.find_problem(WHERE, timeout_s=0.2) == ""


def test_missing_credentials_are_told(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(OSError, match="credentials") as raised:
        ObjectStore(WHERE).check()
    assert "can't be written" in flush_part.describe_error(raised.value, WHERE)
