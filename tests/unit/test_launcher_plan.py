"""`muster plan`: what a job will cost, on one screen and as JSON, without a coordinator and without Slurm."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from muster.fabric.cost.hierarchy import TREE_SHARE
from muster.fabric.estimate.chip import HOST_LINK, USUAL_EFFICIENCY
from muster.fabric.estimate.estimate import estimate
from muster.fabric.estimate.failures import COPY_BANDWIDTH, HOUR, NODE_MTBF, REPAIR, RESTART, WAIT_WITHOUT_SPARE
from muster.fabric.estimate.memory import RESERVED
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.fabric.model.node import Node
from muster.fabric.placement.weights import usual_weights
from muster.fabric.sources.node_reports import NodeReport
from muster.fabric.sources.tiers import Tiers
from muster.fabric.testing.generators import fat_tree, torus
from muster.launcher.errors import SiteFault, Unavailable, WrongInput
from muster.launcher.main import main
from muster.launcher.output.screen import Screen
from muster.launcher.plan.as_json import to_dict
from muster.launcher.plan.assumptions import PlanOptions
from muster.launcher.plan.hardware import load_table
from muster.launcher.plan.model_of_job import weights_of
from muster.launcher.plan.places import LEAF_NODES, asked_level, packed_seats, usual_fabric, with_gpu_links
from muster.launcher.plan.prepare import PreparedPlan, SlurmFabric, prepare
from muster.launcher.plan.screen import lines
from muster.launcher.plan.show import slurm_fabric
from muster.launcher.spec import spec
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.wording import duration, percent, scaled

GPT = """
name = "gpt"
nodes = 128
spares = 4
gpus_per_node = 8
command = "python3 train.py"
run_dir = "/shared/run"
[parallelism]
tensor = 8
pipeline = 8
micro_batches = 96
[model]
parameters = 175e9
layers = 96
hidden_size = 12288
heads = 96
vocabulary = 51200
sequence_length = 2048
global_batch = 1536
tokens = 300e9
activation_checkpointing = "full"
"""
ROOT = Path(__file__).resolve().parents[2]
TABLE = load_table(Path("/nonexistent"))
NOTHING = PlanOptions()


def _prepared(text: str = GPT, options: PlanOptions = NOTHING, slurm: SlurmFabric | None = None) -> PreparedPlan:
    return prepare(spec.parse(text, "job.toml"), options, TABLE, slurm, "--no-slurm")


def _without(*keys: str) -> str:
    return "".join(line for line in GPT.splitlines(keepends=True) if line.partition(" =")[0] not in keys)


def _json(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["plan", str(path), "--no-slurm", "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def job_toml(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(GPT)
    return path


def test_one_screen_has_it_all(job_toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(job_toml), "--no-slurm", "--accelerator", "a100-sxm-80", "--price", "1.5"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 40
    for words in (
        "gpt: 1,024 A100-SXM-80GB on 128 nodes and 4 spares; an estimate, nothing is queued",
        "network\ta usual one, not Slurm's (--no-slurm)",
        "48.9 GB of 85.0 GB a GPU, 6.0 % kept free: fits",
        "smallest number of GPUs: 64 with this tensor, context and pipeline split",
        "bubble 6.8 % of a step (plain, 8 stages, 96 micro-batches); interleaved with 2 virtual stages: 3.5 %",
        "stages balance: 12 layers each",
        "misplaced\tcosts most with each rank of a tensor group on another node",
        "300 G tokens take",
        "at 1.5 for each",
    ):
        assert words in shown
    assert re.search(r"tensor\t8\tin a node\tall-reduce\t6,912\t50.3 MB\tring", shown)
    assert re.search(r"MTBF of a node\t6,300 h with 8 GPUs\tLlama 3's training in 2024\t--node-mtbf HOURS", shown)


def test_a_network_that_no_gradients_cross_is_shown_with_its_bisection(
    job_toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(job_toml), "--no-slurm", "--accelerator", "a100-sxm-80"]) == 0
    assert "no gradients and experts cross the bisection of 12.8 TB/s" in capsys.readouterr().out


def test_json_has_the_numbers_of_the_screen_in_si_units(job_toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(job_toml, capsys)
    parts = ("compute_s", "exposed_s", "bubble_s", "update_s")
    assert found["step_s"] == pytest.approx(sum(found[part] for part in parts))
    assert found["gpus"] == 1024
    assert found["bubble_share"] == pytest.approx(7 / 103)
    memory = found["memory_bytes"]
    state = sum(memory[part] for part in ("parameters", "gradients", "optimizer"))
    assert state == pytest.approx(16 * 175e9 / 64)
    assert memory["total"] == pytest.approx(state + memory["activations"] + memory["working"])
    assert found["tokens_a_day"] * found["days"] == pytest.approx(300e9)
    assert found["worst_misplacement"]["group"] == "tensor"
    assert {row["group"]: row["level"] for row in found["traffic"]} == {
        "tensor": "node", "pipeline": "any", "data": "leaf"
    }  # fmt: skip
    assert found["cost"] is None


def test_keys_of_job_toml_can_be_tried_on_the_command_line(job_toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = _json(job_toml, capsys)
    interleaved = _json(job_toml, capsys, "--parallelism.virtual-stages", "4")
    assert interleaved["bubble_share"] == pytest.approx(7 / (4 * 96 + 7))
    assert interleaved["bubble_s"] < plain["bubble_s"]


def test_what_job_toml_says_is_no_default(job_toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    less = _json(job_toml, capsys, "--accelerator", "H100-SXM", "--efficiency", "0.5", "--node-mtbf", "1000")
    named = {one["name"] for one in less["defaults"]}
    assert not named & {"accelerator", "matrix products", "MTBF of a node", "shape", "sequence length", "micro-batches"}
    assert {"accelerator", "matrix products", "MTBF of a node"} <= {one.name for one in _prepared().defaults}
    assert all(one.value and one.source and one.instead for one in _prepared().defaults)
    assert less["failures"]["mtbf_s"] == pytest.approx(1000 * 3600 / 128)


def test_job_toml_says_how_often_nodes_fail_unless_the_command_line_does(
    job_toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = ("--checkpoint.node-mtbf-hours", "500")
    of_job = _json(job_toml, capsys, *key)
    assert of_job["failures"]["mtbf_s"] == pytest.approx(500 * 3600 / 128)
    assert "MTBF of a node" not in {one["name"] for one in of_job["defaults"]}
    assert _json(job_toml, capsys, *key, "--node-mtbf", "1000")["failures"]["mtbf_s"] == pytest.approx(
        1000 * 3600 / 128
    )


def test_a_shape_that_is_not_given_is_a_default() -> None:
    prepared = _prepared(_without("layers", "hidden_size", "heads"))
    model = prepared.plan.model
    assert 12 * model.layers * model.hidden_size**2 == pytest.approx(175e9, rel=0.05)
    assert "shape" in {one.name for one in prepared.defaults}
    counted = _prepared(_without("parameters"))
    assert counted.plan.model.parameters == 12 * 96 * 12_288**2 + 51_200 * 12_288
    assert "parameters" in {one.name for one in counted.defaults}


def test_experts_are_what_a_token_does_not_meet() -> None:
    """2 of 8 experts: 47 G parameters of which 13 G are active are 45.3 G of experts."""
    text = GPT.replace("tensor = 8\npipeline = 8\nmicro_batches = 96", "expert = 8\nsharding = 'optimizer'")
    text = text.replace(
        "parameters = 175e9", "parameters = 47e9\nactive_parameters = 13e9\nexperts = 8\nexperts_per_token = 2"
    )
    prepared = _prepared(text.replace("1536", "2048"))
    assert prepared.plan.model.expert_parameters == pytest.approx(34e9 / 0.75)
    assert prepared.plan.model.active_parameters == pytest.approx(13e9)
    assert {one.traffic.group.value for one in prepared.estimate.step.traffic} == {"expert", "data", "expert data"}


def test_the_accelerator_of_the_gres_is_taken() -> None:
    text = GPT.replace("gpus_per_node = 8", "ranks_per_node = 8") + '[slurm]\ngres = "gpu:h200:8"\n'
    assert _prepared(text).accelerator == "H200-SXM"
    assert _prepared(text, PlanOptions(accelerator="MI300X")).accelerator == "MI300X"
    assert _prepared(text.replace("h200", "voodoo")).accelerator == "H100-SXM"
    fabric = fat_tree(16, 16)
    nodes = SlurmFabric(fabric, fabric.nodes, speeds_known=True, gpu="mi300x")
    assert _prepared(GPT, slurm=nodes).accelerator == "MI300X"
    assert _prepared(text, slurm=nodes).accelerator == "H200-SXM"
    several = _prepared(text.replace("h200", "a100"))
    assert several.accelerator == "A100-SXM-80GB"
    assert "GRES a100 fits A100-SXM-40GB too" in {one.source for one in several.defaults}


def test_a_measured_step_calibrates_the_estimate() -> None:
    measured = 1.25 * _prepared().estimate.step.total
    prepared = _prepared(options=PlanOptions(measured_step=measured))
    assert prepared.estimate.step.total == pytest.approx(measured)
    assert prepared.plan.chip.efficiency < 0.55
    assert any("calibrated with the measured step" in line for line in lines(prepared, Screen(200)))
    assert "matrix products" not in {one.name for one in prepared.defaults}


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (_without("parameters", "layers"), NOTHING, "the size of the model is not known: give model.parameters"),
        (_without("micro_batches").replace("1536", "1537"), NOTHING, "parallelism.data = 16 must divide model.global"),
        (GPT, PlanOptions(accelerator="TPU"), "the accelerator 'TPU' is not known"),
        (GPT, PlanOptions(efficiency=1.5), "an efficiency of 1.5"),
        (GPT, PlanOptions(measured_step=1e-3), "--measured-step: a step of 0.001 s can't be"),
        (GPT + 'precision = "fp8"\n', PlanOptions(accelerator="A100-SXM-80GB"), "no peak for precision 'fp8' is known"),
        (_without("parameters") + "active_parameters = 1e15\nexperts = 8\n", NOTHING, "is more than the 1.74575e+11"),
        (GPT + "key_value_heads = 192\n", NOTHING, "key_value_heads = 192 must be at most heads = 96"),
    ],
)  # fmt: skip
def test_what_cannot_be_estimated_gets_one_clear_error(text: str, options: PlanOptions, words: str) -> None:
    with pytest.raises(WrongInput, match=re.escape(words)):
        _prepared(text, options)


def test_a_job_without_a_model_gets_places_and_no_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(GPT[: GPT.index("[model]")])
    assert main(["plan", str(path), "--no-slurm"]) == 0
    screen = capsys.readouterr().out
    assert "gpt: 1,024 ranks on 128 nodes and 4 spares; nothing is queued" in screen
    assert re.search(r"tensor group\t8 ranks in a node", screen)
    assert "no price\tjob.toml does not say how large the model is: give model.parameters" in screen
    assert not re.search(r"[0-9] s a step|MFU|H100", screen)
    found = _json(path, capsys, "--no-slurm")
    assert found["groups"]["tensor"] == "node"
    assert "step_s" not in found
    assert main(["plan", str(path), "--no-slurm", "--price", "4"]) == WrongInput.status
    assert "the size of the model is not known" in capsys.readouterr().err


def test_a_wrong_option_is_named(job_toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(job_toml), "--price", "-1"])
    assert ended.value.code == WrongInput.status
    assert "argument --price: '-1' must be a number above 0" in capsys.readouterr().err


def test_a_model_that_does_not_fit_gets_a_split_that_does() -> None:
    text = GPT.replace("tensor = 8", "tensor = 1").replace("pipeline = 8\nmicro_batches = 96", "pipeline = 8")
    text = text.replace("1536", "12288")
    prepared = _prepared(text)
    shown = "\n".join(lines(prepared, Screen(200)))
    assert "DOES NOT FIT" in shown
    assert "no number of GPUs holds it with this tensor, context and pipeline split; 36 for the state alone" in shown
    split = prepared.estimate.fitting_split
    assert split
    assert f"it fits with tensor = {split.tensor}, pipeline = {split.pipeline} and data = {split.data}" in shown
    fitting = text.replace("tensor = 1\npipeline = 8", f"tensor = {split.tensor}\npipeline = {split.pipeline}")
    assert _prepared(fitting).estimate.fits
    smaller = max(1, split.tensor * split.pipeline // 2)
    assert not _prepared(text.replace("pipeline = 8", f"pipeline = {smaller}")).estimate.fits


def test_a_model_that_no_split_holds_gets_other_advice() -> None:
    text = GPT.replace("nodes = 128", "nodes = 8").replace("= 96\n[", "= 1536\n[").replace("175e9", "900e9")
    assert 'try parallelism.sharding = "parameters"' in "\n".join(lines(_prepared(text), Screen(200)))
    sharded = text.replace("[model]", "sharding = 'parameters'\n[model]")
    assert "try model.offload, or more nodes" in "\n".join(lines(_prepared(sharded), Screen(200)))
    long = GPT.replace('"full"', '"none"').replace("= 2048", "= 1048576")
    assert 'try activation_checkpointing = "full", or more context ranks' in "\n".join(
        lines(_prepared(long), Screen(200))
    )


def test_a_site_has_entries_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "accelerators.toml"
    file.write_text(
        "[OURS]\nflops = { bf16 = 1e15 }\nmemory = 1e11\nmemory_bandwidth = 5e12\nlink = 1e12\ndomain = 16\n"
        'per_node = 4\nnic = 1e11\nsource = "measured"\n'
    )
    table = load_table(file)
    assert next(iter(table)) == "OURS"
    assert "H100-SXM" in table
    file.write_text("[OURS]\nflops = 3\n")
    with pytest.raises(SiteFault, match=r"accelerators.toml: OURS"):
        load_table(file)
    for wrong in (b"[", b"x = " + b"[" * 100_000, b"\xff"):
        file.write_bytes(wrong)
        with pytest.raises(SiteFault, match=r"accelerators.toml is not TOML"):
            load_table(file)


def test_slurms_network_is_used_where_it_holds_the_job() -> None:
    fabric = fat_tree(16, 16)
    slurm = SlurmFabric(fabric, fabric.nodes - {"n0"}, speeds_known=True)
    prepared = _prepared(slurm=slurm)
    assert prepared.fabric.startswith("Slurm's, 255 nodes in service")
    assert "n0" not in prepared.plan.seats.nodes
    assert "links" not in {one.name for one in prepared.defaults}
    small = SlurmFabric(fabric, frozenset(list(fabric.nodes)[:8]), speeds_known=True)
    assert "not Slurm's (Slurm has 8 nodes in service)" in _prepared(slurm=small).fabric


def test_groups_that_lie_wider_than_asked_are_marked() -> None:
    """32 tensor ranks don't fit into a node; neighbours of a pipeline are in a leaf."""
    wide = GPT.replace("tensor = 8", "tensor = 32").replace("pipeline = 8", "pipeline = 2")
    shown = "\n".join(lines(_prepared(wide), Screen(200)))
    assert re.search(r"tensor +32 +in a leaf, not in a node +all-reduce", shown)
    assert re.search(r"pipeline +2 +in a leaf +send", shown)
    pods = fat_tree(16, 2, 8)
    assert asked_level(pods, Level.POD) is Level.POD
    assert asked_level(pods, Level.NVLINK) is Level.NODE
    assert asked_level(fat_tree(16, 16), Level.POD) is Level.ANY
    assert asked_level(usual_fabric(36, TABLE["GB200-NVL72"]), Level.NVLINK) is Level.NVLINK


