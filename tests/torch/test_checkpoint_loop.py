"""The library's three lines in one process, with a real checkpoint service."""

import gc
import io
import random
import resource
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402

torch.set_num_threads(1)

from muster.checkpoint import Checkpoint, CheckpointError, ShardedSampler  # noqa: E402
from muster.checkpoint.format import layout  # noqa: E402
from muster.checkpoint.format.errors import UntrustedCheckpoint  # noqa: E402
from muster.checkpoint.store.memory import memory_need  # noqa: E402
from muster.checkpoint.testing.agent_in_thread import AgentInThread  # noqa: E402
from muster.checkpoint.testing.gang_in_one_process import reported  # noqa: E402
from muster.checkpoint.training import loop  # noqa: E402
from muster.checkpoint.training.agent_connection import AgentConnection  # noqa: E402
from muster.checkpoint.training.planning import torch_items  # noqa: E402
from muster.checkpoint.training.planning.publication import plan_publication  # noqa: E402
from muster.checkpoint.training.planning.shard_plan import ShardPlan  # noqa: E402
from muster.checkpoint.training.snapshot import SnapshotWriter  # noqa: E402
from muster.checkpoint.training.states.replicas import find_replicas  # noqa: E402
from muster.checkpoint.training.states.training_state import STRUCTURE, StateLeaf, TrainingState  # noqa: E402
from muster.checkpoint.training.wait_budget import WaitBudget  # noqa: E402
from muster.daemon.host.process.cgroup_memory import MemoryLeft  # noqa: E402
from muster.v1 import agent_pb2  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    # Plain torch.distributed.checkpoint says that there is but one process here; so it is. 2.6's warns of itself.
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


class Tied(nn.Module):
    """Tied weights, a buffer, a bf16 part. Parameters are registered in another order than they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 40, bias=False)
        self.norm = nn.BatchNorm1d(16)
        self.embed = nn.Embedding(40, 16)
        self.low = nn.Linear(16, 16).to(torch.bfloat16)
        self.embed.weight = self.head.weight

    def forward(self, tokens: Any) -> Any:
        x = self.norm(self.embed(tokens))
        x = x + self.low(x.to(torch.bfloat16)).float()
        return self.head(nn.functional.dropout(x, 0.1))


class Cursor:
    """A sampler whose state grows."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


class Job:
    def __init__(self, link: AgentConnection | None, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.model = Tied()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.cursor = Cursor()
        self.checkpoint = Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            cursor=self.cursor,
            link=link,
            **options,
        )

    def train(self, n: int) -> None:
        tokens = torch.randint(0, 40, (8,))
        self.cursor.seen += [random.randrange(1000) for _ in range(n * 7)]
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(tokens), tokens).backward()
        self.optimizer.step()
        self.scheduler.step()

    def everything(self) -> bytes:
        file = io.BytesIO()
        states = [s.state_dict() for s in (self.model, self.optimizer, self.scheduler, self.cursor)]
        torch.save([states, torch.get_rng_state(), random.getstate()], file)
        return file.getvalue()


def test_outside_muster_the_lines_do_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MUSTER_AGENT_FD", raising=False)
    job = Job(None)
    assert job.checkpoint.restore(durable=tmp_path) == 0
    job.train(1)
    assert job.checkpoint.step(1) is True


def test_a_restored_run_has_the_same_bits(agent: AgentInThread) -> None:
    straight = Job(None)
    for n in range(1, 13):
        straight.train(n)

    job = Job(agent.connect())
    assert job.checkpoint.restore() == 0
    for n in range(1, 8):
        job.train(n)
        assert job.checkpoint.step(n)
        agent.await_committed(n)
    job.train(8)  # lost with the process
    job.checkpoint.close()

    again = Job(agent.connect(), seed=99)
    assert again.checkpoint.restore() == 7
    for n in range(8, 13):
        again.train(n)
        again.checkpoint.step(n)
        agent.await_committed(n)
    assert again.everything() == straight.everything()
    assert again.model.embed.weight is again.model.head.weight
    again.checkpoint.close()


