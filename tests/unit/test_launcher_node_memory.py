"""What memory checkpoints need of a node, told and refused with numbers before a job is queued."""

import pytest

from muster.fabric.sources.slurm_topology import Kind, SlurmTopology
from muster.launcher.allocation.site_domains import NOTHING_SAID
from muster.launcher.errors import WrongInput
from muster.launcher.output.screen import Screen
from muster.launcher.plan.as_json import to_dict
from muster.launcher.plan.assumptions import PlanOptions
from muster.launcher.plan.foresight import foresee
from muster.launcher.plan.hardware import load_table
from muster.launcher.plan.node_memory import asked_bytes, needed_memory, why_too_little
from muster.launcher.plan.prepare import prepare
from muster.launcher.plan.screen import lines
from muster.launcher.spec import spec
from muster.launcher.submission.job_message import job_message
from muster.launcher.submission.memory_check import check_memory
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.slurm.client.types import Node

GIB = 1 << 30
TOP = 'name = "gpt"\nnodes = 4\ngpus_per_node = 8\ncommand = "train"\nrun_dir = "/run"\n'
MODEL = "[model]\nparameters = 7e9\nlayers = 32\nhidden_size = 4096\n"


def job(text: str = "", model: str = MODEL, top: str = TOP) -> spec.Job:
    return spec.parse(top + model + text, "job.toml")


def node(name: str, gib: int) -> Node:
    return Node(name=name, states=frozenset(), memory_mib=gib << 10)


def test_replicas_need_two_slots_a_rank_and_no_copies() -> None:
    """7 G parameters in bf16 with Adam: 2 + 12 bytes each in a snapshot (no gradients), 8 ranks, 2 slots."""
    needed = needed_memory(job())
    assert needed is not None
    assert needed.slots == 2 * 8 * 7e9 * 14
    assert (needed.named["copies"], needed.offloaded) == (0.0, 0.0)


def test_sharded_state_is_small_but_differs_from_node_to_node() -> None:
    needed = needed_memory(job('[parallelism]\nsharding = "parameters"\n'))
    assert needed is not None
    assert needed.slots == pytest.approx(2 * 8 * 7e9 * 14 / 32)
    assert needed.named["copies"] == needed.slots
    optimizer = needed_memory(job('[parallelism]\nsharding = "optimizer"\n'))
    assert optimizer is not None
    assert optimizer.slots == pytest.approx(2 * 8 * 7e9 * (2 + 12 / 32))
    assert optimizer.named["copies"] == pytest.approx(2 * 8 * 7e9 * 12 / 32)


def test_a_parity_takes_a_part_of_what_copies_take() -> None:
    sharded = '[parallelism]\nsharding = "parameters"\n[checkpoint]\nparity = '
    needed = needed_memory(job(sharded + "4"))
    assert needed is not None
    assert (needed.named["copies"], needed.named["parity"]) == (0.0, pytest.approx(needed.slots / 3))
    assert needed.total == needed.slots + needed.named["parity"]
    assert "parity of its group" in needed.words
    smaller = needed_memory(job(sharded + "3"))  # two groups of 2 nodes
    assert smaller is not None
    assert smaller.named["parity"] == pytest.approx(smaller.slots)


def test_stages_of_a_pipeline_differ_from_node_to_node() -> None:
    needed = needed_memory(job("[parallelism]\npipeline = 4\n"))
    assert needed is not None
    assert needed.named["copies"] == needed.slots == pytest.approx(2 * 8 * 7e9 * 14 / 4)


def test_uploads_to_a_store_of_objects_need_memory() -> None:
    trusted = "[checkpoint]\ntrust_durable_store = true\n"
    needed = needed_memory(job(trusted, top=TOP + 'durable_dir = "s3://bucket/jobs"\n'))
    plain = needed_memory(job())
    assert needed is not None
    assert plain is not None
    assert needed.total == plain.total + 384 * (1 << 20)
    assert "uploads of durable checkpoints 0.4 GB" in needed.words


def test_offloaded_state_is_there_besides() -> None:
    needed = needed_memory(job(model=MODEL + 'offload = "optimizer"\n'))
    assert needed is not None
    assert needed.offloaded == 8 * 7e9 * 12
    assert needed.slots == 2 * 8 * 7e9 * 14
    without = needed_memory(job("[checkpoint]\nmemory = false\n", model=MODEL + 'offload = "optimizer"\n'))
    assert without is not None
    assert (without.slots, without.named["copies"]) == (0.0, 0.0)
    assert without.offloaded == needed.offloaded


def test_without_a_model_nothing_is_known() -> None:
    assert needed_memory(job(model="")) is None
    assert why_too_little(job(model=""), [node("n0", 1)]) == ""


def test_what_mem_asks_for() -> None:
    assert [asked_bytes(mem) for mem in ("0", "512", "100G", "2T", "64gb", "lots")] == [
        None, 512 << 20, 100 * GIB, 2048 * GIB, 64 * GIB, None,
    ]  # fmt: skip


def test_nodes_with_too_little_memory_are_named_with_numbers() -> None:
    """1,568 GB are needed."""
    large, small = node("n0", 2048), node("n1", 1024)
    assert why_too_little(job(), [large] * 4) == ""
    assert why_too_little(job(), [large] * 3 + [small]) == (
        "3 of 4 nodes in service have the memory (the largest has 2,199.0 GB), and the job needs 4: memory checkpoints "
        "need 1,568.0 GB of each node's memory: slots 1,568.0 GB"
    )
    assert why_too_little(job(), [node("n0", 0)]) == "", "slurm.conf says nothing of their memory"
    assert why_too_little(job(), None) == ""


async def test_a_job_that_asks_for_too_little_is_refused_before_it_is_queued() -> None:
    slurm = FakeSlurm(FakeCluster(["n0"], now=lambda: 0.0))
    with pytest.raises(WrongInput, match=r"slurm.mem = '100G' is 107.4 GB, and memory checkpoints need 1,568.0 GB"):
        await check_memory(job('[slurm]\nmem = "100G"\n'), slurm)
    await check_memory(job('[slurm]\nmem = "2T"\n'), slurm)
    await check_memory(job(), slurm)


def test_a_plan_shows_it_on_the_screen_and_as_json() -> None:
    prepared = prepare(job(), PlanOptions(), load_table(), None, "no Slurm here")
    shown = "memory checkpoints: 1,568.0 GB of each node's memory: slots 1,568.0 GB"
    assert any(shown in line for line in lines(prepared, Screen(200)))
    assert to_dict(prepared)["node_memory_bytes"] == {
        "slots": 1_568e9, "copies": 0.0, "offloaded": 0.0, "parity": 0.0, "uploads": 0.0, "total": 1_568e9,
    }  # fmt: skip


def test_a_plan_foresees_the_refusal() -> None:
    flat = SlurmTopology(Kind.FLAT)
    found = list(foresee(job(), flat, NOTHING_SAID, [node("n0", 64)], {"main"}))
    assert found[-1].startswith("muster submit refuses this job: 0 of 1 nodes in service have the memory")


def test_without_memory_checkpoints_agents_compare_no_memory() -> None:
    """Their words on it would advise what is set."""
    offloads = 'offload = "optimizer"\n[parallelism]\nsharding = "parameters"\n[checkpoint]\nmemory = '
    with_memory, without = (job_message(job(offloads + on), ()).memory_bytes for on in ("true", "false"))
    assert with_memory > 0
    assert without == 0