@pytest.mark.parametrize(("dimensions", "word"), [((16,), "ring"), ((4, 2, 2), "torus")])
def test_a_torus_is_no_pod(dimensions: tuple[int, ...], word: str) -> None:
    fabric = torus(*dimensions)
    wide = GPT.replace("nodes = 128", "nodes = 16").replace("= 8\nmicro_batches = 96", "= 2\nmicro_batches = 192")
    shown = "\n".join(lines(_prepared(wide, slurm=SlurmFabric(fabric, fabric.nodes, speeds_known=True)), Screen(200)))
    assert re.search(rf"pipeline +2 +in a {word} +send", shown)
    assert "in a pod" not in shown


def test_links_of_their_own_speed_are_counted() -> None:
    fabric = fat_tree(16, 16)
    slow = Fabric(fabric.root, (Node("n3", uplink=Link(5e-6, 1e9)),))
    plain, slower = (_prepared(slurm=SlurmFabric(one, one.nodes, speeds_known=True)) for one in (fabric, slow))
    assert "the links of 1 of its nodes have a speed of their own" in slower.fabric
    assert slower.estimate.step.total > plain.estimate.step.total


async def test_the_network_is_read_from_the_controller() -> None:
    cluster = FakeCluster([f"n{index}" for index in range(8)], now=lambda: 0.0)
    slurm = FakeSlurm(cluster)
    cluster.drain("n3", "test")
    found = await slurm_fabric(slurm, spec.parse(GPT, "job.toml"))
    assert found.fabric.nodes == {f"n{index}" for index in range(8)}
    assert found.usable == found.fabric.nodes - {"n3"}
    assert not found.speeds_known
    reports = dict.fromkeys(("n0", "n1"), NodeReport(nvlink_domain="c.1")) | {"n2": NodeReport(adapter_bandwidth=1e9)}
    refined = (await slurm_fabric(slurm, spec.parse(GPT, "job.toml"), reports)).fabric
    assert refined.level_between("n0", "n1") is Level.NVLINK
    assert refined.link("n2", "n4").bandwidth == 1e9
    assert with_gpu_links(refined, TABLE["B200"]).link("n0", "n1").bandwidth == TABLE["B200"].link
    slurm.unavailable_reason = "no answer"
    with pytest.raises(Unavailable, match="no answer"):
        await slurm_fabric(slurm, spec.parse(GPT, "job.toml"))


