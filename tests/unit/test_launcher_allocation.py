"""Which nodes a job asks Slurm for, by the kind of network, and what it takes if they are busy."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.daemon.transport.site_config import Site
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.level import Level
from muster.fabric.sources.slurm_topology import Kind, SlurmTopology, Unit
from muster.launcher.allocation.ask import allocate, asking, has_own_shape, topology_of
from muster.launcher.allocation.choice import choose, smaller_jobs
from muster.launcher.allocation.clusters import PackedPieces
from muster.launcher.allocation.free_nodes import in_words
from muster.launcher.allocation.plan import Request, RequestOptions
from muster.launcher.allocation.request import plan_request
from muster.launcher.allocation.segments import leaf_count, segment_of, smaller_segments
from muster.launcher.commands.submit import prepare, with_shape
from muster.launcher.errors import WrongInput
from muster.launcher.main import parser
from muster.launcher.output.screen import time_with_zone
from muster.launcher.spec.spec import Job, parse
from muster.launcher.submission.script import render
from muster.slurm.client.backends.commands import CliSlurm
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.slurm.client.parsing.sbatch_request import JobRequest, read_request
from muster.slurm.client.parsing.start_text import max_switch_wait_s, read
from muster.slurm.client.sbatch_options import read_words
from muster.slurm.client.states import NodeState
from muster.slurm.client.types import NeverStarts, Node, StartEstimate, Unknown

NODES = tuple(f"n{at}" for at in range(16))
GROUPS = tuple(NODES[at : at + 4] for at in range(0, 16, 4))
LEAVES = tuple(Unit(f"s{at}", group) for at, group in enumerate(GROUPS))
TREE = SlurmTopology(Kind.TREE, (*LEAVES, Unit("spine", NODES)))
PODS = (Unit("b[0-1]", NODES[:8], aggregated=True), Unit("b[2-3]", NODES[8:], aggregated=True))
BLOCKS = SlurmTopology(Kind.BLOCK, (*LEAVES, *PODS), base_block=4)
TORUS = SlurmTopology(Kind.TORUS, (Unit("t0", NODES, (4, 2, 2), shapes=((1, 1, 1), (2, 2, 1), (4, 2, 1), (4, 2, 2))),))
PLAIN = """
name = "tiny"
command = "true"
run_dir = "/shared/run"
gpus_per_node = 8
"""


def job(nodes: int, *tables: str, spares: int = 0) -> Job:
    """A job of nodes with 8 ranks each."""
    return parse("\n".join([PLAIN, f"nodes = {nodes}", f"spares = {spares}", *tables]), "job.toml")


def tensor(nodes: int, degree: int, packed: str = "leaf", spares: int = 0, pipeline: int = 1) -> Job:
    tables = (f"[parallelism]\ntensor = {degree}\npipeline = {pipeline}", f'[placement]\ntensor = "{packed}"')
    return job(nodes, *tables, spares=spares)


def plan(of: Job, topology: SlurmTopology, wait_s: int | None = 300) -> RequestOptions:
    return plan_request(asking(of), of.nodes, of.spares, topology, wait_s)


def test_groups_within_a_node_ask_for_nothing() -> None:
    assert asking(tensor(8, 8)) == ()


def test_groups_of_several_nodes_join_those_inside() -> None:
    found = asking(tensor(8, 16, "require leaf", pipeline=2))
    assert found == (
        PackedPieces(GroupKind.TENSOR, 2, 4, Level.LEAF, True),
        PackedPieces(GroupKind.PIPELINE, 4, 2, Level.POD, False, "pod"),
    )


@pytest.mark.parametrize(
    "more", [["--switches=2"], ["--segment", "4"], ["-w", "n[0-7]"], ["-wn0"], ["--nodelist=n[0-7]"], ["-F", "list"]]
)
def test_a_shape_of_the_users_own_wins(more: list[str]) -> None:
    assert not has_own_shape(tensor(8, 16), read_words(["--exclusive"]))
    assert has_own_shape(tensor(8, 16), read_words(more))


def test_switches_of_job_toml_win() -> None:
    assert has_own_shape(job(8, "[parallelism]\ntensor = 16", '[slurm]\nswitches = "2"'), ())
    assert has_own_shape(job(8, "[parallelism]\ntensor = 16", '[slurm]\noptions = ["--segment=2"]'), ())


@pytest.mark.parametrize(
    ("of", "options"),
    [
        (tensor(4, 32), ("--switches=1@0:05:00",)),
        (tensor(8, 16), ("--switches=2@0:05:00",)),
        (tensor(8, 16, spares=1), ("--switches=3@0:05:00",)),
        (tensor(16, 16), ()),  # all leaves anyway
        (tensor(8, 64), ()),  # no leaf has 8 nodes
    ],
)
def test_a_tree_gets_the_number_of_leaf_switches(of: Job, options: tuple[str, ...]) -> None:
    assert plan(of, TREE).strict == Request(of.spares, plan(of, TREE).strict.words, options)


def test_a_tree_says_how_long_slurm_waits() -> None:
    found = plan(tensor(8, 16, "require leaf"), TREE, wait_s=90)
    assert found.strict.options == ("--switches=2@0:01:30",)
    assert found.required
    assert found.relaxed == (Request(0, "any nodes"),)
    assert "the site lets a job wait 90 s for that (max_switch_wait); then Slurm starts it anywhere" in found.notes
    assert plan(tensor(8, 16), TREE, wait_s=None).strict.options == ("--switches=2",)


@pytest.mark.parametrize(
    ("of", "options", "spares"),
    [
        (tensor(8, 16), ("--segment=2",), 0),
        (tensor(8, 32), ("--segment=4",), 0),
        (tensor(8, 16, spares=1), ("--segment=2",), 2),  # 9 nodes are no such segments
        (tensor(6, 16, spares=3), ("--segment=3",), 3),  # a spare in each segment
        (tensor(8, 32, "require leaf", spares=1), ("--segment=4",), 4),  # 9 nodes are no segments of 4
        (tensor(8, 32, spares=1), (), 1),  # a preference is not worth three nodes
        (tensor(8, 64), (), 0),  # no block has 8 nodes
        (tensor(8, 8, pipeline=8), ("--segment=8",), 0),  # an aggregated block
    ],
)
def test_blocks_get_segments(of: Job, options: tuple[str, ...], spares: int) -> None:
    found = plan(of, BLOCKS).strict
    assert (found.options, found.spares) == (options, spares)


def test_added_spares_are_explained() -> None:
    (_, why) = plan(tensor(8, 32, "require leaf", spares=1), BLOCKS).notes
    assert why == "3 more spares: 8 + 1 nodes are no multiple of 4, and Slurm refuses that"


def test_smaller_segments_relax_blocks() -> None:
    assert [one.options for one in plan(tensor(8, 32), BLOCKS).relaxed] == [("--segment=2",), ("--segment=1",)]
    # Without the option, Slurm waits for the fewest blocks.
    assert plan(tensor(8, 64), BLOCKS).relaxed == (Request(0, "any nodes", ("--segment=1",)),)


@pytest.mark.parametrize("topology", [TREE, BLOCKS])
def test_a_requirement_that_nothing_has_room_for(topology: SlurmTopology) -> None:
    with pytest.raises(WrongInput, match="'require leaf' can't be kept: 1 times 8 nodes and 0 spares don't fit"):
        plan(tensor(8, 64, "require leaf"), topology)
    with pytest.raises(WrongInput, match=r"nodes \+ spares = 16 \+ 1 = 17: Slurm's network has 16 nodes"):
        plan(tensor(16, 32, "require leaf", spares=1), topology)
    with pytest.raises(WrongInput, match="can't be kept: 5 times 3 nodes and 1 spare don't fit into 4 "):
        plan(tensor(15, 24, "require leaf", spares=1), topology)


def test_a_torus_has_sizes() -> None:
    found = plan(tensor(8, 16, spares=1), TORUS)
    assert (found.strict.options, found.strict.spares) == ((), 8)
    assert "7 more spares: 9 nodes are no such number" in found.notes
    with pytest.raises(WrongInput, match=r"nodes \+ spares = 17: the torus takes jobs of .*: 1, 4, 8, 16"):
        plan(tensor(16, 16, spares=1), TORUS)


@pytest.mark.parametrize("kind", [Kind.FLAT, Kind.RING])
def test_other_networks_get_no_option(kind: Kind) -> None:
    assert plan(tensor(8, 16), SlurmTopology(kind, problem="odd")).strict.options == ()


def test_a_partition_may_have_a_topology_of_its_own() -> None:
    own = SlurmTopology(Kind.BLOCK, name="b", default=False, partitions=("gpu",))
    assert topology_of((TREE, own), "gpu,cpu") is own
    assert topology_of((TREE, own), "cpu") is TREE
    assert topology_of((own, TREE), None) is TREE


@given(st.integers(1, 40), st.integers(0, 9), st.integers(1, 12), st.integers(1, 20), st.integers(1, 200))
def test_segments_hold_all_pieces(nodes: int, spares: int, piece: int, block: int, most: int) -> None:
    found = segment_of(nodes, spares, piece, block, most)
    enough = -(-max(nodes + spares, -(-nodes // piece) * piece) // piece) * piece
    if found is None:
        assert piece > block or enough > most
        return
    total, segment = found
    assert nodes + spares <= total <= most
    assert total % segment == 0
    assert segment <= block
    assert total // segment * (segment // piece) >= -(-nodes // piece)


@given(st.integers(1, 40), st.integers(0, 9), st.integers(1, 6), st.lists(st.integers(1, 12), max_size=12))
def test_leaves_hold_all_pieces(nodes: int, spares: int, piece: int, leaves: list[int]) -> None:
    largest = sorted(leaves, reverse=True)
    pieces = -(-nodes // piece)

    def hold(count: int) -> bool:
        room = sum(size // piece for size in largest[:count]) >= pieces
        return room and sum(largest[:count]) >= pieces * piece + spares

    expected = next((count for count in range(1, len(leaves) + 1) if hold(count)), None)
    assert leaf_count(nodes, spares, piece, leaves) == expected


def test_smaller_segments_divide() -> None:
    assert list(smaller_segments(12, 6)) == [3, 2, 1]
    assert list(smaller_segments(10, 4)) == [2, 1]


STRICT, PAIRS, ANY = Request(0, "segments of 4 nodes"), Request(0, "segments of 2 nodes"), Request(0, "any nodes")
SOFT, HARD = RequestOptions(STRICT, (PAIRS, ANY)), RequestOptions(STRICT, (PAIRS, ANY), required=True)
NOW = time.mktime((2026, 11, 26, 6, 0, 0, 0, 0, 0))
SOON, LATER, NEVER = StartEstimate(NOW + 1), StartEstimate(NOW + 1800), NeverStarts("no such nodes")
AT = time_with_zone(LATER.start)
FAR = StartEstimate(NOW + 100 * 365 * 86400)


@pytest.mark.parametrize(
    ("of", "wanted", "estimates", "request_made", "reason"),
    [
        (SOFT, None, (SOON, SOON, SOON), STRICT, "asks for segments of 4 nodes, starts now"),
        (SOFT, None, (LATER, SOON, SOON), PAIRS, f"relaxes: segments of 4 nodes would start at {AT}, segments of 2 "),
        (SOFT, None, (LATER, LATER, SOON), ANY, f"relaxes: segments of 4 nodes would start at {AT}, any nodes now ("),
        (SOFT, None, (LATER, LATER, LATER), STRICT, f"asks for segments of 4 nodes, starts at {AT}"),
        (SOFT, "wait", (LATER, SOON, SOON), STRICT, f"waits: segments of 4 nodes would start at {AT}, segments of 2 "),
        (HARD, None, (LATER, SOON, SOON), STRICT, "waits: "),
        (HARD, "relax", (LATER, SOON, SOON), PAIRS, "relaxes: "),
        (SOFT, None, (NEVER, NEVER, SOON), ANY, "asks for any nodes: Slurm has no place for segments of 4 nodes (no "),
        (
            SOFT,
            None,
            (NEVER, NEVER, NEVER),
            STRICT,
            "asks for segments of 4 nodes, which never starts as things are: no such nodes",
        ),
        (
            SOFT,
            None,
            (FAR, FAR, FAR),
            STRICT,
            "asks for segments of 4 nodes, starts in more than a year, as Slurm expects",
        ),
        (SOFT, None, (Unknown("silent"), SOON, SOON), STRICT, "asks for segments of 4 nodes; Slurm does not say"),
    ],
)
def test_what_is_chosen(
    of: RequestOptions, wanted: str | None, estimates: tuple, request_made: Request, reason: str
) -> None:  # type: ignore[type-arg]
    found = choose(of, estimates, wanted, NOW)  # type: ignore[arg-type]
    assert found.request == request_made
    assert found.reason.startswith(reason)


def test_a_requirement_that_slurm_can_never_keep() -> None:
    with pytest.raises(WrongInput) as refused:
        choose(HARD, (NEVER, SOON, SOON), None, NOW)
    assert refused.value.message == "Slurm has no place for segments of 4 nodes: no such nodes"
    assert "'relax' the job gets segments of 2 nodes, and starts now. Nothing was queued" in refused.value.hint


def cluster(*busy: str) -> FakeSlurm:
    """A fake tree of 16 nodes, some of which have a job for half an hour."""
    made = FakeCluster(NODES, now=time.time, leaves={node: unit.name for unit in LEAVES for node in unit.nodes})
    for node in busy:
        made.submit(sbatch_request(f"--nodelist={node}", "--time=30"))
    return FakeSlurm(made)


def sbatch_request(*options: str) -> JobRequest:
    return read_request("", options, "/")


async def test_an_idle_cluster_gives_what_is_asked_for() -> None:
    of = tensor(8, 16)
    found = await allocate(of, asking(of), (), "#!/bin/bash\n", cluster())
    assert found.options == ("--switches=2@0:05:00",)
    assert found.reason.startswith("asks for at most 2 leaf switches, starts ")


async def test_a_fragmented_cluster_gives_a_preference_less() -> None:
    of = tensor(8, 16)
    found = await allocate(of, asking(of), (), "#!/bin/bash\n", cluster("n0", "n4", "n8", "n12"))
    assert found.options == ()
    assert found.reason.startswith("relaxes: at most 2 leaf switches would start ")
    assert found.notes[-1] == found.reason


async def test_a_requirement_waits_on_a_fragmented_cluster() -> None:
    of = tensor(8, 16, "require leaf")
    found = await allocate(of, asking(of), (), "#!/bin/bash\n", cluster("n0", "n4", "n8", "n12"))
    assert found.options == ("--switches=2@0:05:00",)
    assert found.reason.startswith("waits: ")


async def test_without_an_answer_the_job_is_queued_as_it_is() -> None:
    of, slurm = tensor(8, 16, spares=1), cluster()
    slurm.unavailable_reason = "slurmctld is silent"
    found = await allocate(of, asking(of), (), "#!/bin/bash\n", slurm)
    assert (found.options, found.spares) == ((), 1)
    assert found.reason == "groups are not packed: Slurm does not answer: slurmctld is silent"


LINE = "sbatch: Job 17 to start at 2026-11-26T06:50:15 a using 48 processors on nodes n[1-3,5] in partition main\n"


def test_the_words_of_slurm_are_read() -> None:
    assert read(LINE.replace(" a using", " using")) == read(LINE)  # Slurm 24.11
    found = read(LINE)
    assert time.strftime("%FT%T", time.localtime(found.start)) == "2026-11-26T06:50:15"
    assert found.nodes == ("n1", "n2", "n3", "n5")
    with pytest.raises(ValueError, match="printed 'hello'"):
        read("hello")
    assert max_switch_wait_s("SchedulerParameters     = defer,max_switch_wait=60,x\n") == 60
    assert max_switch_wait_s("SchedulerParameters     = max_switch_wait=61\n") == 61
    assert max_switch_wait_s("SchedulerParameters     = (null)\n") == 300


async def test_slurms_commands_are_asked(tmp_path: Path) -> None:
    program = tmp_path / "sbatch"
    program.write_text(
        f'#!/bin/sh\n[ "$2" = --nodes=99 ] && {{ echo "allocation failure: no" >&2; exit 1; }}\necho "{LINE}" >&2\n'
    )
    program.chmod(0o755)
    slurm = CliSlurm(tmp_path)
    assert await slurm.estimate_start(tmp_path / "x", cwd=tmp_path) == read(LINE)
    refused = await slurm.estimate_start(tmp_path / "x", ("--nodes=99",), cwd=tmp_path)
    assert refused == NeverStarts("allocation failure: no")
    silent = await slurm.max_switch_wait_s()
    assert isinstance(silent, Unknown)


async def test_the_script_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"{PLAIN}nodes = 8\nspares = 1\n[parallelism]\ntensor = 16\n")
    submission = prepare(parser().parse_args(["submit", str(path)]), Site())
    text = render(await with_shape(submission, cluster()))
    assert "\n#SBATCH --switches=3@0:05:00\n" in text
    assert "\n# tensor groups shall be within one leaf: 4 times 2 nodes: at most 3 leaf switches, which " in text
    assert capsys.readouterr().err.startswith("muster: asks for at most 3 leaf switches")


async def test_added_spares_are_spares_of_the_gang(tmp_path: Path) -> None:
    class Blocks(FakeSlurm):
        async def topologies(self, *, timeout_s: float = 5.0) -> tuple[SlurmTopology, ...]:
            return (BLOCKS,)

    path = tmp_path / "job.toml"
    path.write_text(f"{PLAIN}nodes = 8\nspares = 1\n[parallelism]\ntensor = 16\n")
    submission = prepare(parser().parse_args(["submit", str(path)]), Site())
    found = await with_shape(submission, Blocks(cluster().cluster))
    assert (found.spec.spares, submission.spec.spares) == (2, 1)
    assert "#SBATCH --nodes=10\n" in render(found)
    assert "#SBATCH --segment=2\n" in render(found)


@pytest.mark.parametrize("topologies", [(TREE,), (SlurmTopology(Kind.FLAT, ()),)], ids=["tree", "flat"])
async def test_more_nodes_than_slurm_has_are_refused_for_one_node_with_spares_too(
    tmp_path: Path, topologies: tuple[SlurmTopology, ...]
) -> None:
    class Sixteen(FakeSlurm):
        async def topologies(self, *, timeout_s: float = 5.0) -> tuple[SlurmTopology, ...]:
            return topologies

    path = tmp_path / "job.toml"
    path.write_text(f"{PLAIN}nodes = 1\nspares = 16\n")
    submission = prepare(parser().parse_args(["submit", str(path)]), Site())
    with pytest.raises(WrongInput, match=r"1 \+ 16 = 17: Slurm's network has 16 nodes"):
        await with_shape(submission, Sixteen(cluster().cluster))


@pytest.mark.parametrize(("partition", "most"), [("small", 2), ("small,half", 8), ("small,none", 16)])
async def test_more_nodes_than_the_partition_has_are_refused(partition: str, most: int, tmp_path: Path) -> None:
    """A job runs in one of its partitions. One that Slurm does not have is left to sbatch."""
    slurm = cluster()
    slurm.cluster.partitions = {"small": NODES[:2], "half": NODES[:8], "main": NODES}
    path = tmp_path / "job.toml"
    for nodes in (most, most + 1):
        path.write_text(f"{PLAIN}nodes = {nodes}\n[slurm]\npartition = '{partition}'\n")
        submission = prepare(parser().parse_args(["submit", str(path)]), Site())
        if nodes == most:
            await with_shape(submission, slurm)
            continue
        with pytest.raises(WrongInput, match=rf"nodes \+ spares = {nodes} \+ 0 = {nodes}: .* has {most} nodes"):
            await with_shape(submission, slurm)


async def test_a_job_shrinks_to_the_copies_that_start_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"{PLAIN}nodes = 16\n[parallelism]\ntensor = 16\n[placement]\nif_not_available = 'shrink'\n")
    submission = prepare(parser().parse_args(["submit", str(path)]), Site())
    found = await with_shape(submission, cluster("n0", "n4", "n5", "n9"))
    assert (found.job.nodes, found.job.axes.data, found.spec.nodes, found.spec.data_parallel) == (6, 3, 6, 3)
    assert "#SBATCH --nodes=6\n" in render(found)
    said = capsys.readouterr().err
    assert said.startswith("muster: shrinks to 3 of 8 data-parallel replicas, 6 of 16 nodes: they start now, all would")


@pytest.mark.parametrize("mode", ["wait", "relax", "shrink"])
async def test_a_job_that_has_to_wait_is_told_what_is_free(mode: str) -> None:
    of = job(8, "[parallelism]\ntensor = 32", f"[placement]\nif_not_available = '{mode}'")
    found = await allocate(of, asking(of), (), "#!/bin/bash\n", cluster("n0", "n4", "n5", "n9"))
    assert found.warnings == ("free now: 12 of 16 nodes: 4 in s3, 3 in s0, 3 in s2, 2 in s1",)
    idle = await allocate(of, asking(of), (), "#!/bin/bash\n", cluster())
    assert idle.warnings == ()


def test_free_nodes_are_those_of_the_partition_that_can_start_a_job() -> None:
    def node(name: str, *states: NodeState, partition: str = "gpu") -> Node:
        return Node(name, frozenset(states), partitions=(partition,))

    nodes = [
        node("n0", NodeState.IDLE),
        node("n1", NodeState.IDLE, NodeState.DRAIN),
        node("n2", NodeState.ALLOCATED),
        node("n4", NodeState.IDLE, NodeState.PLANNED),
        node("n5", NodeState.IDLE, partition="other"),
    ]
    assert in_words(TREE, nodes, "gpu") == "free now: 2 of 4 nodes: 1 in s0, 1 in s1"
    assert in_words(BLOCKS, nodes, None) == "free now: 3 of 5 nodes: 2 in s1, 1 in s0"
    assert in_words(SlurmTopology(Kind.FLAT), nodes, None) == "free now: 3 of 5 nodes"
    assert in_words(TREE, nodes[1:3], "gpu") == "free now: 0 of 2 nodes"


@pytest.mark.parametrize(
    ("packed", "keys", "busy", "sent"),
    [
        ("prefer leaf", "", (), ("", 0, [])),
        ("require leaf", "", (), ("wait", 3, [])),
        ("prefer leaf", "if_not_available = 'wait'\nretries = 9", (), ("wait", 9, [])),
        ("require leaf", "if_not_available = 'relax'", (), ("", 0, [])),
        ("prefer leaf", "if_not_available = 'shrink'", (), ("shrink", 3, [2, 4, 6])),
        # What the job takes on a fragmented cluster is what Slurm is asked for: nothing better comes of another try.
        ("prefer leaf", "", ("n0", "n4", "n8", "n12"), ("", 0, [])),
        # A leaf has 4 nodes: Slurm can't be asked for more.
        ("prefer pod", "if_not_available = 'wait'", (), ("", 0, [])),
        # The user's own request.
        ("prefer leaf", "if_not_available = 'wait'\n[slurm]\nswitches = '2'", (), ("wait", 3, [])),
        ("require leaf", "[slurm]\nswitches = '2'", (), ("wait", 3, [])),
    ],
)
async def test_the_coordinator_knows_what_follows_if_slurm_hands_out_worse_nodes(
    tmp_path: Path, packed: str, keys: str, busy: tuple[str, ...], sent: tuple[str, int, list[int]]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"{PLAIN}nodes = 8\n[parallelism]\ntensor = 16\n[placement]\ntensor = '{packed}'\n{keys}\n")
    submission = prepare(parser().parse_args(["submit", str(path)]), Site())
    wire = (await with_shape(submission, cluster(*busy))).spec
    assert (wire.if_worse, wire.retries, list(wire.smaller)) == sent


@pytest.mark.parametrize(("nodes", "kept"), [(6, 6), (16, 12)])
async def test_a_job_without_larger_groups_shrinks_too(nodes: int, kept: int) -> None:
    of = job(nodes, "[placement]", "if_not_available = 'shrink'")
    found = await allocate(of, asking(of), (), f"#SBATCH --nodes={nodes}\n", cluster("n0", "n4", "n8", "n12"))
    assert (found.job.nodes, found.options) == (kept, ())


async def test_a_job_of_one_copy_waits() -> None:
    of = job(16, "[parallelism]\ntensor = 128", "[placement]\nif_not_available = 'shrink'")
    found = await allocate(of, asking(of), (), "#!/bin/bash\n", cluster("n0"))
    assert found.job is of
    assert found.reason.endswith("; not even one data-parallel replica would start now")


def test_smaller_jobs_are_valid_jobs() -> None:
    tables = ("[parallelism]\ntensor = 16", "[model]\nglobal_batch = 12")
    of = job(8, *tables).model_copy(update={"min_nodes": None})
    assert [(less.nodes, less.axes.data) for less in smaller_jobs(of)] == [(2, 1), (4, 2), (6, 3)]
    assert [less.nodes for less in smaller_jobs(job(4, "elastic = true", "min_nodes = 2"))] == [2, 3]
    assert smaller_jobs(tensor(4, 32)) == []
