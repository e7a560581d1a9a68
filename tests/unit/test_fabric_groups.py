"""Groups of ranks: the published examples of Megatron-LM, and what holds for every layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.fabric.groups.axes import MEGATRON_ORDER, Axes, AxesError, Axis, parse_order, write_order
from muster.fabric.groups.rank_groups import GroupKind, fits_in_blocks, groups_over, pipeline_pairs, rank_groups

DEGREES = st.sampled_from([1, 2, 3, 4])


@st.composite
def all_axes(draw: st.DrawFn) -> Axes:
    """Axes of at most 256 ranks. Pipeline is last, or there is none: else expert layers may have other pipelines."""
    tensor, context, data, pipeline = (draw(DEGREES) for _ in range(4))
    shared = context * data
    expert = draw(st.sampled_from([number for number in range(1, shared + 1) if shared % number == 0]))
    inner = draw(st.permutations([axis for axis in Axis if axis is not Axis.PIPELINE]))
    at = 4 if pipeline > 1 else draw(st.integers(0, 4))
    return Axes(tensor, context, expert, data, pipeline, (*inner[:at], Axis.PIPELINE, *inner[at:]))


def test_megatrons_published_example_of_sixteen_ranks() -> None:
    """The docstring of `initialize_model_parallel`: 16 GPUs, tensor 2, pipeline 4."""
    axes = Axes(tensor=2, pipeline=4, data=2)
    assert rank_groups(axes, GroupKind.TENSOR) == tuple((first, first + 1) for first in range(0, 16, 2))
    assert rank_groups(axes, GroupKind.PIPELINE) == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert rank_groups(axes, GroupKind.DATA) == (
        *((0, 2), (1, 3), (4, 6), (5, 7)),
        *((8, 10), (9, 11), (12, 14), (13, 15)),
    )


def test_megatrons_published_example_of_an_order() -> None:
    """The docstring of `generate_masked_orthogonal_rank_groups`: tensor 2, data 3, pipeline 4 in this order."""
    groups = rank_groups(Axes(tensor=2, data=3, pipeline=4), GroupKind.DATA)
    assert (groups[0], groups[1], groups[7]) == ((0, 2, 4), (1, 3, 5), (19, 21, 23))
    pipeline_first = Axes(tensor=2, pipeline=2, data=2, order=parse_order("tp-pp-dp"))
    assert rank_groups(pipeline_first, GroupKind.DATA) == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_experts_are_cut_out_of_context_and_data() -> None:
    axes = Axes(tensor=2, context=2, expert=4, data=4)
    assert (axes.world_size, axes.expert_data) == (16, 2)
    assert rank_groups(axes, GroupKind.EXPERT)[:2] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert rank_groups(axes, GroupKind.EXPERT_DATA)[:2] == ((0, 8), (1, 9))
    assert rank_groups(axes, GroupKind.CONTEXT)[:2] == ((0, 2), (1, 3))
    assert rank_groups(axes, GroupKind.DATA)[0] == (0, 2, 4, 6, 8, 10, 12, 14)


@given(all_axes())
def test_each_rank_is_in_one_group_of_each_kind(axes: Axes) -> None:
    sizes = {
        GroupKind.TENSOR: axes.tensor,
        GroupKind.CONTEXT: axes.context,
        GroupKind.EXPERT: axes.expert,
        GroupKind.DATA: axes.data * axes.context,
        GroupKind.EXPERT_DATA: axes.expert_data,
        GroupKind.PIPELINE: axes.pipeline,
    }
    for kind, size in sizes.items():
        groups = rank_groups(axes, kind)
        assert sorted(rank for group in groups for rank in group) == list(range(axes.world_size))
        assert {len(group) for group in groups} == {size}
        assert [group[0] for group in groups] == sorted(group[0] for group in groups)
        assert all(list(group) == sorted(group) for group in groups)


@given(all_axes(), st.booleans(), st.data())
def test_groups_of_different_axes_share_one_rank(axes: Axes, expert_layers: bool, data: st.DataObject) -> None:
    present = [axis for axis, _ in axes.layout(expert_layers=expert_layers)]
    one, other = data.draw(st.permutations(present))[:2]
    for first in groups_over(axes, (one,), expert_layers=expert_layers):
        for second in groups_over(axes, (other,), expert_layers=expert_layers):
            assert len(set(first) & set(second)) <= 1
    both = groups_over(axes, (one, other), expert_layers=expert_layers)
    assert {len(group) for group in both} == {
        dict(axes.layout(expert_layers=expert_layers))[one] * dict(axes.layout(expert_layers=expert_layers))[other]
    }


@given(all_axes())
def test_expert_layers_have_the_pipelines_of_dense_layers(axes: Axes) -> None:
    assert groups_over(axes, (Axis.PIPELINE,)) == groups_over(axes, (Axis.PIPELINE,), expert_layers=True)


@given(all_axes(), st.sampled_from(list(GroupKind)), st.integers(1, 64))
def test_whether_groups_fit_in_blocks_is_what_counting_says(axes: Axes, kind: GroupKind, nodes: int) -> None:
    if axes.world_size % nodes:
        nodes = 1
    block = axes.world_size // nodes
    counted = all(len({rank // block for rank in group}) == 1 for group in rank_groups(axes, kind))
    assert fits_in_blocks(axes, kind, block) == counted


def test_neighbours_of_a_pipeline_are_pairs() -> None:
    axes = Axes(tensor=2, pipeline=3)
    assert pipeline_pairs(axes) == ((0, 2), (2, 4), (1, 3), (3, 5))
    assert pipeline_pairs(axes, virtual_stages=2) == ((0, 2), (2, 4), (4, 0), (1, 3), (3, 5), (5, 1))
    assert pipeline_pairs(Axes(pipeline=2), virtual_stages=2) == ((0, 1),)
    assert pipeline_pairs(Axes(data=4)) == ()


def test_an_order_is_read_and_written() -> None:
    assert parse_order("tp-cp-ep-dp-pp") == MEGATRON_ORDER
    assert write_order(parse_order("dp-tp")) == "dp-tp-cp-ep-pp"


@pytest.mark.parametrize("text", ["", "tp-tp", "tp,pp", "tensor-data", "tp-cp-ep-dp-pp-xx", "a" * 10_000, "-"])
def test_a_wrong_order_is_refused_in_words(text: str) -> None:
    with pytest.raises(AxesError, match="is no order of axes: write tp, cp, ep, dp and pp, each once") as refused:
        parse_order(text)
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"tensor": 0}, "tensor = 0 must be 1 or more"),
        ({"data": 6, "expert": 4}, "expert = 4 must divide data * context = 6 * 1 = 6"),
        ({"order": (Axis.TENSOR,)}, "must name each of tp, cp, ep, dp and pp once"),
        (
            {"context": 2, "data": 2, "pipeline": 2, "expert": 2, "order": parse_order("tp-cp-pp-ep-dp")},
            "gives expert layers other pipelines than dense layers: put pp last",
        ),
    ],
)
def test_axes_that_do_not_fit_are_refused(degrees: dict[str, int], words: str) -> None:
    with pytest.raises(AxesError, match=words.replace("*", r"\*")):
        Axes(**degrees)  # type: ignore[arg-type]
