"""What one job costs on one fabric: spread, traffic, memory, time of a step. With published figures where there are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.fabric.cost import collectives, throughput
from muster.fabric.cost.choice import Collective, cheapest
from muster.fabric.cost.hierarchy import Tier, ranks_of
from muster.fabric.cost.model import Checkpointing, Model, Offload, Sharding
from muster.fabric.estimate.chip import Chip
from muster.fabric.estimate.estimate import Plan, estimate
from muster.fabric.estimate.failures import Failures, outlook
from muster.fabric.estimate.memory import activations, fewest_gpus, layer_activations, memory
from muster.fabric.estimate.operations import compute_bound_limits, layer_operations
from muster.fabric.estimate.schedule import Schedule, usual_schedule
from muster.fabric.estimate.spread import Seats, scattered, slowest_groups
from muster.fabric.estimate.step import exposed_buckets
from muster.fabric.estimate.traffic import Hidden, Traffic, placement_weights, step_traffic
from muster.fabric.groups.axes import Axes
from muster.fabric.groups.rank_groups import GroupKind, rank_groups
from muster.fabric.model.domain import Domain
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.fabric.model.node import Nic, Node
from muster.fabric.sources.tiers import Tiers
from muster.fabric.testing.generators import fat_tree, torus

NVLINK, NIC = Link(1e-6, 450e9), Link(5e-6, 50e9)
H100 = Chip(989.4e12, 80e9, 3.35e12, efficiency=0.55)
A100 = Chip(312e12, 80e9, 2.039e12, efficiency=0.63)
GPT3 = Model(175e9, 96, 12_288, 2048, 1536, heads=96, fused_attention=False)
SEVEN_AND_A_HALF = Model(7.5e9, 36, 4096, 1024, 64)


def _nodes(count: int) -> tuple[str, ...]:
    return tuple(f"n{index}" for index in range(count))


@cache
def _seats(nodes: int, *counts: int, link: Link = NVLINK, nic: Link = NIC, ratio: float = 1.0) -> Seats:
    links = {Level.NODE: link, Level.LEAF: nic, Level.POD: nic, Level.ANY: nic}
    fabric = fat_tree(*counts, tiers=Tiers(links, {Level.ANY: ratio, Level.POD: ratio}))
    described = tuple(Node(name, 8, gpu_link=link) for name in fabric.nodes)
    return Seats(Fabric(fabric.root, described), _nodes(nodes), local_ranks=8, nics=8)


def tiers_of(ranks: Sequence[int], seats: Seats) -> tuple[Tier, ...]:
    (tiers,) = slowest_groups([ranks], seats)
    return tiers


def _plan(model: Model, axes: Axes, schedule: Schedule, chip: Chip = H100) -> Plan:
    nodes = axes.world_size // 8
    return Plan(model, axes, schedule, chip, _seats(nodes, 16, max(2, math.ceil(nodes / 16))), Failures(nodes))


def test_a_group_within_a_node_has_one_tier() -> None:
    assert tiers_of(range(8), _seats(4, 2, 2)) == (Tier(8, NVLINK),)


def test_a_group_over_nodes_has_the_rails_of_its_ranks() -> None:
    """4 nodes under 2 leaves at 4:1. 32 ranks have 8 adapters a node, and a leaf's 16 adapters pass 4 ranks' worth."""
    seats = _seats(4, 2, 2, ratio=4)
    assert tiers_of(range(32), seats) == (Tier(8, NVLINK), Tier(2, NIC, 8), Tier(2, NIC, 4))
    assert tiers_of(range(0, 32, 8), seats) == (Tier(1, NVLINK), Tier(2, NIC, 1), Tier(2, NIC, 0.5))
    assert tiers_of((0, 16), seats) == (Tier(1, NVLINK), Tier(2, NIC, 0.25))
    assert scattered(8, seats) == (Tier(8, NIC, 0.25),)


def test_one_adapter_for_a_node_is_shared_by_its_ranks() -> None:
    fabric = Fabric(_seats(2, 2, 2).fabric.root, (Node("n0", 8, nics=(Nic("mlx5_0"),)),))
    seats = Seats(fabric, _nodes(2), 8, nics=8)
    assert tiers_of((0, 8), seats)[1].rails == 1 / 8


def test_an_nvlink_domain_of_several_nodes_gives_each_rank_its_own_link() -> None:
    names = _nodes(4)
    racks = [Domain(Level.NVLINK, frozenset(names[at : at + 2]), Link(1e-6, 900e9)) for at in (0, 2)]
    fabric = Fabric(Domain(Level.ANY, frozenset(names), NIC, tuple(racks)))
    found = tiers_of(range(16), Seats(fabric, names, 4, nics=4))
    assert found[1:] == (Tier(2, Link(1e-6, 900e9), 4), Tier(2, NIC, 8))


def test_a_slow_uplink_slows_its_groups_only() -> None:
    seats = _seats(4, 2, 2)
    slow = tuple(replace(node, uplink=Link(5e-6, 10e9)) if node.name == "n3" else node for node in seats.fabric.details)
    seats = replace(seats, fabric=Fabric(seats.fabric.root, slow))
    assert tiers_of((16, 24), seats)[1].link.bandwidth == 10e9
    assert tiers_of((0, 8), seats)[1].link == NIC


def test_hops_of_a_torus_share_its_links() -> None:
    seats = Seats(torus(16), _nodes(16), 1, 1)
    near, far = (cheapest(Collective.ALL_REDUCE, tiers_of(group, seats), 1e9).seconds for group in ((0, 1), (0, 8)))
    assert far == pytest.approx(8 * near, rel=1e-3)


@settings(max_examples=15)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_groups_keep_their_ranks_and_the_tiers_hold_them(tensor: int, context: int, data: int, pipeline: int) -> None:
    axes = Axes(tensor=tensor, context=context, data=data * 8, pipeline=pipeline)
    seats = _seats(axes.world_size // 8, 4, 32)
    for kind in GroupKind:
        groups = rank_groups(axes, kind)
        ways = slowest_groups(groups, seats)
        assert sum(ways.values()) == len(groups)
        assert all(ranks_of(tiers) >= len(groups[0]) for tiers in ways)
        assert set(ways) == {tiers_of(group, seats) for group in groups}


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        (Sharding.NONE, "120.0"),
        (Sharding.OPTIMIZER, "31.4"),
        (Sharding.GRADIENTS, "16.6"),
        (Sharding.PARAMETERS, "1.9"),
    ],
)
def test_state_by_sharding_is_that_of_the_zero_paper(sharding: Sharding, expected: str) -> None:
    """Published: ZeRO (2020), figure 1: 7.5e9 parameters on 64 ranks, GB a GPU."""
    found = memory(replace(SEVEN_AND_A_HALF, sharding=sharding), Axes(data=64), Schedule())
    assert f"{found.state / 1e9:.1f}" == expected


@pytest.mark.parametrize(
    ("heads", "hidden", "expected"), [(96, 12_288, "70"), (128, 20_480, "65")], ids=["GPT-3", "MT-NLG"]
)
def test_selective_checkpointing_saves_what_is_published(heads: int, hidden: int, expected: str) -> None:
    """Published: Korthikanti and others (2022), section 5: 70 % for GPT-3, 65 % for MT-NLG. 5as/h of 34 + 5as/h."""
    model = Model(1e11, 96, hidden, 2048, 64, heads=heads, fused_attention=False)
    every, kept = (
        layer_activations(replace(model, activation_checkpointing=kind), Axes(tensor=8), Schedule(sequence=True))
        for kind in (Checkpointing.NONE, Checkpointing.SELECTIVE)
    )
    assert layer_activations(replace(model, fused_attention=True), Axes(tensor=8), Schedule(sequence=True)) == kept
    assert f"{100 * (1 - kept / every):.0f}" == expected


def test_activations_of_one_layer() -> None:
    """Korthikanti and others (2022), table 2, in units of sbh: s = 2048, b = 1, h = 12,288, a = 96, t = 8."""
    sbh = 2048 * 12_288

    def layer(tensor: int, sequence: bool, kind: Checkpointing) -> float:
        model = replace(GPT3, activation_checkpointing=kind)
        return layer_activations(model, Axes(tensor=tensor), Schedule(sequence=sequence)) / sbh

    assert layer(1, False, Checkpointing.NONE) == pytest.approx(34 + 80)
    assert layer(8, False, Checkpointing.NONE) == pytest.approx(10 + 24 / 8 + 80 / 8)
    assert layer(8, True, Checkpointing.NONE) == pytest.approx((34 + 80) / 8)
    assert layer(8, True, Checkpointing.SELECTIVE) == pytest.approx(34 / 8)
    assert layer(1, False, Checkpointing.FULL) == pytest.approx(2)


def test_the_first_stage_keeps_the_activations_of_all_layers_and_interleaving_more() -> None:
    """(2022), section 4.2.3: L layers on the first stage; 1 + (p−1)/(pm) times that if interleaved with m chunks."""
    axes = Axes(tensor=8, pipeline=8)
    plain = activations(GPT3, axes, Schedule(micro_batches=64))
    assert plain == pytest.approx(96 * layer_activations(GPT3, axes, Schedule()))
    assert activations(GPT3, axes, Schedule(micro_batches=64, virtual_stages=3)) / plain == pytest.approx(1 + 7 / 24)
    assert activations(GPT3, axes, Schedule(micro_batches=2)) / plain == pytest.approx(2 / 8)


def test_offload_moves_state_to_the_host() -> None:
    plain = memory(SEVEN_AND_A_HALF, Axes(), Schedule())
    for offload, kept in ((Offload.OPTIMIZER, 30e9), (Offload.PARAMETERS, 0.0)):
        found = memory(replace(SEVEN_AND_A_HALF, offload=offload), Axes(), Schedule())
        assert found.state == kept
        assert found.state + found.host == plain.state


def test_the_smallest_number_of_gpus() -> None:
    """120 GB of state: without sharding no number of 80 GB GPUs holds it, with all of it sharded a few do."""
    model = replace(SEVEN_AND_A_HALF, activation_checkpointing=Checkpointing.FULL)
    assert fewest_gpus(model, Axes(data=64), Schedule(), 80e9) is None
    sharded = replace(model, sharding=Sharding.PARAMETERS)
    least = fewest_gpus(sharded, Axes(data=64), Schedule(), 80e9)
    assert least == 2
    assert memory(sharded, Axes(data=2), Schedule()).fits(80e9)
    assert not memory(sharded, Axes(data=1), Schedule()).fits(80e9)
    assert fewest_gpus(model, Axes(tensor=2, data=32), Schedule(), 80e9) == 2


@given(st.sampled_from(Sharding), st.sampled_from(Checkpointing), st.sampled_from([1, 2, 8]), st.integers(1, 8))
def test_more_sharding_never_needs_more(sharding: Sharding, kind: Checkpointing, tensor: int, data: int) -> None:
    model = replace(GPT3, activation_checkpointing=kind)
    axes, order = Axes(tensor=tensor, data=data), list(Sharding)
    states = [memory(replace(model, sharding=one), axes, Schedule()).state for one in order]
    assert all(more >= less for more, less in pairwise(states))
    assert memory(replace(model, sharding=sharding), replace(axes, data=2 * data), Schedule()).total <= (
        memory(replace(model, sharding=sharding), axes, Schedule()).total
    )


def test_tensor_traffic_is_that_of_megatron() -> None:
    """2 all-reduces forward and 2 backward of b·s·h for each of 12 layers of a stage and 16 micro-batches."""
    axes, schedule = Axes(tensor=8, pipeline=8, data=8), Schedule(1, 16)
    (tensor,) = (one for one in step_traffic(GPT3, axes, schedule) if one.group is GroupKind.TENSOR)
    assert (tensor.kind, tensor.size, tensor.times) == (Collective.ALL_REDUCE, 2048 * 12_288 * 2, 4 * 12 * 16)
    full = replace(GPT3, activation_checkpointing=Checkpointing.FULL)
    assert next(iter(step_traffic(full, axes, schedule))).times == 6 * 12 * 16


def test_sequence_parallelism_sends_the_same_bytes() -> None:
    """Korthikanti (2022), 4.2.2: a reduce-scatter and an all-gather for each all-reduce; one more gather is hidden."""
    found = [
        one
        for one in step_traffic(GPT3, Axes(tensor=8), Schedule(1, 16, sequence=True))
        if one.group is GroupKind.TENSOR and one.hidden is Hidden.NOTHING
    ]
    assert {one.kind for one in found} == {Collective.ALL_GATHER, Collective.REDUCE_SCATTER}
    assert {one.times for one in found} == {4 * 96 * 16}


def _ring_bytes(model: Model, axes: Axes) -> float:
    """Bytes that one rank sends in rings for gradients and parameters, of one step with one micro-batch."""
    passes = {Collective.ALL_REDUCE: 2, Collective.ALL_GATHER: 1, Collective.REDUCE_SCATTER: 1}
    found = [one for one in step_traffic(model, axes, Schedule()) if one.group is GroupKind.DATA]
    return sum(passes[one.kind] * one.total * (one.ranks - 1) / one.ranks for one in found)


def test_sharding_sends_as_much_or_half_as_much_again() -> None:
    """Published: ZeRO (2020), section 7.2: stages 1 and 2 send as much as an all-reduce, stage 3 1.5 times as much."""
    plain = _ring_bytes(SEVEN_AND_A_HALF, Axes(data=64))
    assert plain == pytest.approx(2 * 63 / 64 * 15e9)
    for sharding, factor in ((Sharding.OPTIMIZER, 1.0), (Sharding.GRADIENTS, 1.0), (Sharding.PARAMETERS, 1.5)):
        assert _ring_bytes(replace(SEVEN_AND_A_HALF, sharding=sharding), Axes(data=64)) / plain == pytest.approx(factor)


def test_experts_exchange_tokens_and_average_gradients_apart() -> None:
    model = Model(47e9, 32, 4096, 4096, 256, experts=8, experts_per_token=2, expert_parameters=45e9)
    axes = Axes(tensor=2, expert=8, data=32)
    found = {(one.group, one.kind): one for one in step_traffic(model, axes, Schedule(1, 8))}
    tokens = found[GroupKind.EXPERT, Collective.ALL_TO_ALL]
    assert (tokens.ranks, tokens.size, tokens.times) == (8, 2 * 4096 * 4096 * 2, 4 * 8 * 32)
    assert found[GroupKind.DATA, Collective.ALL_REDUCE].ranks == 32
    assert found[GroupKind.DATA, Collective.ALL_REDUCE].total == pytest.approx(2 * 2e9 / 2)
    assert found[GroupKind.EXPERT_DATA, Collective.ALL_REDUCE].ranks == 4
    assert found[GroupKind.EXPERT_DATA, Collective.ALL_REDUCE].total == pytest.approx(2 * 45e9 / 2 / 8)


def test_placement_weighs_groups_by_what_the_model_sends() -> None:
    """A link carries what its group's collectives take on it, if nothing hides them and the algorithm is a ring."""
    axes, link = Axes(tensor=8, pipeline=4, data=8), Link(5e-6, 50e9)
    traffic = step_traffic(replace(GPT3, sharding=Sharding.OPTIMIZER), axes, Schedule(1, 32))
    weights = placement_weights(traffic)
    assert weights.keys() == {one.group for one in traffic}
    for kind, weight in weights.items():
        ring = sum(one.times * _ring_seconds(one, link) for one in traffic if one.group is kind)
        assert weight.seconds(link) == pytest.approx(ring)