def test_a_restored_run_writes_to_the_slots_that_are_there(agent: AgentInThread) -> None:
    """Its state is a little larger, and its model another one: what the old slots held must not be seen."""

    def slots() -> list[Any]:
        return [shard.memory for shard in agent.checkpoint_service.slot_shards()]

    first = Job(agent.connect())
    first.checkpoint.restore()
    first.train(1)
    first.checkpoint.step(1)
    agent.await_committed(1)
    (kept,) = slots()
    kept_bytes = bytes(kept.view)

    second = Job(agent.connect(), seed=1)
    assert second.checkpoint.restore() == 1
    second.cursor.seen += [1000] * 50
    for step in (2, 3):
        second.train(step)
        second.checkpoint.step(step)
        agent.await_committed(step)
    assert slots() == [kept], "steps are written to the two slots in turn"
    view = kept.view
    footer = layout.read_footer(view)
    assert bytes(view) != kept_bytes
    end = footer.header_offset + footer.index_bytes + footer.directory_bytes + footer.metadata_bytes
    assert not any(view[end : len(view) - layout.FOOTER_BYTES])


def test_a_slot_that_held_another_state_gets_all_bytes_of_an_empty_one() -> None:
    job = Job(None)
    job.train(1)
    state = TrainingState({"model": job.model, "optimizer": job.optimizer, "cursor": job.cursor}, None)
    captured = state.capture(0, 1)
    publication = plan_publication([*captured.leaves, StateLeaf(tuple(STRUCTURE.split(".")), None)])
    plan = ShardPlan(captured, publication, {}, find_replicas(state, captured.leaves, 1))
    empty, used = memoryview(bytearray(plan.bytes)), memoryview(bytearray(b"?" * plan.bytes))
    for slot in (empty, used):
        writer = SnapshotWriter(plan, [slot])
        writer.write(0, captured)
    assert bytes(used[: plan.objects_offset]) == bytes(empty[: plan.objects_offset])
    assert bytes(used[plan.header_offset :]) == bytes(empty[plan.header_offset :])