_DEGREES = st.sampled_from([1, 2, 4])
_LARGE = st.sampled_from([64, 2**20, 2**36, 2**59])


@settings(max_examples=40)
@given(
    st.fixed_dictionaries({key: _DEGREES for key in ("tensor", "pipeline", "context", "expert", "virtual_stages")}),
    st.dictionaries(st.sampled_from(["parameters", "vocabulary", "sequence_length", "global_batch", "tokens"]), _LARGE),
    st.dictionaries(
        st.sampled_from(["layers", "hidden_size", "heads", "key_value_heads", "experts"]),
        st.sampled_from([64, 128, 2**19]),
    ),
    st.sampled_from(["none", "optimizer", "gradients", "parameters"]),
    st.sampled_from(["none", "selective", "full"]),
)
@example({"pipeline": 2}, {"parameters": 2**59}, {"hidden_size": 64, "heads": 64}, "none", "none")  # 10^13 layers
def test_every_valid_job_gets_finite_numbers_or_one_error(
    split: dict[str, int], large: dict[str, int], small: dict[str, int], sharding: str, kept: str
) -> None:
    given_keys = {
        "name": "x", "nodes": 8, "gpus_per_node": 8, "command": ["x"], "run_dir": "/s",
        "parallelism": {**split, "sharding": sharding},
        "model": {"parameters": 2**36, **large, **small, "activation_checkpointing": kept},
    }  # fmt: skip
    try:
        job = spec.Job.model_validate(given_keys)
    except ValidationError:  # virtual stages without stages
        return
    try:
        prepared = prepare(job, NOTHING, TABLE, None, "--no-slurm")
    except WrongInput:
        return
    json.dumps(to_dict(prepared), allow_nan=False)
    assert prepared.estimate.step.total > 0
    assert not {"inf", "nan"} & set(re.findall(r"\w+", " ".join(lines(prepared, Screen(200)))))


