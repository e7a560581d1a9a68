"""A durable checkpoint that was damaged on storage: nothing of it is used, and the next older one is loaded."""

import json
import logging
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from tests.torch.test_checkpoint_loop import Job  # noqa: E402

from muster.checkpoint import CheckpointError  # noqa: E402
from muster.checkpoint.format.errors import CorruptCheckpoint  # noqa: E402
from muster.checkpoint.testing.agent_in_thread import AgentInThread  # noqa: E402
from muster.checkpoint.training.durable_loading import agreed_damage  # noqa: E402
from muster.checkpoint.training.durable_loading.agreed_damage import ALL, HEAD, JointLoad  # noqa: E402
from muster.checkpoint.training.durable_loading.load_progress import LoadProgress  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.fixture
def folders(agent: AgentInThread, tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints, of steps 1 and 2."""
    job = Job(agent.connect())
    assert job.checkpoint.restore() == 0
    for step in (1, 2):
        job.train(step)
        job.checkpoint.step(step)
        agent.await_committed(step)
        agent.flush(step, tmp_path)
    job.checkpoint.close()
    newer, older = sorted(tmp_path.iterdir(), reverse=True)
    return newer, older


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "data": ("__0_0.distcp", 5000, "__0_0.distcp is damaged: its bytes 0 to "),
    "digests": ("__0_0.distcp", -1, "__0_0.distcp is damaged: its bytes from "),
    "metadata": (".metadata", 40, ".metadata is damaged: its bytes 0 to "),
    "manifest": ("manifest.json", 0, "manifest.json is damaged: "),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_next_older_checkpoint_is_loaded(
    folders: tuple[Path, Path], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    newer, older = folders
    name, offset, words = DAMAGES[damage]
    flip(newer / name, offset)
    other = Job(None, seed=3)
    with caplog.at_level(logging.WARNING):
        assert other.checkpoint.restore(durable=newer.parent) == 1
    assert f"{newer}/{words}" in caplog.text
    assert f"loading the next older checkpoint, {older}" in caplog.text
    with pytest.raises(CorruptCheckpoint, match="To start from another checkpoint, name the folder that it lies in"):
        Job(None).checkpoint.restore(durable=newer)
    flip(older / name, offset)
    with pytest.raises(CorruptCheckpoint, match="and no older checkpoint of this job is complete"):
        Job(None).checkpoint.restore(durable=newer.parent)


def test_the_agent_is_told_how_far_a_load_is(agent: AgentInThread, folders: tuple[Path, Path]) -> None:
    newer, older = folders
    flip(newer / "__0_0.distcp", 5000)
    agent.call(agent.checkpoint_service._shard_store.drop, lambda _: True, "a test")
    job = Job(agent.connect())
    assert job.checkpoint.restore(durable=newer.parent) == 1
    agent.until(lambda: agent.checkpoint_service.restore_progress().ranks_done == 1)
    told = agent.call(agent.checkpoint_service.restore_progress)
    assert (told.generation, told.folder, told.version.step) == (agent.generation, str(older), 1)
    assert told.loaded_bytes == told.bytes > 5000
    assert "__0_0.distcp is damaged" in told.damage
    job.checkpoint.close()


def test_a_file_that_was_cut_is_damaged(folders: tuple[Path, Path]) -> None:
    newer, _ = folders
    file = newer / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is damaged: it has \d+ bytes, and \d+ were written"):
        Job(None).checkpoint.restore(durable=newer)


def test_a_checkpoint_without_digests_is_loaded_as_it_is(folders: tuple[Path, Path]) -> None:
    """As earlier versions of Muster have written it."""
    newer, _ = folders
    manifest = json.loads((newer / "manifest.json").read_text())
    del manifest["metadata_xxh3_128"], manifest["ranks"]["0"]["blocks_xxh3_128"]
    (newer / "manifest.json").write_text(json.dumps(manifest))
    assert Job(None).checkpoint.restore(durable=newer) == 2
    (newer / "manifest.json").unlink()
    assert Job(None).checkpoint.restore(durable=newer) == 2


def test_small_tensors_are_read_at_once(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.load would ask for each in some twenty parts."""
    parts: list[int] = []
    monkeypatch.setattr(LoadProgress, "add", lambda _, size: parts.append(size))
    newer, _ = folders
    assert Job(None).checkpoint.restore(durable=newer) == 2
    items = [item.length for item in dcp.FileSystemReader(newer).read_metadata().storage_data.values()]
    assert len(parts) <= len(items) + 1, "the structure of the state is read before everything"
    assert max(parts) == max(items)


def test_plain_torch_loads_a_folder_with_digests(folders: tuple[Path, Path]) -> None:
    newer, _ = folders
    job = Job(None)
    state = {"model": job.model.state_dict()}
    dcp.load(state, checkpoint_id=newer)
    other = Job(None, seed=5)
    other.checkpoint.restore(durable=newer)
    assert all(torch.equal(value, other.model.state_dict()[name]) for name, value in state["model"].items())


@pytest.mark.parametrize("fails_at", ["opening", HEAD, ALL])
@pytest.mark.parametrize("error", [CorruptCheckpoint("its bytes"), OSError("its disk")], ids=["damaged", "unreadable"])
def test_what_one_rank_finds_is_known_to_all(monkeypatch: pytest.MonkeyPatch, fails_at: str, error: Exception) -> None:
    """Ranks read the head, and wait for each other then. One that can't read leaves no other one there."""
    store, world = dist.HashStore(), 3
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    together = threading.Barrier(world)
    raised: list[str] = []

    def load(joint: JointLoad, fails: str) -> None:
        def fail_at(place: str) -> None:
            if place == fails:
                raise error

        fail_at("opening")
        joint.read(HEAD, lambda: fail_at(HEAD))
        together.wait(30)
        fail_at(ALL)

    def rank(joint: JointLoad, fails: str) -> None:
        try:
            joint.read(ALL, lambda: load(joint, fails))
        except (CorruptCheckpoint, OSError) as error:
            raised.append(str(error))

    monkeypatch.setattr(agreed_damage, "_loads", iter([7] * world))
    joints = [JointLoad() for _ in range(world)]
    ranks = [
        threading.Thread(target=rank, args=(joint, fails_at if number == 1 else ""))
        for number, joint in enumerate(joints)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert len(raised) == world
    assert all(str(error) in words for words in raised)