def test_a_further_rank_starts_from_the_shared_state_and_from_no_other_ranks_own(
    agent: AgentInThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job grows from one rank to two: both must draw other numbers."""
    job = Job(agent.connect())
    job.checkpoint.restore()
    for n in range(1, 4):
        job.train(n)
        job.checkpoint.step(n)
        agent.await_committed(n)
    job.checkpoint.close()

    monkeypatch.setattr(loop, "rank_and_world_size", lambda: (1, 2))
    further = Job(agent.connect(further_rank=1), seed=99)
    generators = torch.get_rng_state(), random.getstate()
    assert further.checkpoint.restore() == 3
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert further.cursor.seen == []
    assert further.scheduler.state_dict() == job.scheduler.state_dict()
    for mine, theirs in zip(further.model.parameters(), job.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert further.optimizer.state[mine]["step"] == 3
        assert torch.equal(further.optimizer.state[mine]["exp_avg"], job.optimizer.state[theirs]["exp_avg"])
    further.checkpoint.close()


def test_generators_that_a_script_has_made_go_on(agent: AgentInThread) -> None:
    numpy = pytest.importorskip("numpy")

    def made() -> dict[str, Any]:
        return {
            "crops": torch.Generator().manual_seed(1),
            "masks": numpy.random.default_rng(2),
            "old_masks": numpy.random.Generator(numpy.random.MT19937(3)),
            "words": random.Random(4),
        }

    def draw(generators: dict[str, Any]) -> list[float]:
        crops, masks, old_masks, words = generators.values()
        return [float(torch.rand(3, generator=crops).sum()), masks.normal(), old_masks.random(), words.gauss()]

    generators = made()
    checkpoint = Checkpoint(**generators, link=agent.connect())
    checkpoint.restore()
    draw(generators)
    checkpoint.step(1)
    agent.await_committed(1)
    expected = draw(generators)
    checkpoint.close()
    again = made()
    checkpoint = Checkpoint(**again, link=agent.connect())
    assert checkpoint.restore() == 1
    assert draw(again) == expected
    checkpoint.close()


def test_an_optimizers_state_keeps_its_dtype(agent: AgentInThread) -> None:
    job = Job(agent.connect())
    job.checkpoint.restore()
    job.train(1)
    weight = job.model.low.weight
    job.optimizer.state[weight]["exp_avg"] = job.optimizer.state[weight]["exp_avg"].float() + 1e-4
    before = job.optimizer.state[weight]["exp_avg"].clone()
    job.checkpoint.step(1)
    agent.await_committed(1)
    job.checkpoint.close()
    again = Job(agent.connect(), seed=5)
    assert again.checkpoint.restore() == 1
    after = again.optimizer.state[again.model.low.weight]["exp_avg"]
    assert after.dtype == torch.float32
    assert torch.equal(before, after)
    again.checkpoint.close()


def test_tied_weights_are_kept_once_and_published_under_both_names(agent: AgentInThread, tmp_path: Path) -> None:
    job = Job(agent.connect())
    job.checkpoint.restore()
    job.train(1)
    job.checkpoint.step(1, final=True)
    agent.await_committed(1)
    folder = agent.flush(1, tmp_path)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    where = {i.fqn: (s.relative_path, s.offset, s.length) for i, s in metadata.storage_data.items()}
    assert where["model.embed.weight"] == where["model.head.weight"]
    job.checkpoint.close()


def test_a_flush_loads_with_plain_torch(agent: AgentInThread, tmp_path: Path) -> None:
    job = Job(agent.connect())
    job.checkpoint.restore()
    for n in (1, 2, 3):
        job.train(n)
        job.checkpoint.step(n, final=n == 3)
        agent.await_committed(n)
    folder = agent.flush(3, tmp_path)
    other = Job(None, seed=4)
    other.train(1)  # the optimizer's state must be there to be loaded into
    state = {
        "model": other.model.state_dict(),
        "optimizer": other.optimizer.state_dict(),
        "muster": {"step": 0},
        "ranks": {"0": {"cursor": None}},
    }
    dcp.load(state, checkpoint_id=folder)
    other.optimizer.load_state_dict(state["optimizer"])
    for key, value in job.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[key]), key
    mine, theirs = job.optimizer.state_dict(), other.optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for number, entry in mine["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, theirs["state"][number][key]), (number, key)
    assert state["muster"]["step"] == 3
    assert state["ranks"]["0"]["cursor"] == job.cursor.state_dict()
    job.checkpoint.close()


def test_a_run_resumes_from_a_durable_folder(agent: AgentInThread, tmp_path: Path) -> None:
    job = Job(agent.connect())
    job.checkpoint.restore()
    for n in range(1, 5):
        job.train(n)
        job.checkpoint.step(n)
        agent.await_committed(n)
    agent.flush(4, tmp_path)
    job.checkpoint.close()
    for path in (tmp_path, tmp_path / "step_00000004_g1_g", tmp_path / "step_00000003_g1_g"):
        other = Job(None, seed=3)
        assert other.checkpoint.restore(durable=path) == 4
        assert other.everything() == job.everything()
    # A newer version than the folder holds, another gang's, and one without a gang.
    for name in ("step_00000005_g1_g", "step_00000003_g1_other", "step_00000003_g1"):
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            Job(None).checkpoint.restore(durable=tmp_path / name)


def test_a_run_that_goes_back_skips_batches(agent: AgentInThread, tmp_path: Path) -> None:
    """It starts from the older checkpoint that is named, though a newer one and memory are there."""

    def begin(plan: agent_pb2.RestorePlan | None = None) -> tuple[Checkpoint, ShardedSampler, int]:
        sampler = ShardedSampler(1000, batch_size=2, seed=5, rank=0, num_replicas=1)
        checkpoint = Checkpoint(model=nn.Linear(2, 2), sampler=sampler, link=agent.connect(plan=plan))
        return checkpoint, sampler, checkpoint.restore()

    checkpoint, sampler, _ = begin()
    straight = list(sampler)
    for n in range(1, 9):
        checkpoint.step(n)
        agent.await_committed(n)
        if n in (4, 8):
            agent.flush(n, tmp_path)
    checkpoint.close()
    plan = agent_pb2.RestorePlan(durable_path=str(tmp_path / "step_00000004_g1_g"), skip_to_step=20)
    checkpoint, sampler, begun = begin(plan)
    assert (begun, sampler.position) == (4, 2 * 20)
    batches = iter(sampler)
    assert next(batches) == straight[20]
    assert checkpoint.step(5)
    assert next(batches) == straight[21]
    agent.await_committed(5)
    checkpoint.close()
    checkpoint, sampler, begun = begin()
    assert (begun, sampler.position) == (5, 2 * 21), "what was skipped stays skipped"
    checkpoint.close()
    plan.durable_path = str(tmp_path / "step_00000003_g1_g")
    with pytest.raises(CheckpointError, match="to which the job goes back, is no complete checkpoint any more"):
        begin(plan)


def test_a_run_resumes_from_a_store_of_objects_that_it_trusts(agent: AgentInThread) -> None:
    pytest.importorskip("fsspec")
    where = "memory://bucket/jobs"
    job = Job(agent.connect())
    job.checkpoint.restore()
    for n in range(1, 3):
        job.train(n)
        job.checkpoint.step(n)
        agent.await_committed(n)
    agent.flush(2, where)
    job.checkpoint.close()
    with pytest.raises(UntrustedCheckpoint, match="does not say who has written it"):
        Job(None, seed=3).checkpoint.restore(durable=where)
    for place in (where, f"{where}/step_00000002_g1_g.flush1", f"{where}/step_00000001_g1_g.flush1"):
        other = Job(None, seed=3)
        assert other.checkpoint.restore(durable=place, trust_durable_store=True) == 2
        assert other.everything() == job.everything()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        Job(None).checkpoint.restore(durable=f"{where}/step_00000005_g1_g.flush1", trust_durable_store=True)


def test_a_durable_folder_of_plain_torch_is_loaded_too(tmp_path: Path) -> None:
    job = Job(None)
    job.train(1)
    state = {s: getattr(job, s).state_dict() for s in ("model", "optimizer", "scheduler")}
    dcp.save(state, checkpoint_id=tmp_path / "step_00000001_g0")
    other = Job(None, seed=8)
    assert other.checkpoint.restore(durable=tmp_path) == 1
    for name in ("model", "optimizer", "scheduler"):
        file, file2 = io.BytesIO(), io.BytesIO()
        torch.save(getattr(other, name).state_dict(), file)
        torch.save(getattr(job, name).state_dict(), file2)
        assert file.getvalue() == file2.getvalue(), name


@pytest.mark.parametrize("writable", ["", ".metadata", "__0_0.distcp"])
def test_a_durable_folder_that_others_can_write_is_not_unpickled(tmp_path: Path, writable: str) -> None:
    job = Job(None)
    job.train(1)
    folder = tmp_path / "step_00000001_g0"
    dcp.save({s: getattr(job, s).state_dict() for s in ("model", "optimizer", "scheduler")}, checkpoint_id=folder)
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)
    changed = folder / writable
    changed.chmod(changed.stat().st_mode | 0o020)
    other = Job(None, seed=8)
    with pytest.raises(UntrustedCheckpoint, match="others can write to"):
        other.checkpoint.restore(durable=tmp_path)
    changed.chmod(changed.stat().st_mode & ~0o020)
    assert other.checkpoint.restore(durable=tmp_path) == 1


def test_an_incomplete_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step_00000001_g1").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        Job(None).checkpoint.restore(durable=tmp_path / "step_00000001_g1")
    assert Job(None).checkpoint.restore(durable=tmp_path) == 0


@pytest.mark.parametrize("wait_share", [0.0, 0.05])
def test_a_step_without_a_free_slot_is_skipped_once_the_wait_budget_is_used_up(
    agent: AgentInThread, wait_share: float
) -> None:
    job = Job(agent.connect(), wait_share=wait_share)
    job.checkpoint.restore()
    job.train(1)
    job.checkpoint.step(1)
    agent.await_committed(1)
    # The agent is blocked: steps go on, and at most one more is kept.
    gate = threading.Event()
    agent.loop.call_soon_threadsafe(gate.wait)
    for n in range(2, 6):
        job.train(n)
        assert job.checkpoint.step(n)
    gate.set()
    agent.await_committed(2)
    job.train(6)
    job.checkpoint.step(6, final=True)
    agent.await_committed(6)
    job.checkpoint.close()


def test_a_rank_that_got_no_slots_asks_for_them_again(agent: AgentInThread, monkeypatch: pytest.MonkeyPatch) -> None:
    left = memory_need.left_to_this_process
    monkeypatch.setattr(memory_need, "left_to_this_process", lambda: MemoryLeft(0, "its limit"))
    job = Job(agent.connect())
    job.checkpoint.restore()
    for n in (1, 2):
        job.train(n)
        job.checkpoint.step(n)
    assert "0 MiB are left to this job" in agent.checkpoint_service.no_slots
    monkeypatch.setattr(memory_need, "left_to_this_process", left)
    job.checkpoint.step(3)
    assert agent.checkpoint_service.no_slots, "a minute has not passed"
    job.checkpoint._keeper.ask_again_s = 0.0
    job.train(4)
    job.checkpoint.step(4)
    agent.await_committed(4)
    assert agent.checkpoint_service.no_slots == ""
    job.checkpoint.close()


def test_a_snapshot_of_many_tensors_calls_no_garbage_collector(agent: AgentInThread) -> None:
    model = nn.ParameterList(torch.zeros(1) for _ in range(4000))
    checkpoint = Checkpoint(model=model, link=agent.connect())
    checkpoint.restore()
    checkpoint.step(1)
    agent.await_committed(1)
    before = gc.get_stats()[0]["collections"]
    checkpoint.step(2)
    agent.await_committed(2)
    collections = gc.get_stats()[0]["collections"] - before
    assert collections < 10, "each tensor makes objects, and some hundred of them call the collector"
    checkpoint.close()


def test_a_step_that_is_due_during_a_commit_waits_for_it(agent: AgentInThread) -> None:
    job = Job(agent.connect())
    job.checkpoint._keeper._wait_budget = WaitBudget(1.0, max_s=20.0)  # however slow the machine is
    job.checkpoint.restore()
    for n in range(1, 40):
        job.train(n)
        job.checkpoint.step(n)
        assert agent.checkpoint_service.committed().step >= n - 1
    agent.await_committed(39)
    job.checkpoint.close()


@pytest.mark.parametrize(
    "bad", [{"every": 0}, {"every": "often"}, {"wait_share": -0.1}, {"wait_share": 5}, {"wait_share": float("nan")}]
)
def test_invalid_numbers_are_refused_by_name(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(CheckpointError, match=f"^{name}="):
        Checkpoint(model=nn.Linear(1, 1), **bad)


@pytest.mark.parametrize("n", [0, 2, 3])
def test_steps_are_counted_upwards(agent: AgentInThread, n: int) -> None:
    job = Job(agent.connect())
    job.checkpoint.restore()
    job.train(3)
    job.checkpoint.step(3)
    with pytest.raises(CheckpointError, match=rf"step\({n}\): 3 steps are finished already"):
        job.checkpoint.step(n)
    job.checkpoint.step(4, final=True)
    agent.await_committed(4)
    job.checkpoint.close()


def test_a_run_that_forgets_to_restore_does_not_replace_the_kept_state(agent: AgentInThread) -> None:
    job = Job(agent.connect())
    with pytest.raises(CheckpointError, match=r"call restore\(\) before the first step"):
        job.checkpoint.step(1)
    job.checkpoint.close()


def test_only_every_nth_step_is_kept(agent: AgentInThread) -> None:
    job = Job(agent.connect(), every=3)
    job.checkpoint.restore()
    for n in range(1, 8):
        job.train(n)
        job.checkpoint.step(n)
        if n % 3 == 0:
            agent.await_committed(n)
    assert agent.checkpoint_service.committed().step == 6
    agent.until(lambda: agent.checkpoint_service.progress() == {0: 7})
    job.checkpoint.close()


def test_with_auto_a_rank_alone_follows_its_agent(agent: AgentInThread) -> None:
    job = Job(agent.connect(), every="auto")
    job.checkpoint.restore()
    for n in range(1, 9):
        job.train(n)
        job.checkpoint.step(n)
        agent.await_committed(n)
    cost = agent.call(agent.checkpoint_service.snapshot_cost)
    assert (cost.every, cost.auto_interval) == (1, True)
    for n in range(9, 40):
        job.train(n)
        job.checkpoint.step(n)
    kept = agent.checkpoint_service.committed().step
    assert kept < 39, "a snapshot costs far more than a thousandth of such steps"
    job.train(40)
    job.checkpoint.step(40, final=True)
    agent.await_committed(40)
    assert agent.call(agent.checkpoint_service.snapshot_cost).every > 1
    job.checkpoint.close()


def test_a_planned_stop_keeps_the_last_step(agent: AgentInThread) -> None:
    job = Job(agent.connect(), every=100)
    job.checkpoint.restore()
    job.train(1)
    assert job.checkpoint.step(1)
    agent.call(agent.checkpoint_service.stop_ranks, "maintenance")
    job.train(2)
    assert not job.checkpoint.step(2)
    agent.await_committed(2)
    job.checkpoint.close()


def test_phases_are_declared_nested_and_end_with_the_block_or_an_exception(agent: AgentInThread) -> None:
    job = Job(agent.connect())
    job.checkpoint.restore()

    def fail_while_saving() -> None:
        with job.checkpoint.phase("saving"):
            agent.until(lambda: reported(agent.checkpoint_service, 0).declared_phase == "saving")
            raise ValueError("no")

    with job.checkpoint.phase("evaluation"):
        agent.until(lambda: reported(agent.checkpoint_service, 0).declared_phase == "evaluation")
        with pytest.raises(ValueError, match="no"):
            fail_while_saving()
        agent.until(lambda: reported(agent.checkpoint_service, 0).declared_phase == "evaluation")
    agent.until(lambda: reported(agent.checkpoint_service, 0).declared_phase == "")
    with pytest.raises(CheckpointError, match="a phase needs a name"), job.checkpoint.phase(" "):
        pass
    job.train(1)
    job.checkpoint.step(1, final=True)
    agent.until(lambda: reported(agent.checkpoint_service, 0).declared_phase == "after the last step")
    with job.checkpoint.phase("saving"):
        agent.until(lambda: reported(agent.checkpoint_service, 0).declared_phase == "saving")
    agent.until(lambda: reported(agent.checkpoint_service, 0).declared_phase == "after the last step")
    job.checkpoint.close()
    Job(agent.connect()).checkpoint.restore()
    agent.until(lambda: reported(agent.checkpoint_service, 0).declared_phase == "")


def test_a_rank_that_waits_for_its_state_declares_it(agent: AgentInThread) -> None:
    job = Job(agent.connect())
    job.checkpoint.restore()
    agent.until(lambda: agent.declared == ["restoring its state", ""])
    job.checkpoint.close()


def test_outside_muster_a_phase_does_nothing() -> None:
    checkpoint = Checkpoint(cursor=Cursor())
    with checkpoint.phase("evaluation"):
        assert checkpoint.step(1)


def test_an_agent_that_dies_does_not_end_the_training(agent: AgentInThread) -> None:
    job = Job(agent.connect())
    job.checkpoint.restore()
    job.train(1)
    job.checkpoint.step(1)
    agent.call(agent.checkpoint_service.fence, 1)
    for n in (2, 3):
        job.train(n)
        assert job.checkpoint.step(n)
    job.checkpoint.close()


def test_objects_without_state_are_named() -> None:
    with pytest.raises(CheckpointError, match="sampler is a object without state_dict"):
        Checkpoint(sampler=object())
    with pytest.raises(CheckpointError, match="'muster' can't name a state"):
        Checkpoint(muster=Cursor())


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn],
)
@pytest.mark.parametrize("shape", [(), (1,), (7, 5), (0, 3)])
def test_an_item_is_what_torch_load_reads(dtype: Any, shape: tuple[int, ...]) -> None:
    raw = torch.randint(0, 2, (*shape, torch.empty((), dtype=dtype).element_size()), dtype=torch.uint8)
    value = raw.view(dtype).view(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
    template = torch_items.tensor_template(dtype, shape)
    item = bytearray(template.item_bytes)
    for start, fixed in template.fixed:
        item[start : start + len(fixed)] = fixed
    ((start, length),) = template.data
    item[start : start + length] = bytes(raw.flatten().tolist())
    loaded = torch.load(io.BytesIO(item), weights_only=True)
    assert loaded.dtype == dtype
    assert loaded.shape == value.shape
    assert loaded.view(torch.uint8).tolist() == value.view(torch.uint8).tolist() if shape else True
    assert start % layout.ITEM_ALIGNMENT_BYTES == 0 or not length


def peak_kib() -> int:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_the_template_of_a_large_tensor_takes_no_memory() -> None:
    """The first snapshot must not need the memory of a second model. Deterministic algorithms fill what is empty."""
    mib = peak_kib() // 1024 + 512  # whatever an earlier test has needed, the tensor would show
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        before = peak_kib()
        template = torch_items.tensor_template(torch.float32, (mib, 1 << 18))
        assert peak_kib() - before < 64 << 10
    finally:
        torch.use_deterministic_algorithms(deterministic)
    ((start, length),) = template.data
    assert length == mib << 20
    assert all(offset + len(part) <= start or offset >= start + length for offset, part in template.fixed)


def test_what_was_written_at_length_must_be_data_of_a_tensor() -> None:
    with torch_items._HollowFile() as file:
        assert file.write(b"x" * 5) == 5
        assert file.write(b"y" * (2 << 20)) == 2 << 20
        assert file.write(b"z") == 1
        written = file.written()
    assert file.holes == [(5 + 4096, 5 + (2 << 20))]
    assert len(written) == 6 + (2 << 20)
    assert (written[:6], written[4100:4103], written[-1:]) == (b"xxxxxy", b"y\0\0", b"z")