def test_places_are_those_of_the_rank_map() -> None:
    """Every second node of 8 leaves is taken: tensor groups of 2 nodes stay in a leaf, in whatever order names come."""
    fabric = fat_tree(8, 8, tiers=Tiers(oversubscription={Level.ANY: 8.0}))
    usable = frozenset(f"n{index}" for index in range(64) if index % 8 in (0, 3, 5))
    text = (
        GPT.replace("nodes = 128", "nodes = 16")
        .replace("tensor = 8", "tensor = 16")
        .replace("= 8\nmicro", "= 2\nmicro")
    )
    slurm = SlurmFabric(fabric, usable, speeds_known=True)
    prepared = _prepared(text.replace("micro_batches = 96", "micro_batches = 24"), slurm=slurm)
    assert prepared.estimate.levels[GroupKind.TENSOR] is Level.LEAF
    in_order = replace(prepared.plan.seats, nodes=tuple(sorted(usable, key=lambda name: int(name[1:])))[:16])
    worse = estimate(replace(prepared.plan, seats=in_order))
    assert worse.levels[GroupKind.TENSOR] is Level.ANY
    assert worse.step.total > 1.2 * prepared.estimate.step.total


@settings(max_examples=25)
@given(st.integers(1, 64), st.sets(st.integers(0, 63)))
def test_seats_are_usable_nodes_in_the_tightest_part(nodes: int, away: Collection[int]) -> None:
    fabric: Fabric = fat_tree(8, 8)
    usable = fabric.nodes - {f"n{index}" for index in away}
    seats = packed_seats(fabric, usable, nodes, 8, 8)
    if seats is None:
        assert len(usable) < nodes
        return
    assert len(set(seats.nodes)) == nodes
    assert usable >= set(seats.nodes)
    if any(len(leaf.nodes & usable) >= nodes for leaf in fabric.domains(Level.LEAF)):
        assert len({fabric.domain(node, Level.LEAF).nodes for node in seats.nodes}) == 1


