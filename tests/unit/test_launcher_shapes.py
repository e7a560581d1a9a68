"""What Slurm is asked for on trees with pods, on rack-scale blocks, tori and rings."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from muster.daemon.transport.site_config import Site
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.fabric import FailureDomain
from muster.fabric.model.level import Level
from muster.fabric.sources.slurm_topology import Kind, SlurmTopology, Unit
from muster.launcher.allocation.ask import allocate, asking
from muster.launcher.allocation.clusters import PackedPieces
from muster.launcher.allocation.plan import RequestOptions, check_spread, doubts
from muster.launcher.allocation.request import plan_request
from muster.launcher.allocation.site_domains import NOTHING_SAID, SiteDomains, load_domains, names_of
from muster.launcher.commands.submit import prepare, with_shape
from muster.launcher.errors import WrongInput
from muster.launcher.fabric import ReportedDomains
from muster.launcher.main import parser
from muster.launcher.plan.foresight import foresee
from muster.launcher.spec.spec import Job, parse
from muster.launcher.submission.refusals import hint_for
from muster.launcher.submission.script import render
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.slurm.client.parsing.sbatch_request import read_request
from muster.slurm.client.sbatch_options import read_words
from muster.slurm.client.states import NodeState
from muster.slurm.client.types import Node

PLAIN = """
name = "tiny"
command = "true"
run_dir = "/shared/run"
gpus_per_node = 4
"""


def numbered(first: int, count: int) -> tuple[str, ...]:
    return tuple(f"n{at}" for at in range(first, first + count))


def job(nodes: int, *tables: str, spares: int = 0) -> Job:
    return parse("\n".join([PLAIN, f"nodes = {nodes}", f"spares = {spares}", *tables]), "job.toml")


def plan(of: Job, topology: SlurmTopology, site: SiteDomains = NOTHING_SAID) -> RequestOptions:
    return plan_request(asking(of), of.nodes, of.spares, topology, 300, site)


# -- pods of a tree --

LEAVES = tuple(Unit(f"s{at}", numbered(4 * at, 4)) for at in range(8))
PODS = tuple(Unit(f"p{at}", numbered(8 * at, 8)) for at in range(4))
TREE = SlurmTopology(Kind.TREE, (*LEAVES, *PODS, Unit("spine", numbered(0, 32))))
IN_POD = '[placement]\ntensor = "require pod"\n[parallelism]\ntensor = 32'


def test_a_required_pod_excludes_the_nodes_of_all_others() -> None:
    found = plan(job(8, IN_POD), TREE)
    options = [request.options for request in (found.strict, *found.others)]
    assert options == [
        ("--exclude=n[8-31]",),
        ("--exclude=n[0-7,16-31]",),
        ("--exclude=n[0-15,24-31]",),
        ("--exclude=n[0-23]",),
    ]
    assert found.strict.words == "nodes of pod p0"
    assert found.required
    assert found.relaxed[0].options == ()


def test_a_preferred_pod_is_not_worth_a_list_of_nodes() -> None:
    """It would keep the job in one pod for good, also if that pod is full after a requeue."""
    found = plan(job(8, IN_POD.replace("require", "prefer")), TREE)
    assert (found.strict.options, found.others) == ((), ())
    assert found.notes == ("tensor groups shall be within one pod: 1 times 8 nodes; Slurm has no option for that on a "
                           "tree but a list of nodes",)  # fmt: skip


def test_leaves_and_a_pod_are_asked_for_together() -> None:
    tables = ('[parallelism]\ntensor = 8\npipeline = 2\n[placement]\ntensor = "leaf"\npipeline = "require pod"',)
    found = plan(job(4, *tables), TREE)
    assert found.strict.options == ("--switches=1@0:05:00", "--exclude=n[8-31]")
    assert found.strict.words == "at most 1 leaf switch of pod p0"


def test_a_job_of_several_pods_is_checked_before_its_start() -> None:
    tables = ('[parallelism]\ntensor = 16\n[placement]\ntensor = "require pod"',)
    found = plan(job(16, *tables), TREE)
    assert found.strict.options == ()
    assert found.required
    assert found.notes[-1].endswith("Slurm has no option for that on a tree: it is checked before the start")


def test_a_group_that_is_larger_than_a_pod_is_refused() -> None:
    with pytest.raises(WrongInput, match=r"'require pod' can't be kept: 1 times 12 nodes .* 4 pods of at most 8 nodes"):
        plan(job(12, '[parallelism]\ntensor = 48\n[placement]\ntensor = "require pod"'), TREE)


def test_a_tree_of_two_tiers_is_one_pod() -> None:
    two = SlurmTopology(Kind.TREE, (*LEAVES[:2], Unit("spine", numbered(0, 8))))
    assert plan(job(8, IN_POD), two).strict.options == ()


async def test_the_pod_in_which_the_job_starts_first_is_taken() -> None:
    class Tree(FakeSlurm):
        async def topologies(self, *, timeout_s: float = 5.0) -> tuple[SlurmTopology, ...]:
            return (TREE,)

    cluster = FakeCluster(numbered(0, 32), now=time.time)
    for node in ("n0", "n9", "n31"):  # one of each pod but p2
        cluster.submit(read_request("", (f"--nodelist={node}", "--time=30"), "/"))
    of = job(8, IN_POD)
    found = await allocate(of, asking(of), (), "#!/bin/bash\n", Tree(cluster))
    assert found.options == ("--exclude=n[0-15,24-31]",)


# -- racks --

RACKS = SlurmTopology(
    Kind.BLOCK,
    (
        *(Unit(f"b{at}", numbered(18 * at, 18)) for at in range(8)),
        *(Unit(f"b[{at}-{at + 3}]", numbered(18 * at, 72), aggregated=True) for at in (0, 4)),
    ),
    base_block=18,
)


@pytest.mark.parametrize(
    ("nodes", "spares", "options", "added"),
    [
        (2, 0, ("--segment=1",), 0),
        (4, 0, ("--segment=4",), 0),
        (12, 0, ("--segment=4",), 0),
        (16, 0, ("--segment=16",), 0),
        (32, 0, ("--segment=16",), 0),
        (30, 0, ("--segment=16",), 2),  # two spares are worth it
        (62, 2, ("--segment=16",), 0),
        (40, 0, ("--segment=4",), 0),  # eight are not
        (13, 0, ("--segment=1",), 0),
        (15, 0, ("--segment=4",), 1),
        (128, 0, ("--segment=16",), 0),
    ],
)
def test_jobs_in_racks_have_segments_by_size(nodes: int, spares: int, options: tuple[str, ...], added: int) -> None:
    found = plan(job(nodes, spares=spares), RACKS).strict
    assert (found.options, found.spares) == (options, spares + added)
    assert (nodes + found.spares) % int(options[0].partition("=")[2]) == 0


def test_groups_within_racks_have_the_segment_that_they_ask_for() -> None:
    of = job(24, "[parallelism]\ntensor = 24")  # 6 nodes
    assert plan(of, RACKS).strict.options == ("--segment=6",)


def test_pipelines_in_pods_are_content_with_a_rack_segment() -> None:
    of = job(32, "[parallelism]\ntensor = 4\npipeline = 4")  # neighbouring stages shall be within one pod
    assert plan(of, RACKS).strict.options == ("--segment=16",)


def test_a_job_in_racks_relaxes_by_size() -> None:
    assert [one.options for one in plan(job(32), RACKS).relaxed] == [("--segment=4",), ("--segment=1",)]
    assert [one.options for one in plan(job(30), RACKS).relaxed] == [("--segment=1",)]


def test_other_blocks_are_no_racks_unless_the_site_says_so() -> None:
    small = SlurmTopology(Kind.BLOCK, (Unit("b0", numbered(0, 8)), Unit("b1", numbered(8, 8))), base_block=8)
    assert plan(job(8), small).strict.options == ()
    assert plan(job(8), small, SiteDomains(nvlink_blocks=True)).strict.options == ("--segment=4",)


# -- tori and rings --

TORUS = SlurmTopology(
    Kind.TORUS,
    (Unit("t0", numbered(0, 16), (4, 2, 2), shapes=((1, 1, 1), (2, 2, 1), (4, 2, 1), (4, 2, 2))),),
)
RINGS = SlurmTopology(Kind.RING, (Unit("r0", numbered(0, 16)), Unit("r1", numbered(16, 4))))


def test_a_job_without_groups_is_told_the_sizes_of_a_torus() -> None:
    with pytest.raises(WrongInput) as refused:
        plan(job(5), TORUS)
    assert refused.value.message == "nodes + spares = 5: the torus takes jobs of these numbers of nodes: 1, 4, 8, 16"
    assert refused.value.hint == "choose spares = 3. Nothing was queued"
    with pytest.raises(WrongInput) as refused:
        plan(job(17), TORUS)
    assert refused.value.hint == "choose nodes + spares = 16 at most. Nothing was queued"
    assert plan(job(6, spares=2), TORUS).strict.spares == 2


def test_a_long_list_of_sizes_is_cut() -> None:
    shapes = tuple((size, 1, 1) for size in range(1, 101))
    many = SlurmTopology(Kind.TORUS, (Unit("t0", numbered(0, 100), (100, 1, 1), shapes=shapes),))
    with pytest.raises(WrongInput, match=r"numbers of nodes: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, \.\.\., 100$"):
        plan(job(101), many)


def test_a_job_is_in_one_ring() -> None:
    assert plan(job(16), RINGS).strict.options == ()
    with pytest.raises(WrongInput) as refused:
        plan(job(16, spares=1), RINGS)
    assert refused.value.message == "nodes + spares = 17: a job is in one ring, and the largest ring has 16 nodes"


async def test_a_job_without_groups_is_refused_before_it_is_queued(tmp_path: Path) -> None:
    class Torus(FakeSlurm):
        async def topologies(self, *, timeout_s: float = 5.0) -> tuple[SlurmTopology, ...]:
            return (TORUS,)

    path = tmp_path / "job.toml"
    path.write_text(f"{PLAIN}nodes = 3\n")
    submission = prepare(parser().parse_args(["submit", str(path)]), Site())
    slurm = Torus(FakeCluster(numbered(0, 16), now=time.time))
    with pytest.raises(WrongInput, match="the torus takes jobs of these numbers"):
        await with_shape(submission, slurm)


async def test_without_slurms_answer_a_job_without_groups_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"{PLAIN}nodes = 3\n")
    submission = prepare(parser().parse_args(["submit", str(path)]), Site())
    slurm = FakeSlurm(FakeCluster(numbered(0, 16), now=time.time))
    slurm.unavailable_reason = "slurmctld is silent"
    assert render(await with_shape(submission, slurm)) == render(submission)
    assert capsys.readouterr().err == ""


# -- spares near groups, and what else is known before a job is queued --

SMALL_LEAVES = SlurmTopology(Kind.TREE, (*LEAVES[:4], Unit("spine", numbered(0, 16))))


def pairs(nodes: int, spares: int) -> Job:
    return job(nodes, "[parallelism]\ntensor = 8", spares=spares)


def test_a_loss_that_no_spare_is_near_is_told() -> None:
    """Four leaves of four nodes: beside a spare, a leaf has room for one pair."""
    assert plan(pairs(8, 2), SMALL_LEAVES).losses == (
        "after the loss of a node, tensor groups may lie in two leaf switches: 2 spares can be near 2 of 4 pieces of 2 "
        "nodes; spares = 4 could, if Slurm gives each leaf switch one of them: on a tree, it decides that itself"
    )
    assert plan(pairs(8, 4), SMALL_LEAVES).losses == ""
    assert plan(pairs(8, 0), SMALL_LEAVES).losses == ""  # without a spare, no spare is near anything
    assert plan(pairs(12, 2), SMALL_LEAVES).losses.endswith(
        "no number of spares can, because a leaf switch has too little room"
    )


def test_segments_with_room_for_a_spare_are_near() -> None:
    blocks = SlurmTopology(Kind.BLOCK, tuple(Unit(f"b{at}", numbered(4 * at, 4)) for at in range(4)), base_block=4)
    found = plan(pairs(6, 3), blocks)
    assert (found.strict.options, found.losses) == (("--segment=3",), "")
    assert plan(pairs(6, 2), blocks).losses == (
        "after the loss of a node, tensor groups may lie in two blocks: spares are sure to be near 0 of 3 pieces of 2 "
        "nodes; spares = 3 are enough"
    )
    assert plan(pairs(8, 2), blocks).losses.endswith("near 0 of 4 pieces of 2 nodes; spares = 4 are enough")
    assert plan(pairs(8, 4), blocks).losses == ""
    assert plan(pairs(10, 2), blocks).losses.endswith("; in these blocks, no number of spares is enough")


@given(size=st.integers(2, 18), count=st.integers(1, 4), piece=st.integers(2, 9), data=st.data())
def test_as_many_spares_as_are_told_are_enough_on_blocks(
    size: int, count: int, piece: int, data: st.DataObject
) -> None:
    most = size * count // piece
    assume(piece <= size and most > 0)
    pieces = data.draw(st.integers(1, most))
    spares = data.draw(st.integers(1, 3))
    assume(piece * pieces + spares <= size * count)
    units = tuple(Unit(f"b{at}", numbered(size * at, size)) for at in range(count))
    blocks = SlurmTopology(Kind.BLOCK, units, base_block=size)
    groups = [PackedPieces(GroupKind.TENSOR, piece, pieces, Level.LEAF, False)]
    told = re.search(r"spares = (\d+) are enough", plan_request(groups, piece * pieces, spares, blocks, None).losses)
    if told:
        found = plan_request(groups, piece * pieces, int(told[1]), blocks, None)
        assert (found.losses, found.strict.spares) == ("", int(told[1]))


@pytest.mark.parametrize("topology", [TREE, RACKS, RINGS])
def test_a_job_that_is_larger_than_the_network_is_refused(topology: SlurmTopology) -> None:
    with pytest.raises(WrongInput, match=r"nodes \+ spares = 140 \+ 9 = 149: Slurm's network has \d+ nodes"):
        plan(job(140, spares=9), topology)


def test_nvlink_domains_of_the_site_count() -> None:
    of = job(4, '[parallelism]\ntensor = 16\n[placement]\ntensor = "require nvlink"')
    assert plan(of, TREE, SiteDomains(nvlink_sizes=(2, 4))).strict.options == ("--switches=1@0:05:00",)
    with pytest.raises(WrongInput, match=r"'require nvlink' can't be kept: 1 times 4 nodes .* 2 NVLink domains"):
        plan(of, TREE, SiteDomains(nvlink_sizes=(2, 2)))
    preferred = job(4, "[parallelism]\ntensor = 16")
    notes = plan(preferred, TREE, SiteDomains(nvlink_sizes=(2,))).notes
    assert notes[-1] == "tensor groups of 4 nodes are larger than the NVLink domains of the site"


IN_NVLINK = '[parallelism]\ntensor = 16\n[placement]\ntensor = "require nvlink"'


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((), "a group has 4 nodes, and no node reports an NVLink domain of several nodes"),
        ((2, 2), "a group has 4 nodes, and the largest NVLink domain that nodes report has 2 nodes"),
    ],
)
def test_nvlink_domains_that_no_node_reports_are_refused(sizes: tuple[int, ...], words: str) -> None:
    of = job(4, IN_NVLINK)
    with pytest.raises(WrongInput, match=words):
        plan(of, TREE, SiteDomains(reported=ReportedDomains(sizes)))
    # A node that has reported nothing may be in one: the job is queued with a word of warning.
    site = SiteDomains(reported=ReportedDomains(sizes, silent=3))
    assert plan(of, TREE, site).strict.options == ("--switches=1@0:05:00",)
    (doubt,) = doubts(site, asking(of))
    assert doubt.endswith("3 nodes have not reported theirs: on other nodes the job ends with exit code 92")


@pytest.mark.parametrize("site", [NOTHING_SAID, SiteDomains(reported=ReportedDomains((2, 4)))])
def test_nvlink_domains_that_may_be_large_enough_are_asked_for(site: SiteDomains) -> None:
    of = job(4, IN_NVLINK)
    assert plan(of, TREE, site).strict.options == ("--switches=1@0:05:00",)
    assert doubts(site, asking(of)) == []


@pytest.mark.parametrize(("packed", "calls"), [("require nvlink", 1), ("prefer nvlink", 0), ("require leaf", 0)])
async def test_nodes_are_asked_only_where_that_decides(packed: str, calls: int) -> None:
    asked = []

    async def reported() -> ReportedDomains:
        asked.append(1)
        return ReportedDomains((4,))

    class Tree(FakeSlurm):
        async def topologies(self, *, timeout_s: float = 5.0) -> tuple[SlurmTopology, ...]:
            return (TREE,)

    of = job(4, IN_NVLINK.replace("require nvlink", packed))
    await allocate(of, asking(of), (), "#!/bin/bash\n", Tree(FakeCluster(numbered(0, 32), now=time.time)), reported)
    assert len(asked) == calls


# -- racks and power feeds --

RACKS_OF_SITE = SiteDomains(apart={FailureDomain.RACK: 2, FailureDomain.POWER: 1})


@pytest.mark.parametrize(
    ("placement", "spares", "words"),
    [
        (
            'spread_spares = ["require rack"]',
            3,
            "placement.spread_spares = 'require rack' can't be kept: 3 spares need 3 racks, and the site has 2; choose "
            "'prefer rack' or fewer spares. Nothing was queued",
        ),
        (
            'spread_replicas = ["require power"]',
            0,
            "placement.spread_replicas = 'require power' can't be kept: a node and the holder of its second copy need "
            "2 power feeds, and the site has 1; choose 'prefer power'. Nothing was queued",
        ),
    ],
)
def test_what_the_racks_of_the_site_cannot_keep_apart_is_refused(placement: str, spares: int, words: str) -> None:
    of = job(4, f"[placement]\n{placement}", spares=spares)
    with pytest.raises(WrongInput) as refused:
        check_spread(of.placement, of.nodes, of.spares, RACKS_OF_SITE)
    assert f"{refused.value.message}; {refused.value.hint}" == words


@pytest.mark.parametrize("spread", ['spread_spares = ["require rack"]', 'spread_replicas = ["require rack"]', ""])
def test_what_the_racks_of_the_site_can_keep_apart_is_queued(spread: str) -> None:
    of = job(4, f"[placement]\n{spread}", spares=2)
    assert check_spread(of.placement, of.nodes, of.spares, RACKS_OF_SITE) == []


def test_racks_that_nobody_names_are_not_kept() -> None:
    of = job(4, '[placement]\nspread_spares = ["require rack"]', spares=2)
    (line,) = check_spread(of.placement, of.nodes, of.spares, NOTHING_SAID)
    assert line == "placement.spread_spares = 'require rack' is not kept: /etc/muster/fabric.toml names no racks"


def test_the_sites_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "fabric.toml"
    nodes = names_of((TREE,))
    assert load_domains(nodes, file) == NOTHING_SAID
    file.write_text('nvlink_blocks = true\n[nvlink]\nd1 = "n[0-3]"\nd2 = "n[4-5]"\n')
    assert load_domains(nodes, file) == SiteDomains(True, (4, 2))
    file.write_text('[racks]\nr1 = "n[0-3]"\nr2 = "n[4-29]"\n')
    assert load_domains(nodes, file).apart == {FailureDomain.RACK: 4}  # two nodes have no rack
    file.write_text('[switches.a]\nswitches = ["a"]\n')
    assert load_domains(nodes, file).problem.endswith("switches form a loop: a → a; a switch can't be below itself")
    assert load_domains(names_of((SlurmTopology(Kind.FLAT),)), file) == NOTHING_SAID


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("Invalid generic resource (gres) specification", "gpus_per_node = 4: no node has such a GRES."),
        ("Batch job submission failed: Invalid partition name specified", "--partition=gpu: sinfo -o %P"),
        ("Batch job submission failed: Invalid feature specification", "--constraint=h100: sinfo -o"),
        ("Batch job submission failed: Invalid node name specified", "--exclude=n99: Slurm does not have"),
        ("Batch job submission failed: Requested topology configuration is not available", "nodes + spares must be"),
        (
            "Batch job submission failed: Requested node configuration is not available",
            "too few nodes of",
        ),
        (
            "Batch job submission failed: Invalid account or account/partition combination specified",
            "sacctmgr show assoc",
        ),
        ("Batch job submission failed: Job violates nothing that is known", ""),
    ],
)
def test_refusals_have_hints(message: str, hint: str) -> None:
    options = read_words(["--constraint", "h100"])
    found = hint_for(message, job(2, '[slurm]\npartition = "gpu"\nexclude = "n99"'), options)
    assert found.startswith(hint)
    assert bool(found) == bool(hint)


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("Invalid partition name specified", "sinfo -o %P shows"),
        ("Invalid feature specification", "sinfo -o '%P %f'"),
        ("Invalid node name specified", "--exclude=n1 --nodelist=n2: Slurm does not have one of the nodes"),
        ("Requested reservation is invalid", "scontrol show reservation"),
        ("Unable to contact slurm controller (connect failure)", "check slurmctld with"),
        ("Invalid license specification", "scontrol show licenses"),
        ("Job dependency problem", "Slurm does not know the job"),
        ("Invalid Trackable RESource (TRES) specification", "gpus_per_node = 4: GPUs are written as gpu:COUNT"),
        ("Invalid --time specification", "times are written as MINUTES"),
    ],
)
def test_a_hint_names_all_options_that_can_be_meant_and_no_other(message: str, hint: str) -> None:
    assert hint_for(message, job(2), read_words(["--exclude", "n1", "--nodelist", "n2"])).startswith(hint)


NODE = Node("n0", frozenset({NodeState.IDLE}), gres="gpu:2", partitions=("main",))


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (job(2, '[slurm]\npartition = "gpu"'), ["Slurm has no partition 'gpu'; it has main"]),
        (
            job(2, '[slurm]\npartition = "main"'),
            ["gpus_per_node = 4: nodes in service of partition main have 2 GPUs at most"],
        ),
        (job(17, "[slurm]", "partition = 'main'"), [
            "gpus_per_node = 4: nodes in service of partition main have 2 GPUs at most",
            "muster submit refuses this job: nodes + spares = 17 + 0 = 17: Slurm's network has 16 nodes; choose 16 or "
            "less in all",
        ]),
    ],
)  # fmt: skip
def test_a_plan_foresees_what_submission_says(of: Job, words: list[str]) -> None:
    assert list(foresee(of, SMALL_LEAVES, NOTHING_SAID, [NODE], {"main"})) == words


def test_a_plan_foresees_losses() -> None:
    of = pairs(8, 2).model_copy(update={"gpus_per_node": None, "ranks_per_node": 4})
    (line,) = foresee(of, SMALL_LEAVES, NOTHING_SAID, [NODE], {"main"})
    assert line.startswith("after the loss of a node, tensor groups may lie in two leaf switches: 2 spares can be near")