def _ring_seconds(one: Traffic, link: Link) -> float:
    if one.kind is Collective.SEND:
        return link.time(one.size)
    passes = 2 if one.kind is Collective.ALL_REDUCE else 1
    return passes * collectives.ring_pass(one.ranks, one.size, link)


def test_a_job_of_one_rank_sends_nothing() -> None:
    assert step_traffic(SEVEN_AND_A_HALF, Axes(), Schedule()) == ()


def test_context_parallelism_sends_keys_and_values() -> None:
    """Grouped queries: 8 of 128 heads have keys, so the ring sends a sixteenth of 2·b·s·h elements."""
    model = Model(405e9, 126, 16_384, 131_072, 16, heads=128, key_value_heads=8)
    found = [one for one in step_traffic(model, Axes(context=16), Schedule()) if one.group is GroupKind.CONTEXT]
    assert {one.size for one in found} == {2 * 2 * 131_072 * 16_384 / 16}
    assert [one.times for one in found] == [2 * 126, 126]


def test_buckets_hide_behind_the_backward_pass() -> None:
    assert exposed_buckets(10, 0.1, 10.0) == pytest.approx(0.1), "the last bucket is always seen"
    assert exposed_buckets(10, 1.0, 5.0) == pytest.approx(0.5 + 10 - 5), "the network is the slower one"
    assert exposed_buckets(1, 3.0, 5.0) == 3.0