def test_a_rack_scale_accelerator_has_nvlink_domains_of_its_nodes() -> None:
    fabric = usual_fabric(36, TABLE["GB200-NVL72"])
    assert [len(domain.nodes) for domain in fabric.domains(Level.NVLINK)] == [18, 18]
    assert fabric.link("n0", "n17").bandwidth == 900e9
    assert fabric.link("n0", "n18").bandwidth == 50e9
    prepared = _prepared(GPT.replace("gpus_per_node = 8", "gpus_per_node = 4"), PlanOptions(accelerator="GB200"))
    assert "NVLink domains of 18 nodes, full bisection" in prepared.fabric
    assert prepared.estimate.levels[GroupKind.TENSOR] is Level.NVLINK
    assert prepared.plan.failures.node_mtbf == 2 * NODE_MTBF


def test_the_weights_of_a_job_are_those_of_its_model() -> None:
    """Twice the sequence: tensor groups send twice as much. Without a model, a usual one counts."""
    job, longer = (spec.parse(text, "job.toml") for text in (GPT, GPT.replace("= 2048", "= 4096")))
    assert weights_of(longer)[GroupKind.TENSOR].size == 2 * weights_of(job)[GroupKind.TENSOR].size
    unknown = spec.parse(_without("parameters", "layers"), "job.toml")
    assert weights_of(unknown) == usual_weights(unknown.axes)


