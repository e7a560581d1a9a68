"""Every screen of the commands that show more than a sentence, from the same made-up site: `SCREENS`.

Each entry draws its lines through the code of the command. `python tests/unit/screens.py [COLUMNS]` shows all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from datetime import UTC

from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.preflight.check_result import CheckResult, Outcome
from muster.fabric.model.fabric import Fabric
from muster.fabric.testing.generators import fat_tree
from muster.launcher.commands.events import event_lines
from muster.launcher.diagnosis import screen as diagnosis_screen
from muster.launcher.diagnosis.diagnosis import Network, diagnose
from muster.launcher.output.check_tables import check_table
from muster.launcher.output.fabric_tree import FabricPicture, JobUse, NodeUse, tree_lines
from muster.launcher.output.job_list import gang_list
from muster.launcher.output.job_screen import one_screen
from muster.launcher.output.node_tables import node_lines
from muster.launcher.output.screen import Screen
from muster.launcher.output.tables import gang_details
from muster.launcher.plan import screen as plan_screen
from muster.launcher.plan import unpriced
from muster.launcher.plan.assumptions import PlanOptions
from muster.launcher.plan.hardware import load_table
from muster.launcher.plan.prepare import PreparedPlan, prepare
from muster.launcher.policy.actions import sentences
from muster.launcher.policy.explanation import explain
from muster.launcher.spec import spec
from muster.slurm.client.parsing.hostlist import collapse
from muster.v1.api_pb2 import (
    CheckpointView,
    EventRecord,
    ExclusionView,
    GangView,
    GoodputView,
    NodeSpread,
    NodeView,
    RankView,
    RecoveryView,
    TrainingView,
)
from muster.v1.common_pb2 import CheckOutcome, NodeCheck, Version
from muster.v1.diagnosis_pb2 import JobMeasurements, RankStepTime

NOW = 1_800_000_000.0
LOST = "n1 is lost: agent and daemon silent to the coordinator and to other nodes"
EXITED = "rank 9 on node0007 exited with 1: RuntimeError: CUDA error: an illegal memory access was encountered"
UNCORRECTABLE = "Xid 95: uncontained memory error on GPU 0000:3b:00, and the driver asks for a reset of the GPU"
JOB = """
name = "pretraining-7b"
nodes = 4
ranks_per_node = 2
command = ["true"]
run_dir = "/shared/run"
[parallelism]
tensor = 4
[model]
parameters = 7e9
global_batch = 8
"""


def jobs(count: int) -> list[GangView]:
    """So many jobs, of which every fourth has ended, in no order."""
    return [_listed(number * 37 % count, number) for number in range(count)]


def _listed(job: int, number: int) -> GangView:
    view = GangView(
        gang_id=f"gang-{job:04}",
        name=("pretraining-7b", "sweep", "a-long-name-of-an-experiment-with-a-date-2027-01-15")[job % 3],
        slurm_job_ids=[40_000 + job, 50_000 + job] if job % 5 == 0 else [40_000 + job],
        phase=("RUNNING", "REQUEUED", "GATHERING", "FAILED")[job % 4],
        generation=job % 7,
        step=1000 * job,
        committed=Version(generation=job % 7, step=900 * job),
        recoveries=[RecoveryView()] * (number % 3),
    )
    if job % 4 == 1:
        view.waiting_for = f"Slurm to start job {40_000 + job} (ReqNodeNotAvail, Reserved for maintenance)"
    if job % 4 == 3:
        view.final, view.ended_s, view.exit_code, view.reason = True, NOW - 3600.0 * job, 1, EXITED
    return view


def gang(nodes: int, *, final: bool = False) -> GangView:
    """A job that has lost n1, and had a rank that exited twice."""
    view = GangView(
        gang_id="g20270115-080000-1000-pretraining-7b",
        name="pretraining-7b",
        slurm_job_ids=[42],
        phase="FAILED" if final else "RUNNING",
        generation=4,
        step=298,
        committed=Version(generation=4, step=297),
        final=final,
        exit_code=1 if final else 0,
        ended_s=NOW if final else 0.0,
        reason=EXITED if final else "",
        waiting_for="" if final else f"further nodes: ranks run on {nodes - 1} of {nodes}; requested: n1",
        run_dir="/shared/projects/language-models/runs/2027-01-15",
        ranks=[RankView(rank=rank, node=f"n{rank // 8}", state="running", step=298) for rank in range(8 * nodes)],
        nodes=[NodeView(node=f"n{at}", verdict="FIT", role="rank", agent_attached=True, musterd_attached=True,
                        heard_s_ago=0.4, warm=8, leaf=f"leaf{at // 16}") for at in range(nodes)],
        checkpoint=CheckpointView(every=1, stall_s=0.0356, cost=0.0031, durable_every_s=1800, flush_s=0.0356,
                                  flush_stall_s=0.0356, durable_path="/shared/checkpoints/step_00000297_g4_gang"),
    )  # fmt: skip
    if nodes:
        view.nodes[-1].MergeFrom(NodeView(verdict="LOST", role="out", reason=LOST))
        view.nodes.add(node="n999", verdict="FIT", role="out", failures=4, lemon=True, heard_s_ago=2.0,
                       reason=f"{UNCORRECTABLE}; in service again: Slurm has it in service")  # fmt: skip
        view.exclusions.extend([ExclusionView(node="n1", reason=LOST, at_s=NOW), ExclusionView(node="n7", reason=EXITED,
                                at_s=NOW, until_s=NOW + 600)])  # fmt: skip
        for at, cause in enumerate((LOST, EXITED, EXITED)):
            view.recoveries.add(generation=at + 2, action="restart in place", cause=cause, nodes_out=["n1"],
                                suspected_s=NOW + at, detected_s=NOW + at + 0.03, fenced_s=NOW + at + 1.26,
                                started_s=NOW + at + 2, running_s=NOW + at + 3, restored_s=NOW + at + 3.2,
                                first_step_s=NOW + at + 4.5, step_before=298, step_restored=297 + at)  # fmt: skip
    return view


def measured(nodes: int) -> GangView:
    """A job with all that can be known of one: it has swapped n1 for n999, and is watched 90 min later."""
    view = gang(nodes)
    view.phase_since_s, view.run_started_s, view.run_ends_s = NOW - 5400, NOW - 11_520, NOW + 74_880
    view.stop_s, view.after_stop, view.waiting_for = NOW + 74_280, "REQUEUED", ""
    view.if_node_fails = "a spare takes its place: 2 are left"
    kept = CheckpointView(committed_s=NOW - 12, durable_s=NOW - 840, copies=2, durable_loses_steps=8)
    view.checkpoint.MergeFrom(kept)
    training = TrainingView(steps_per_s=0.8, step_s=1.25, compute_s=1.125, wait_s=0.1, fetch_s=0.05, mfu=0.412,
                            tokens_per_gpu_s=3140.0, last_step=10_000, done_s=NOW + 12_128)  # fmt: skip
    view.training.MergeFrom(training)
    view.training.metrics.add(name="lr", step=298, ranks=8, least=3e-4, median=3e-4, greatest=3e-4)
    view.training.metrics.add(name="loss", step=298, ranks=8, least=2.301, median=2.314, greatest=2.330)
    view.goodput.MergeFrom(GoodputView(since_s=NOW - 11_520, until_s=NOW, allocated_node_s=1000.0, useful_node_s=931.0))
    for name, values in (("memory", (398, 412, 430, 1007)), ("gpu_memory", (61, 61, 71, 80))):
        least, median, greatest, limit = (value * 2.0**30 for value in values)
        spread = NodeSpread(nodes=nodes, least=least, median=median, greatest=greatest, least_node="n3",
                            greatest_node="n999", limit=limit)  # fmt: skip
        getattr(view.use, name).MergeFrom(spread)
    view.use.gpu_busy.MergeFrom(NodeSpread(nodes=nodes, least=0.97, median=0.97, greatest=0.97, limit=1.0))
    for category, node_s in (("start", 8.0), ("steps_again", 31.0), ("checkpoint", 22.0), ("data", 8.0)):
        view.goodput.lost.add(category=category, node_s=node_s)
    view.recoveries[-1].MergeFrom(RecoveryView(action="swap", nodes_in=["n999"], step_restored=295, cause=LOST))
    for recovery in view.recoveries:
        for phase in ("suspected", "detected", "fenced", "started", "running", "restored", "first_step"):
            setattr(recovery, f"{phase}_s", getattr(recovery, f"{phase}_s") - 5400)
    return view


def queued() -> GangView:
    """A job that waits in the queue."""
    waits = "Slurm to start job 42 (Resources: other jobs have the nodes)"
    return GangView(gang_id="g42", name="pretraining-7b", slurm_job_ids=[42], phase="SUBMITTED", waiting_for=waits,
                    phase_since_s=NOW - 600, expected_start_s=NOW + 2040, run_dir="/shared/runs")  # fmt: skip


def roll_call(count: int) -> list[NodeView]:
    """So many nodes, some of them with a reason and a node check."""
    views = [
        NodeView(node=f"n{at}", verdict="FIT", heard_s_ago=1.5, musterd_attached=True, leaf=f"leaf{at // 16}",
                 slurm_job_ids=[42] if at % 2 else []) for at in range(count)
    ]  # fmt: skip
    for view in views[1::2]:
        view.role, view.verdict_since_s = "rank", NOW - 86_400.0
    for view in views[1::5]:
        view.verdict, view.reason, view.failures, view.lemon = "UNFIT", UNCORRECTABLE, 4, True
        view.checked_s, view.checked_in_job = NOW, 42
        view.node_check.CopyFrom(
            NodeCheck(outcome=CheckOutcome.CHECK_OUTCOME_SLOW, gflops=56_000, memory_gb_s=2400, hardware="8 x H100-SXM",
                      counters="8 GPUs: 0000:3b:00 NVLink CRC errors 7 before, 9 after")
        )  # fmt: skip
    return views


def events(count: int, screen: Screen) -> list[str]:
    """So many events, as `muster events` prints them."""
    texts = (f"generation 2 is fenced at step 298, and its ranks are ended: {LOST}", "the gang is RUNNING")
    records = [EventRecord(at_s=NOW + at * 0.777, text=texts[at % 2]) for at in range(count)]
    return [line for at, record in enumerate(records) for line in event_lines(record, screen, heading=not at)]


def checks(count: int) -> dict[str, CheckResult]:
    """What `muster check` has found on so many nodes."""
    bad = CheckResult(Outcome.FAILED, "the matrix product differs from the known digest", "8 x H100-SXM", 1000, 2000)
    return {f"n{at}": bad for at in range(count)}


def topology(count: int) -> FabricPicture:
    """A tree of so many nodes, some of them drained or with jobs."""
    fabric: Fabric = fat_tree(max(1, count // 16), 16)
    uses = {node: NodeUse(("IDLE",)) for node in fabric.nodes}
    users = tuple(JobUse(40_000 + at, "pretraining-7b", "alice") for at in range(4))
    for at, node in enumerate(sorted(uses)):
        if at % 5 == 0:
            uses[node] = NodeUse(("MIXED", "DRAIN"), users, UNCORRECTABLE)
    return FabricPicture(fabric, uses, kind="tree", collapse=collapse)


def plan() -> PreparedPlan:
    """The estimate of a job of four nodes."""
    return prepare(spec.parse(JOB, "job.toml"), PlanOptions(accelerator="H100-SXM"), load_table(), None, "--no-slurm")


def unpriced_plan(screen: Screen) -> Iterable[str]:
    """The places of a job whose model is not known."""
    job = spec.parse(JOB.partition("[model]")[0], "job.toml")
    places = unpriced.unpriced(job, PlanOptions(accelerator="H100-SXM"), load_table(), None, "--no-slurm")
    return unpriced.lines(places, screen)


def diagnosis(screen: Screen) -> Iterable[str]:
    """A job with a slow rank, whose network Slurm does not tell."""
    view = gang(4)
    measured = JobMeasurements(gang=view, step_s=1.25, ranks=[
        RankStepTime(rank=rank, compute_s=1.2 if rank else 1.9, wait_s=0.05) for rank in range(8)])  # fmt: skip
    found = diagnose(measured, None, Network(fat_tree(1, 16), "the leaves that the coordinator knows", False), None, [])
    return diagnosis_screen.lines(found, screen)


SCREENS: dict[str, Callable[[Screen], Iterable[str]]] = {
    **{f"status-{count}": lambda screen, count=count: gang_list(jobs(count), screen) for count in (0, 1, 12, 200)},
    **{f"status-job-{count}": lambda screen, count=count: gang_details(gang(count), screen) for count in (0, 2, 200)},
    **{
        f"status-screen-{count}": lambda screen, count=count: one_screen(measured(count), screen, NOW)
        for count in (2, 512)
    },
    "status-screen-bare": lambda screen: one_screen(gang(2), screen, NOW),
    "status-screen-ended": lambda screen: one_screen(gang(2, final=True), screen, NOW),
    "status-screen-queued": lambda screen: one_screen(queued(), screen, NOW),
    "status-job-measured": lambda screen: gang_details(measured(2), screen),
    "status-job-ended": lambda screen: gang_details(gang(2, final=True), screen),
    **{f"nodes-{count}": lambda screen, count=count: node_lines(roll_call(count), screen) for count in (0, 1, 200)},
    "nodes-verbose": lambda screen: node_lines(roll_call(7), screen, verbose=True),
    **{f"events-{count}": lambda screen, count=count: events(count, screen) for count in (0, 1, 200)},
    "check": lambda screen: check_table(checks(3), screen),
    "topo": lambda screen: tree_lines(topology(200), screen),
    "topo-verbose": lambda screen: tree_lines(topology(32), screen, verbose=True),
    "plan": lambda screen: plan_screen.lines(plan(), screen),
    "plan-without-a-model": unpriced_plan,
    "diagnose": diagnosis,
    "policy-explain": lambda screen: sentences(explain("xid 79", Policy.load(None), "policy.toml"), screen),
}


if __name__ == "__main__":
    target = Screen(int(sys.argv[1]) if len(sys.argv) > 1 else None, zone=UTC)
    for name, draw in SCREENS.items():
        print(f"=== {name}")
        print(*list(draw(target)), sep="\n")