def test_model_flop_are_those_of_palm() -> None:
    """Published: PaLM (2022), appendix B: 238,300 tokens/s on 6,144 TPU v4 of 275 TFLOP/s are an MFU of 46.2 %."""
    palm = Model(540.35e9, 118, 12_288, 2048, 2048)  # 48 heads of 256; the hidden size itself plays no part
    assert f"{100 * 238_300 * throughput.token_flop(palm) / (6144 * 275e12):.1f}" == "46.2"


LLAMA = Model(
    405e9, 126, 16_384, 8192, 2048, heads=128, key_value_heads=8, vocabulary=128_256, gradient_bytes=4,
    activation_checkpointing=Checkpointing.SELECTIVE, sharding=Sharding.OPTIMIZER,
)  # fmt: skip
LLAMA_RUNS = (
    (LLAMA, Axes(tensor=8, pipeline=16, data=64), Schedule(1, 32, 8, True, 1e9), 43),
    (LLAMA, Axes(tensor=8, pipeline=16, data=128), Schedule(1, 16, 8, True, 1e9), 41),
    (replace(LLAMA, sequence_length=131_072, global_batch=128),
     Axes(tensor=8, context=16, pipeline=16, data=8), Schedule(1, 16, 8, True, 1e9), 38),
)  # fmt: skip
MEGATRON_RUNS = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 30, 3072, 32, 2, 1, 64, 512, 138),
    (7.5, 36, 4096, 32, 4, 1, 128, 512, 142),
    (18.4, 40, 6144, 48, 8, 1, 256, 1024, 135),
    (39.1, 48, 8192, 64, 8, 2, 512, 1536, 138),
    (76.1, 60, 10_240, 80, 8, 4, 1024, 1792, 140),
    (145.6, 80, 12_288, 96, 8, 8, 1536, 2304, 148),
    (310.1, 96, 16_384, 128, 8, 16, 1920, 2160, 155),
    (529.6, 105, 20_480, 128, 8, 35, 2520, 2520, 163),
    (1008.0, 128, 25_600, 160, 8, 64, 3072, 3072, 163),
)
"""Parameters (1e9), layers, hidden size, heads, tensor, pipeline, GPUs, global batch, TFLOP/s of a GPU."""