def test_the_page_has_the_defaults_of_the_code() -> None:
    page = (ROOT / "docs" / "PLANNING.md").read_text()
    for words in (
        f"| MTBF of a node | {NODE_MTBF / HOUR:,.0f} h with 8 GPUs",
        f"| repair of a node | {REPAIR / HOUR:g} h |",
        f"| recovery | {RESTART:g} s, and",
        f"| wait without a spare | {WAIT_WITHOUT_SPARE / HOUR:g} h |",
        f"| memory kept free | {100 * RESERVED:g} % |",
        f"leaves of {LEAF_NODES} nodes",
        f"{COPY_BANDWIDTH / 1e9:g} GB/s a GPU; {HOST_LINK / 1e9:g} GB/s for offload",
        f"{100 * USUAL_EFFICIENCY:g} % on others",
        f"{TREE_SHARE:g} β",
    ):
        assert words in page, words


def test_the_recovery_is_the_measured_one() -> None:
    measured = json.loads((ROOT / "benchmarks" / "recovery.json").read_text())
    assert measured["results"]["power_loss"]["worst_s"] == RESTART


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (scaled(1234e9, "B"), "1.23 TB"),
        (scaled(999.9, "B"), "1e+03 B"),
        (scaled(175e9, ""), "175 G"),
        (scaled(0, "B"), "0 B"),
        (duration(12.3456e-6), "12.3 µs"),
        (duration(0.0456), "45.6 ms"),
        (duration(90), "90 s"),
        (duration(7200), "2 h"),
        (duration(3 * 86_400), "3 days"),
        (duration(1e8), "1,157 days"),
        (percent(0.43), "43.0 %"),
        (percent(0.9987), "99.87 %"),
    ],
)
def test_numbers_have_units(text: str, expected: str) -> None:
    assert text == expected
