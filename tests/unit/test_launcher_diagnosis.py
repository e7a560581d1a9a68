"""`muster diagnose`: what it concludes from what was measured, from the network and from the job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.sources.nesting import NodeSet, fabric_of
from muster.fabric.sources.tiers import Tiers
from muster.launcher.diagnosis import links, steps
from muster.launcher.diagnosis.advice import advice
from muster.launcher.diagnosis.as_json import to_dict
from muster.launcher.diagnosis.diagnosis import Diagnosis, Network, diagnose
from muster.launcher.diagnosis.links import Side, links_to_measure
from muster.launcher.diagnosis.screen import lines
from muster.launcher.diagnosis.seated_job import job_of, seated
from muster.launcher.diagnosis.show import as_reported
from muster.launcher.output.screen import Screen
from muster.launcher.plan.assumptions import PlanOptions
from muster.launcher.plan.hardware import load_table
from muster.launcher.plan.prepare import SlurmFabric, prepare
from muster.launcher.spec import spec
from muster.launcher.spec.estimate_tables import read_job, write_tables
from muster.launcher.spec.spec import Job
from muster.v1.api_pb2 import GangView, NodeView, RankView, RecoveryView
from muster.v1.common_pb2 import JobSpec
from muster.v1.diagnosis_pb2 import JobMeasurements, LinkRate, PastGeneration, RankStepTime

JOB = """
name = "trained"
nodes = 4
ranks_per_node = 2
command = ["true"]
run_dir = "/shared/trained"
[parallelism]
tensor = 4
[placement]
tensor = "require leaf"
[model]
parameters = 7e9
global_batch = 8
"""
LEAVES = {"s0": ("n0", "n1", "n2"), "s1": ("n3", "n4", "n5")}
EVERY = [node for nodes in LEAVES.values() for node in nodes]


def network(speeds_known: bool = False) -> Network:
    """Six nodes on two leaves."""
    sets = [NodeSet(frozenset(nodes), name) for name, nodes in LEAVES.items()]
    fabric = fabric_of([*sets, NodeSet(frozenset(EVERY), "spine")], EVERY, Tiers())
    return Network(fabric, "a test's", speeds_known)


def job(text: str = JOB) -> Job:
    return spec.parse(text, "job.toml")


def wire(of: Job) -> JobSpec:
    found = of.to_proto("/tmp")
    found.estimate_tables = write_tables(of)
    return found


def measured(nodes: Sequence[str], of: Job | None = None, **more: Any) -> JobMeasurements:
    """A gang with two ranks on each of the nodes, and a spare on n5."""
    of = of or job()
    ranks = [RankView(rank=rank, node=nodes[rank // 2], state="running") for rank in range(2 * len(nodes))]
    views = [NodeView(node=node, verdict="FIT", role="rank", agent_attached=True) for node in nodes]
    spare = NodeView(node="n5", verdict="FIT", role="spare", agent_attached=True)
    gang = GangView(
        gang_id="g1", name=of.name, slurm_job_ids=[7], phase="RUNNING", generation=2, ranks=ranks, nodes=[*views, spare]
    )
    return JobMeasurements(gang=gang, spec=wire(of), **more)


def found(nodes: Sequence[str], of: Job | None = None, **more: Any) -> Diagnosis:
    """The diagnosis with a prediction."""
    of = of or job()
    there, where = measured(nodes, of, **more), network()
    plan = prepare(of, PlanOptions(), load_table(), SlurmFabric(where.fabric, where.fabric.nodes, False), "").plan
    return diagnose(there, seated(there, of, where.fabric, 8), where, plan, [])


def rate(sender: str, receiver: str, mb_s: float, *, requested: bool = True) -> LinkRate:
    return LinkRate(from_node=sender, to_node=receiver, bytes=int(mb_s * 1e6), seconds=1.0, requested=requested)


def test_groups_where_they_should_be_are_as_asked() -> None:
    packed = found(["n0", "n1", "n3", "n4"])
    assert [(kind.kind, kind.asked, kind.loosest, kind.torn) for kind in packed.kinds] == [
        (GroupKind.TENSOR, Level.LEAF, Level.LEAF, 0),
        (GroupKind.DATA, Level.ANY, Level.ANY, 0),
    ]
    assert packed.torn == []
    assert advice(packed) == []
    assert "2 tensor groups of 4 ranks: in a leaf at most, as asked" in "\n".join(lines(packed, Screen(200)))


def test_what_the_loss_shows_is_said_once() -> None:
    there = found(["n0", "n1", "n3", "n4"])
    gang = there.measured.gang
    assert not any(line.startswith("loss") for line in lines(there, Screen(200)))
    assert (to_dict(there)["not_finite"], to_dict(there)["last_loss"]) == (None, None)
    gang.not_finite, gang.last_loss = "loss = nan in step 9", "the loss has a spike at step 5"
    said = "\n".join(lines(there, Screen(200)))
    assert "\nloss       loss = nan in step 9\n" in said
    assert "the loss has a spike at step 5\n" in said
    assert to_dict(there)["last_loss"] == "the loss has a spike at step 5"
    gang.phase, gang.final, gang.reason = "FAILED", True, f"the job was stopped: {gang.last_loss}"
    assert "\n".join(lines(there, Screen(200))).count(gang.last_loss) == 1


def test_groups_may_be_packed_in_the_nvlink_domains_that_nodes_report() -> None:
    of = job(JOB.replace("require leaf", "prefer nvlink"))
    there = measured(["n0", "n1", "n3", "n4"], of)
    for rank in there.gang.ranks:
        rank.nvlink_domain = "a.1" if rank.node in ("n0", "n1") else ""
    where = replace(network(), fabric=as_reported(network().fabric, there.gang))
    assert where.fabric.level_between("n0", "n1") is Level.NVLINK
    (group,) = diagnose(there, seated(there, of, where.fabric, 8), where, None, []).torn
    assert (group.nodes, group.asked, group.found) == (("n3", "n4"), Level.NVLINK, Level.LEAF)


def test_adapters_that_nodes_report_as_slow_count_in_the_prediction() -> None:
    there = measured(["n0", "n1", "n3", "n4"])
    there.gang.nodes[3].adapter_bandwidth = 1e9
    where = replace(network(), fabric=as_reported(network().fabric, there.gang))
    assert where.fabric.link("n3", "n4").bandwidth == 1e9
    assert where.fabric.link("n0", "n1").bandwidth > 1e9


def test_a_torn_group_is_named_with_its_ranks_nodes_switches_and_cost() -> None:
    torn = found(["n0", "n3", "n1", "n2"])
    (group,) = torn.torn
    assert (group.name, group.ranks, group.nodes) == ("tensor group 0", (0, 1, 2, 3), ("n0", "n3"))
    assert (group.asked, group.found, group.switches) == (Level.LEAF, Level.ANY, ("s0", "s1", "spine"))
    assert group.factor > 1
    assert group.extra_s > 0
    text = "\n".join(lines(torn, Screen(200)))
    assert (
        "2 tensor groups of 4 ranks: 1 WIDER THAN ASKED, over the network at most; the job requires: in a leaf" in text
    )
    assert "tensor group 0 (ranks 0 to 3) on n[0,3], over s0, s1, spine" in text
    assert any(line.startswith('tensor groups: submit with --placement.tensor="require leaf"') for line in advice(torn))


@given(st.data())
def test_what_is_torn_costs_and_what_is_packed_does_not(data: st.DataObject) -> None:
    tensor, context, pipeline, copies = (data.draw(st.sampled_from([1, 2, 3])) for _ in range(4))
    local = data.draw(st.sampled_from([1, tensor]))
    count = tensor * context * pipeline * copies // local
    text = f'name = "a"\nnodes = {count}\nranks_per_node = {local}\ncommand = "true"\nrun_dir = "/r"\n'
    of = job(f"{text}[parallelism]\ntensor = {tensor}\ncontext = {context}\npipeline = {pipeline}\n")
    names = [f"n{number}" for number in range(count + 2)]
    size = data.draw(st.integers(1, 6))
    sets = [NodeSet(frozenset(names[at : at + size]), f"s{at}") for at in range(0, len(names), size)]
    fabric = fabric_of([*sets, NodeSet(frozenset(names), "spine")], names, Tiers())
    there = measured(["n0"], of)
    del there.gang.ranks[:]
    for rank, node in enumerate(node for node in data.draw(st.permutations(names))[:count] for _ in range(local)):
        there.gang.ranks.add(rank=rank, node=node)
    where = Network(fabric, "a test's", speeds_known=False)
    shown = to_dict(diagnose(there, seated(there, of, fabric, 1), where, None, []))
    assert sum(kind["wider"] for kind in shown["groups"]) == len(shown["torn_groups"])
    for group in shown["torn_groups"]:
        assert group["extra_s"] >= 0
        assert group["factor"] >= 1
        assert len(group["nodes"]) > 1
        assert not any(set(group["nodes"]) <= one.nodes for one in sets) or group["asked"] in ("node", "nvlink")
    json.dumps(shown)


def test_a_slow_sender_is_told_from_a_slow_link() -> None:
    well = [rate(a, b, 900) for a in EVERY for b in EVERY if a != b]
    of_n3 = [rate("n3", one.to_node, 20) if one.from_node == "n3" else one for one in well]
    slow = found(["n0", "n1", "n3", "n4"], links=of_n3)
    assert [(one.nodes, one.side, one.transfers) for one in slow.slow] == [(("n3",), Side.SENDS, 5)]
    assert slow.passing == [(GroupKind.TENSOR, GroupKind.DATA)]
    text = "\n".join(lines(slow, Screen(200)))
    assert "SLOW: n3 sends slowly, 20 MB/s; such transfers usually reach 900 MB/s" in text
    assert "tensor and data groups wait for it in each step" in text
    assert "muster swap 7 n3" in advice(slow)[0]
    one_pair = [rate("n3", "n0", 20) if (one.from_node, one.to_node) == ("n3", "n0") else one for one in well]
    slow = found(["n0", "n1", "n3", "n4"], links=one_pair)
    assert [(one.nodes, one.side, one.level) for one in slow.slow] == [(("n3", "n0"), Side.BETWEEN, Level.ANY)]
    assert slow.passing == [(GroupKind.DATA,)]
    both = [rate("n0", "n3", 90) if (one.from_node, one.to_node) == ("n0", "n3") else one for one in one_pair]
    slow = found(["n0", "n1", "n3", "n4"], links=both)
    assert [(one.nodes, one.side, one.transfers) for one in slow.slow] == [(("n3", "n0"), Side.BETWEEN, 2)]


def test_a_slow_copy_between_buddies_names_the_link_and_asks_to_measure() -> None:
    copies = [rate(a, b, 300, requested=False) for a, b in (("n0", "n1"), ("n1", "n3"), ("n4", "n0"))]
    slow = found(["n0", "n1", "n3", "n4"], links=[*copies, rate("n3", "n4", 10, requested=False)])
    assert [(one.nodes, one.side) for one in slow.slow] == [(("n3", "n4"), Side.BETWEEN)]
    assert advice(slow) == ["n3 to n4: find the end that is slow: muster diagnose 7 --measure"]


def test_requested_transfers_and_copies_are_not_compared() -> None:
    copies = [rate(a, b, 200, requested=False) for a, b in (("n0", "n1"), ("n1", "n3"), ("n3", "n4"))]
    quick = [rate(a, b, 2000) for a, b in (("n0", "n1"), ("n1", "n3"), ("n3", "n4"), ("n4", "n0"))]
    assert found(["n0", "n1", "n3", "n4"], links=[*copies, *quick]).slow == []


def test_a_rating_of_the_site_judges_a_single_transfer() -> None:
    def rating(sender: str, receiver: str) -> float:
        return 1e9

    level = network().fabric.level_between
    (slow,) = links.slow_links(links.judged([rate("n0", "n1", 100)], level, rating))
    assert (slow.nodes, slow.usual) == (("n0", "n1"), 1e9)
    assert links.slow_links(links.judged([rate("n0", "n1", 800)], level, rating)) == []
    # So does the negotiated speed of the interfaces.
    one = rate("n0", "n1", 100)
    one.rated = 1.25e9
    (slow,) = links.slow_links(links.judged([one], level, lambda *_: None))
    assert slow.usual == 1.25e9
    # Without one, nothing is known of a single transfer.
    assert links.slow_links(links.judged([rate("n0", "n1", 100)], level, lambda *_: None)) == []


def test_where_cores_are_shared_a_transfer_must_be_slower_to_count() -> None:
    level = network().fabric.level_between
    rates = [rate(a, b, 900) for a, b in (("n1", "n2"), ("n2", "n0"), ("n3", "n4"))]
    for mb_s, shared, slow in ((300, False, 1), (300, True, 0), (100, True, 1)):
        one = rate("n0", "n1", mb_s)
        one.cores_shared = shared
        assert len(links.slow_links(links.judged([*rates, one], level, lambda *_: None))) == slow


NAMES = [f"n{number}" for number in range(40)]


@given(st.integers(3, 40), st.data())
def test_the_measured_links_name_the_side_of_any_one_node(count: int, data: st.DataObject) -> None:
    nodes = NAMES[:count]
    bad, side = data.draw(st.sampled_from(nodes)), data.draw(st.sampled_from([Side.SENDS, Side.RECEIVES]))
    pairs = list(links_to_measure(nodes, ()))
    assert len(pairs) == len(set(pairs)) <= 2 * count
    usual = data.draw(st.lists(st.floats(800, 1200), min_size=len(pairs), max_size=len(pairs)))
    rates = [
        rate(one, other, speed / 20 if bad == (one if side is Side.SENDS else other) else speed)
        for (one, other), speed in zip(pairs, usual, strict=True)
    ]
    fabric = fabric_of([], nodes, Tiers())
    (slow,) = links.slow_links(links.judged(rates, fabric.level_between, lambda *_: None))
    assert (slow.nodes, slow.side) == ((bad,), side)


def test_suspected_nodes_are_measured_first() -> None:
    pairs = list(links_to_measure(NAMES[:8], {"n6"}))
    assert all("n6" in pair for pair in pairs[:4])
    assert sorted(pairs) == sorted(links_to_measure(NAMES[:8], ()))


def times(*ranks: tuple[float, float]) -> list[RankStepTime]:
    return [RankStepTime(rank=at, compute_s=compute, wait_s=wait) for at, (compute, wait) in enumerate(ranks)]


def test_the_rank_that_the_others_wait_for_is_named_and_the_network_is_not_blamed() -> None:
    slow = found(["n0", "n1", "n3", "n4"], step_s=1.5, ranks=times((1.0, 0.5), (1.0, 0.5), (1.4, 0.1), (1.0, 0.5)))
    assert slow.slowest
    assert (slow.slowest.rank, slow.slowest.node) == (2, "n1")
    text = "\n".join(lines(slow, Screen(200)))
    assert "speaks of  a node, not the network: the others wait for rank 2 on n1" in text
    assert found(["n0", "n1", "n3", "n4"], step_s=1.5, ranks=times(*[(1.0, 0.5)] * 4)).slowest is None


def test_ranks_that_wait_for_data_are_told_from_those_that_compute() -> None:
    ranks = times(*[(1.0, 0.0)] * 4)
    text = "\n".join(lines(found(["n0", "n1", "n3", "n4"], step_s=1.0, ranks=ranks), Screen(200)))
    assert "the wait for data is a part of compute: the script does not declare it" in text
    ranks[1].fetch_s, ranks[2].fetch_s = 0.1, 0.4
    waiting = found(["n0", "n1", "n3", "n4"], step_s=1.0, ranks=ranks)
    assert "of compute, 400 ms wait for data (40.0 %), on the rank that waits longest" in "\n".join(
        lines(waiting, Screen(200))
    )
    assert advice(waiting) == ["ranks wait for data in 40.0 % of a step: more workers that load it, or faster storage"]


def test_the_wait_speaks_of_the_tier_that_predicts_it() -> None:
    there = found(["n0", "n1", "n3", "n4"])
    assert there.prediction
    by_tier = there.prediction.by_tier
    assert list(by_tier) == [Level.NODE, Level.LEAF, Level.ANY]
    assert by_tier[Level.NODE] < by_tier[Level.LEAF]
    for level in (Level.NODE, Level.ANY):
        assert steps.tier_of_wait(by_tier[level] * 1.05, by_tier) is level
    assert steps.tier_of_wait(10 * max(by_tier.values()), by_tier) is None
    assert steps.tier_of_wait(0.0, by_tier) is None


def test_a_job_without_groups_that_sum_gradients_says_so() -> None:
    text = JOB.replace("nodes = 4", "nodes = 2")
    one = found(["n0", "n1"], job(text), step_s=1.0, ranks=times(*[(0.8, 0.2)] * 4))
    shown = "\n".join(lines(one, Screen(200)))
    assert "1 tensor group of 4 ranks: in a leaf, as asked" in shown
    assert "speaks of  no tier: its groups sum no gradients" in shown


def test_a_wait_that_no_tier_explains_speaks_of_the_slow_link() -> None:
    well = [rate(a, b, 900) for a in EVERY for b in EVERY if a != b]
    of_n3 = [rate("n3", one.to_node, 9) if one.from_node == "n3" else one for one in well]
    slow = found(["n0", "n1", "n3", "n4"], step_s=9.0, ranks=times(*[(0.5, 400.0)] * 8), links=of_n3)
    assert slow.prediction
    assert slow.prediction.over_slow > 10 * max(slow.prediction.by_tier.values())
    assert "speaks of  the slow link, not a tier: gradients at its speed take" in "\n".join(lines(slow, Screen(200)))
    less = found(["n0", "n1", "n3", "n4"], step_s=1.0, ranks=times(*[(0.5, 0.1)] * 8), links=of_n3)
    assert "speaks of  no tier: a wait of 100 ms is longer than" in "\n".join(lines(less, Screen(200)))


def test_an_earlier_run_that_was_faster_is_named() -> None:
    march = PastGeneration(slurm_job_id=3, generation=1, step_s=0.6, best_step_s=0.55, best_s=1.7e9, same_settings=True)
    other = PastGeneration(slurm_job_id=2, generation=1, step_s=0.1, best_step_s=0.1, best_s=1.7e9)
    slower = found(["n0", "n1", "n3", "n4"], step_s=1.0, ranks=times(*[(0.8, 0.2)] * 4), past=[march, other])
    assert slower.earlier
    assert slower.earlier.share == pytest.approx(0.55)
    text = "\n".join(lines(slower, Screen(200)))
    assert "it reaches 55.0 % of the speed that it had: 550 ms a step in job 3, generation 1, 2023-11-1" in text
    assert "1 earlier generations had other settings, and are not compared" in text
    assert advice(slower) == ["measure its links: muster diagnose 7 --measure"]


def test_what_is_not_known_is_said() -> None:
    plain = job('name = "a"\nnodes = 4\nranks_per_node = 2\ncommand = "true"\nrun_dir = "/r"\n')
    there = measured(["n0", "n1", "n3", "n4"], plain)
    where = network()
    text = "\n".join(lines(diagnose(there, seated(there, plain, where.fabric, 8), where, None, ["x: y"]), Screen(200)))
    assert "not known  x: y" in text
    assert "the time of a step: its ranks have reported too few steps" in text
    assert "what links carry: no copy of a checkpoint between nodes was large enough" in text
    assert "change     nothing: nothing that was measured is slow or misplaced" in text
    there.gang.final, there.gang.phase = True, "DONE"
    there.past.add(gang_id="g1", generation=2, step_s=0.5, ended_s=1.7e9)
    text = "\n".join(lines(diagnose(there, None, where, None, []), Screen(200)))
    assert "how fast it is now: it is DONE, and no rank trains" in text
    assert "its last generation, 2, took 500 ms a step, until 2023-11-1" in text


def test_json_has_all_and_is_json() -> None:
    slow = found(["n0", "n3", "n1", "n2"], step_s=1.0, ranks=times(*[(0.8, 0.2)] * 8), links=[rate("n0", "n1", 5)])
    shown = json.loads(json.dumps(to_dict(slow)))
    assert shown["torn_groups"][0]["nodes"] == ["n0", "n3"]
    (link,) = shown["links"]
    assert link["rated_bytes_per_s"] is None
    assert (link["from"], link["to"], link["level"], link["bytes_per_s"]) == ("n0", "n1", "leaf", 5e6)
    assert (link["usual_bytes_per_s"], link["slow"], link["requested"]) == (None, False, True)
    assert shown["predicted"]["step_s"] > shown["predicted"]["planned_step_s"]
    assert shown["change"] == advice(slow)


def test_a_job_comes_back_from_the_wire_as_far_as_estimates_need_it() -> None:
    text = JOB + 'precision = "fp8"\n[slurm]\npartition = "gpus"\ngres = "gpu:h100:2"\noptions = ["--nice=1"]\n'
    before = job(text.replace('command = ["true"]', 'command = ["true"]\nenv = {TOKEN = "s3cret"}'))
    sent = wire(before)
    assert "s3cret" not in sent.estimate_tables
    assert "nice" not in sent.estimate_tables
    after = job_of(sent)
    assert after
    for name in ("nodes", "local_ranks", "axes", "model", "parallelism", "placement"):
        assert getattr(after, name) == getattr(before, name)
    assert (after.slurm.partition, after.gres) == ("gpus", "gpu:h100:2")


def test_without_tables_the_degrees_and_packings_are_taken_from_the_spec() -> None:
    sent = job().to_proto("/tmp")
    sent.traffic.add(kind="tensor", packed_in="leaf", required=True)
    sent.traffic.add(kind="expert data", packed_in="any")
    after = job_of(sent)
    assert after
    assert (after.axes.tensor, after.axes.data) == (4, 2)
    assert str(after.placement.tensor) == "require leaf"
    for hostile in ("[1]", "{", "null", '{"model": {"layers": "x"}}', '{"model": 3}', "[" * 100_000):
        assert job_of(JobSpec(name="a", nodes=4, ranks_per_node=2, estimate_tables=hostile)) is None
    assert job_of(JobSpec()) is None
    assert read_job(JobSpec(name="a", estimate_tables='{"model": {"layers": 3}}'))["model"] == {"layers": 3}


def test_a_gang_with_fewer_replicas_has_smaller_groups() -> None:
    elastic = job('name = "a"\nnodes = 4\nelastic = true\nranks_per_node = 2\ncommand = "true"\nrun_dir = "/r"\n')
    there = measured(["n0", "n1", "n3"], elastic)
    here = seated(there, elastic, network().fabric, 8)
    assert here
    assert here.groups(GroupKind.DATA) == ((0, 1, 2, 3, 4, 5),)
    strange = Fabric(fabric_of([], ["x"], Tiers()).root)
    assert seated(there, elastic, strange, 8) is None


def test_a_job_without_the_library_is_told_what_it_would_have_saved_in_its_own_last_recovery() -> None:
    """Of the first recovery nobody asks, and of a job that says its steps all is known that its advice could name."""
    first = RecoveryView(detected_s=600.0, fenced_s=600.5, started_s=601.0, running_s=602.0)
    newest = RecoveryView(suspected_s=962.0, detected_s=962.2, fenced_s=962.5, started_s=963.0, running_s=964.1)
    silent = found(["n0", "n1"])
    silent.measured.gang.generation = 3
    silent.measured.gang.ClearField("step")
    assert not [line for line in advice(silent) if "library" in line]
    silent.measured.gang.recoveries.extend((first, newest))
    (line,) = [line for line in advice(silent) if "library" in line]
    assert line.startswith("keep its state: the last recovery took 2.1 s until its ranks ran again (")
    assert "Of the 6 min that they had run before, what the script had not saved is trained again" in line
    del silent.measured.gang.recoveries[0]
    silent.measured.gang.run_started_s = 0  # it has ended
    silent.measured.gang.goodput.since_s = 842.0
    assert "Of the 2 min that they had run before" in next(line for line in advice(silent) if "library" in line)
    silent.measured.gang.step = 7
    assert not [line for line in advice(silent) if "library" in line]