@pytest.mark.parametrize(("model", "axes", "schedule", "published"), LLAMA_RUNS)
def test_the_utilization_of_llama_3_comes_out(model: Model, axes: Axes, schedule: Schedule, published: int) -> None:
    """Published: Llama 3 (2024), table 4, in percent. The H100's efficiency, 0.55, was fitted to these."""
    assert 100 * estimate(_plan(model, axes, schedule)).step.utilization == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize("run", MEGATRON_RUNS, ids=lambda run: f"{run[0]}e9")
def test_the_speed_of_megatron_comes_out(run: tuple[float, int, int, int, int, int, int, int, int]) -> None:
    """Published: Narayanan and others (2021), table 1. One number, the A100's efficiency of 0.63, was fitted to these.

    The paper counts the repeated forward pass. It does not name the micro-batch: the best one that fits is taken.
    """
    parameters, layers, hidden, heads, tensor, pipeline, gpus, batch, published = run
    model = Model(
        parameters * 1e9, layers, hidden, 2048, batch, heads=heads, vocabulary=51_200, fused_attention=False,
        activation_checkpointing=Checkpointing.FULL,
    )  # fmt: skip
    axes = Axes(tensor=tensor, pipeline=pipeline, data=gpus // (tensor * pipeline))
    found = []
    for micro_batch in (1, 2, 4, 8):
        number, rest = divmod(batch, axes.data * micro_batch)
        if not rest and memory(model, axes, schedule := Schedule(micro_batch, number, bucket=160e6)).fits(A100.memory):
            nodes = gpus // 8
            seats = _seats(nodes, 16, max(2, math.ceil(nodes / 16)), link=Link(1e-6, 300e9), nic=Link(5e-6, 25e9))
            plan = Plan(model, axes, schedule, A100, seats, Failures(nodes))
            found.append(estimate(plan).step.utilization * 312 * 4 / 3)
    assert max(found) == pytest.approx(published, rel=0.09)


SELECTIVE_RUNS = (
    (22e9, 48, 6144, 64, 1, 1, 4, 4, 1, 1.10),
    (175e9, 96, 12_288, 96, 8, 1, 64, 1, 3, 13.75),
    (530e9, 105, 20_480, 128, 35, 1, 280, 1, 3, 37.83),
    (1e12, 128, 25_600, 160, 64, 1, 512, 1, 1, 71.49),
    (530e9, 105, 20_480, 128, 35, 8, 2240, 1, 3, 39.15),
)
"""Parameters, layers, hidden size, heads, pipeline, data, global batch, micro-batch, virtual stages, seconds."""


@pytest.mark.parametrize("run", SELECTIVE_RUNS, ids=lambda run: f"{run[0] / 1e9:g}e9 on {8 * run[4] * run[5]}")
def test_published_steps_to_which_nothing_was_fitted_come_out(run: tuple[float, ...]) -> None:
    """Published: Korthikanti and others (2022), tables 3 and 5, the last in section 6.3: A100, tensor 8, sequence."""
    parameters, layers, hidden, heads, pipeline, data, batch, micro_batch, virtual, published = run
    model = Model(
        parameters, int(layers), int(hidden), 2048, int(batch), heads=int(heads), vocabulary=51_200,
        fused_attention=False, activation_checkpointing=Checkpointing.SELECTIVE,
    )  # fmt: skip
    axes = Axes(tensor=8, pipeline=int(pipeline), data=int(data))
    schedule = Schedule(int(micro_batch), int(batch / data / micro_batch), int(virtual), sequence=True, bucket=160e6)
    nodes = axes.world_size // 8
    seats = _seats(nodes, 16, max(2, math.ceil(nodes / 16)), link=Link(1e-6, 300e9), nic=Link(5e-6, 25e9))
    found = estimate(Plan(model, axes, schedule, A100, seats, Failures(nodes)))
    assert found.step.total == pytest.approx(published, rel=0.1)
    assert found.fits


def test_the_parts_of_a_step_add_up() -> None:
    plan = _plan(GPT3, Axes(tensor=8, pipeline=8, data=16), Schedule(1, 96), A100)
    found = estimate(plan)
    step = found.step
    assert step.total == pytest.approx(step.compute + step.exposed + step.bubble + step.optimizer)
    assert step.exposed == pytest.approx(sum(one.exposed for one in step.traffic))
    assert all(0 < one.exposed <= one.seconds * (1 + 1e-9) for one in step.traffic)
    assert found.bubble_share == pytest.approx(7 / 103)
    assert found.tokens_a_day == pytest.approx(found.outlook.goodput * 1536 * 2048 * 86_400 / step.total)
    assert found.days == found.cost == 0


def test_the_worst_misplacement_is_that_of_the_tensor_groups() -> None:
    found = estimate(_plan(GPT3, Axes(tensor=8, pipeline=8, data=16), Schedule(1, 96), A100))
    assert found.misplacement
    assert found.misplacement.group is GroupKind.TENSOR
    assert found.misplacement.factor > 1.3
    assert estimate(replace(_plan(GPT3, Axes(data=8), Schedule()), axes=Axes())).misplacement is None


@settings(max_examples=20)
@given(st.permutations(range(16)))
def test_no_order_of_nodes_beats_the_packed_one(order: Sequence[int]) -> None:
    """Tensor groups in nodes, data groups of neighbours: 16 nodes under 4 leaves at 8:1."""
    packed = replace(
        _plan(GPT3, Axes(tensor=8, pipeline=4, data=4), Schedule(1, 8), A100), seats=_seats(16, 4, 4, ratio=8)
    )
    nodes = tuple(packed.seats.nodes[at] for at in order)
    other = estimate(replace(packed, seats=replace(packed.seats, nodes=nodes)))
    assert other.step.total >= estimate(packed).step.total * (1 - 1e-9)


def test_operations_of_a_layer_by_tensor_width_and_micro_batch() -> None:
    def bounds(tensor: int, tokens: int) -> set[str]:
        model = replace(GPT3, sequence_length=tokens)
        return {one.bound.value for one in layer_operations(model, Axes(tensor=tensor), Schedule(), H100)[:4]}

    assert bounds(8, 2048) == {"compute"}
    assert bounds(8, 64) == {"memory"}
    assert bounds(64, 2048) == {"compute", "memory"}
    assert layer_operations(GPT3, Axes(), Schedule(), H100)[-1].bound.value == "memory"


def test_how_far_products_stay_compute_bound() -> None:
    widest, tokens = compute_bound_limits(GPT3, Axes(tensor=8), Schedule(), H100)
    assert widest
    assert tokens
    for tensor, length, all_compute in ((widest, 2048, True), (2 * widest, 2048, False), (8, tokens // 2, False)):
        found = layer_operations(replace(GPT3, sequence_length=length), Axes(tensor=tensor), Schedule(), H100)[:4]
        assert all(one.bound.value == "compute" for one in found) is all_compute
    assert compute_bound_limits(replace(GPT3, hidden_size=128, heads=1), Axes(), Schedule(), H100) == (None, None)


EXPERTS = Model(46.7e9, 32, 4096, 4096, 256, heads=32, experts=8, experts_per_token=2, expert_parameters=34.4e9)


def test_experts_keep_each_token_twice_and_multiply_fewer_of_them() -> None:
    """Two experts of width 4h keep 18·s·b·h twice. Each of eight gets a quarter of the tokens."""
    wide = replace(EXPERTS, expert_parameters=2.0 * 32 * 8 * 4096 * 16_384, parameters=60e9)
    assert wide.expert_width == 16_384
    plain = replace(wide, experts=1, experts_per_token=1, expert_parameters=0.0)
    more = layer_activations(wide, Axes(), Schedule()) - layer_activations(plain, Axes(), Schedule())
    assert more == pytest.approx(18 * 4096 * 4096)
    found = {one.name: one for one in layer_operations(wide, Axes(), Schedule(), H100)}
    assert found["expert up"].intensity < found["attention in"].intensity
    shared = layer_operations(wide, Axes(expert=4, data=4), Schedule(), H100)
    assert {one.name: one for one in shared}["expert up"].intensity > found["expert up"].intensity


def test_what_crosses_the_bisection_of_the_nodes() -> None:
    """16 nodes of 400 GB/s under 4 leaves at 8:1: 16/2 · 400 / 8 GB/s. Groups within a leaf cross nothing."""
    seats = _seats(16, 4, 4, ratio=8)
    plan = replace(_plan(GPT3, Axes(tensor=8, pipeline=4, data=4), Schedule(1, 8), A100), seats=seats)
    found = estimate(plan)
    assert found.bisection == pytest.approx(400e9)
    assert found.levels[GroupKind.DATA] is Level.LEAF
    assert found.crossing == 0
    spread = estimate(replace(plan, axes=Axes(tensor=8, data=16)))
    assert spread.levels[GroupKind.DATA] is Level.ANY
    assert spread.crossing == pytest.approx(8 * 2 * 15 / 16 * 175e9 / 8 * 2)


def test_schedules_divide_the_global_batch() -> None:
    assert usual_schedule(GPT3, Axes(data=16)) == Schedule(1, 96)
    assert usual_schedule(GPT3, Axes(data=16), 24) == Schedule(4, 24)
    with pytest.raises(ValueError, match=r"global_batch = 1536 must be a multiple of data \* micro_batches = 16 \* 7"):
        usual_schedule(GPT3, Axes(data=16), 7)


def test_spares_save_the_wait_for_other_nodes() -> None:
    """2,048 nodes: 3.1 hours between failures. A day of repair keeps 7.8 nodes away on average."""
    without, few, enough = (outlook(Failures(2048, spares), 6.0, 20e9, 8) for spares in (0, 4, 16))
    assert f"{enough.mtbf / 3600:.2f}" == "3.08"
    assert without.goodput == without.goodput_without_spares
    assert without.goodput < 0.75 < few.goodput_without_spares + 0.05
    assert without.goodput < few.goodput < 0.9 < 0.98 < enough.goodput < 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Chip(0, 1, 1),
        lambda: Chip(1, 1, 1, efficiency=1.5),
        lambda: Schedule(0),
        lambda: Failures(0),
        lambda: Failures(1, spares=-1),
        lambda: replace(GPT3, layers=0),
        lambda: replace(GPT3, experts=4, experts_per_token=5),
        lambda: replace(GPT3, expert_parameters=2e12),
        lambda: Seats(torus(2), (), 1, 1),
    ],
)  # fmt: skip
def test_numbers_that_no_job_has_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"must|more|reaches|need"):
        wrong()  # type: ignore[operator]
