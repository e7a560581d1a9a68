"""A training job survives faults on a real Slurm: what is restored, what Slurm is told, what is left behind."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.chromium import chromium, watched
from tests.cluster.prometheus import metrics_tell_of_a_throttle, prometheus

from muster.daemon.host.metric_series import JobSeries, read_job
from muster.slurm.testcluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.testcluster.training import FATAL_XID_LINE, PRECURSOR_XID_LINE, SLOW_STEPS, Training, TrainingSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = pytest.mark.cluster

BUCKETS = (*SLOW_STEPS, "--bucket-cap-mb", "0.05")


def slurm_node(cluster: Cluster, node: str) -> str:
    """What Slurm shows of a node. While munged can't keep up, it closes connections, and scontrol ends by SIGPIPE."""
    return wait_until(lambda: cluster.sh(CONTROLLER, f"scontrol show node {node} || true"), 60, f"Slurm shows {node}")


def times_downed(cluster: Cluster, node: str) -> int:
    """How often the node was set DOWN.

    The node's state is not sufficient. A ping answered before the failure may be counted after it. Slurm then shows
    IDLE+DRAIN ("node_did_resp: node returned to service").
    """
    return cluster.logs(CONTROLLER, "slurmctld").count(f"update_node: node {node} state set to DOWN")


def digests(training: Training, ranks: int) -> set[str]:
    return {Path(f"{training.folder}/digest.{rank}").read_text() for rank in range(ranks)}


def run_to_the_end(training: Training) -> None:
    training.finish()
    view = training.wait_final(240)
    assert (view["phase"], int(view.get("exit_code", 0))) == ("DONE", 0), view.get("reason")
    training.wait_job_ended()


def test_a_run_with_faults_and_planned_swaps_ends_with_the_same_bits(healthy: Cluster) -> None:
    """A rank, a precursor, an operator's drain, a node and node 0 (the batch host, rank 0): the weights are those of a
    run of as many steps without faults."""

    def spec(name: str, spares: int, steps: int | None, pause: str) -> TrainingSpec:
        arguments = (*BUCKETS, "--pause", pause, "--dropout", "0.1", "--digest", f"/shared/jobs/{name}/digest")
        return TrainingSpec(name, nodes=3, spares=spares, steps=steps, arguments=arguments)

    with Training(healthy, spec("disturbed", 4, None, "0.2")) as training:
        training.submit()
        training.wait_step(10)
        killed_in = training.generation
        training.kill_rank(2)
        training.wait_recovered(killed_in + 1)
        training.wait_step(15)
        a_precursor_is_a_planned_swap(training)
        training.wait_step(20)
        an_operators_drain_is_a_planned_swap(training)
        training.wait_step(25)
        dead = training.node_of(1)
        healthy.crash(dead)
        training.wait_left(dead)
        screens_name_the_dead_node(training, dead)
        training.wait_step(30)
        assert training.node_of(0) == "n0"
        healthy.power_off("n0")
        training.wait_left("n0")
        training.wait_step(int(training.view["step"]) + 5)
        run_to_the_end(training)
        last_step = training.steps(training.generation)[-1][0]
        with Training(healthy, spec("undisturbed", 0, last_step, "0")) as beside:
            beside.submit()
            run_to_the_end(beside)
        assert training.generation >= 6
        repeated = [training.repeated_steps(generation) for generation in range(2, training.generation + 1)]
        assert max(repeated) <= 2, repeated
        assert len(digests(beside, 3)) == 1
        assert digests(training, 3) == digests(beside, 3)
        hooks_were_told(training, dead)
        the_run_is_on_record(training)
        a_report_tells_of_it(training, dead)
        the_account_adds_up_and_names_who_is_to_blame(training, dead)


def the_account_adds_up_and_names_who_is_to_blame(training: Training, dead: str) -> None:
    """Each second of its nodes is in one part; each fault is charged with its kind, and the dead node with its own."""

    def asked(*command: str) -> Any:
        return json.loads(training.cluster.muster(LOGIN, *command, user=training.spec.user))

    account = asked("status", "--json", str(training.job))["goodput"]
    lost = {one["category"]: one["node_s"] for one in account["lost"]}
    assert abs(account["useful_node_s"] + sum(lost.values()) - account["allocated_node_s"]) < 0.01
    assert {"start", "fence", "rendezvous", "first_step", "spare"} <= lost.keys()
    assert "other" not in lost
    causes = {one["key"]: one for one in asked("goodput", "--by", "cause", "--json")["groups"]}
    assert {"crash", "precursor", "request", "node"} <= causes.keys()
    nodes = {one["key"]: one for one in asked("goodput", "--by", "node", "--json")["groups"]}
    assert {"fence", "spare"} & nodes[dead]["lost_gpu_hours"].keys()
    assert nodes[dead]["goodput"] == 0


def the_run_is_on_record(training: Training) -> None:
    """What its user submitted, and how it went, with each recovery."""

    def run_on_record() -> Any:  # its first node is dead, so only the coordinator can tell its end
        shown = training.cluster.muster(LOGIN, "runs", "show", str(training.job), "--json", user=training.spec.user)
        run = json.loads(shown)
        return run if run["outcome"]["phase"] == "DONE" else None

    run = wait_until(run_on_record, 60, "the record of the run tells its end")
    assert run["spec"]["nodes"] == 3
    assert run["interpreter"]["packages"]["torch"]
    assert (run["outcome"]["phase"], run["outcome"]["generation"]) == ("DONE", str(training.generation))
    assert len(run["outcome"]["recoveries"]) == training.generation - 1


def a_report_tells_of_it(training: Training, dead: str) -> None:
    """The job's user has the whole story on one page, and so has who reads the journal instead of asking."""
    cluster, job = training.cluster, str(training.job)
    cluster.muster(LOGIN, "report", "-o", f"/shared/jobs/{training.spec.name}/report.html", job, user="alice")
    with chromium() as browser:
        page = browser.new_page()
        said = watched(page)
        page.goto((training.folder / "report.html").as_uri())
        assert {"Recoveries", "Goodput", "Training"} <= {*page.locator("h2").all_inner_texts()}
        rows = page.locator("#summary tbody tr").all_inner_texts()
        assert "restart in place" in rows[0]
        assert any("swap" in row and dead in row for row in rows), rows
        goodput = page.locator("#summary dd").last.inner_text()
        assert 0 < float(goodput.removesuffix(" %")) < 100
        assert page.locator("#training svg, #ranks svg").count() >= 3, page.locator("#notes").all_inner_texts()
        assert said == []
    cluster.sh(CONTROLLER, f"muster report --journal /var/lib/muster -o /tmp/report.html {job}")
    told = cluster.sh(CONTROLLER, "cat /tmp/report.html")
    assert "restart in place" in told
    assert dead in told


def screens_name_the_dead_node(training: Training, dead: str) -> None:
    """On a terminal, the status of the job and the history of the node say what has happened."""

    def shown(words: str) -> str:  # on a busy machine a command may find no coordinator within its time
        line = f"script -qec 'stty cols 80 rows 24; {words}' /dev/null || true"
        return training.cluster.sh(LOGIN, line, user=training.spec.user)

    wait_until(lambda: f"{dead} LOST" in shown(f"muster status {training.job}"), 60, "status names the dead node")
    wait_until(lambda: f"node {dead} is LOST" in shown(f"muster nodes {dead}"), 60, "its history names the loss")


def hooks_were_told(training: Training, dead: str) -> None:
    """The site's hook, a program on the coordinator's host, has got each recovery, the dead node and the end."""
    told = lambda: messages_about(training)  # noqa: E731
    wait_until(lambda: any(one["occasion"] == "end" for one in told()), 60, "the hook is told of the end")
    recoveries = [one["details"]["recovery"] for one in told() if one["occasion"] in ("swap", "restart")]
    assert [one["action"] for one in recoveries][:2] == ["restart in place", "planned swap"]
    assert any(one["nodes_out"] == [dead] for one in recoveries)


def messages_about(training: Training) -> list[dict[str, Any]]:
    lines = training.cluster.sh(CONTROLLER, "cat /tmp/hooks.jsonl").splitlines()
    messages = [json.loads(line) for line in lines if line]
    return [one for one in messages if one["details"].get("name") == training.spec.name]


def a_precursor_is_a_planned_swap(training: Training) -> None:
    """The ranks leave the node after a step that none of them repeats, and the node is drained."""
    cluster, node = training.cluster, training.node_of(2)
    cluster.kmsg(node, PRECURSOR_XID_LINE)
    recovery = training.wait_left(node)
    assert (recovery["action"], recovery["nodes_out"]) == ("planned swap", [node])
    assert "Xid 64" in recovery["cause"]
    assert training.repeated_steps(int(recovery["generation"])) == 0
    wait_until(lambda: "DRAIN" in slurm_node(cluster, node), 60, f"{node} is drained")
    assert "muster: [node] Xid 64" in slurm_node(cluster, node)


def an_operators_drain_is_a_planned_swap(training: Training) -> None:
    """Slurm drains the node at once, and the ranks leave it without repeating a step. A user may not drain it."""
    cluster, node, command = training.cluster, training.node_of(2), ("muster", "drain", "--reason", "its fan is loud")
    # On a busy machine a command may find no coordinator within its time (69).
    drained = lambda: cluster.exec(CONTROLLER, *command, node, check=False).rc == 0  # noqa: E731
    wait_until(drained, 60, f"root drains {node}")
    recovery = training.wait_left(node)
    assert (recovery["action"], recovery["nodes_out"]) == ("planned swap", [node])
    assert training.repeated_steps(int(recovery["generation"])) == 0
    assert "muster: [user] root: its fan is loud" in slurm_node(cluster, node)
    words, nodes = f"root drains {node}: its fan is loud", ("muster", "nodes")
    shown = lambda: words in cluster.exec(LOGIN, *nodes, user="alice", check=False).stdout  # noqa: E731
    wait_until(shown, 60, "alice sees who drains it")
    other = training.node_of(2)
    refused = lambda: cluster.exec(LOGIN, *command, other, user="alice", check=False).rc == 77  # noqa: E731
    wait_until(refused, 60, "alice is told that she may not")
    assert "DRAIN" not in slurm_node(cluster, other)


def test_seven_nodes_in_a_row_are_replaced_two_of_them_after_a_coordinator_outage(
    healthy: Cluster, tmp_path: Path
) -> None:
    """Power loss and a fatal Xid: swap, drain and let go. Training goes on without the coordinator, and a restarted one
    completes a recovery. A node that hangs is replaced, too, and so are a node that the job's owner gives back and one
    whose GPU throttles: a real Prometheus reads that from the daemons."""
    with Training(healthy, TrainingSpec("swaps", nodes=3, spares=7, arguments=BUCKETS)) as training:
        job = training.submit()
        training.wait_step(20)
        dead, unfit = power_loss_is_a_swap(training), a_fatal_xid_is_a_swap(training)
        events_tell_where_states_came_from(training, job)
        held = lambda: healthy.sh(CONTROLLER, f"squeue -h -j {job} -o %N | xargs -r scontrol show hostnames").split()  # noqa: E731
        wait_until(lambda: unfit not in held() and dead not in held(), 60, f"{dead} and {unfit} have left the job")
        trains_without_a_coordinator(training)
        with prometheus(healthy, tmp_path) as found:
            a_hung_node_is_a_swap(training)
            a_node_that_is_given_back_is_a_swap(training, job, held())
            found.wait_for(f'muster_step{{job_id="{job}"}} > 0')
            throttled = a_gpu_that_throttles_is_a_planned_swap(training)
            metrics_tell_of_a_throttle(found, job, training.generation, throttled)
        run_to_the_end(training)
    shown = healthy.sh(CONTROLLER, f"scontrol show job {job}")
    # A job is COMPLETING for up to a minute after a node of its step has died.
    assert "JobState=COMPLETED" in shown or "JobState=COMPLETING" in shown
    assert "ExitCode=0:0" in shown


def power_loss_is_a_swap(training: Training) -> str:
    """The node without power is replaced, drained and set DOWN."""
    cluster, dead = training.cluster, training.node_of(2)
    downed_before = times_downed(cluster, dead)
    cluster.power_off(dead)
    recovery = training.wait_left(dead)
    assert recovery["action"] == "swap"
    assert recovery["nodes_out"] == [dead]
    assert f"{dead} is lost" in recovery["cause"]
    wait_until(lambda: "DRAIN" in slurm_node(cluster, dead), 60, f"{dead} is drained")
    wait_until(lambda: times_downed(cluster, dead) > downed_before, 60, f"{dead} is set DOWN")
    assert "muster:" in slurm_node(cluster, dead)
    return dead


def events_tell_where_states_came_from(training: Training, job: int) -> None:
    """Of the two swaps: two ranks had their own memory, and one got its state from another node."""
    text = training.cluster.muster(LOGIN, "events", str(job), user="alice")
    restored = [line for line in text.splitlines() if " has its state of step " in line]
    assert len(restored) == 2, text
    assert all("were in the ranks' own memory" in line and " came from " in line for line in restored)


def a_fatal_xid_is_a_swap(training: Training) -> str:
    """The node with the Xid is replaced and drained. It is not the batch host, which cannot be removed."""
    cluster, unfit = training.cluster, training.node_of(1)
    cluster.kmsg(unfit, FATAL_XID_LINE)
    recovery = training.wait_left(unfit)
    assert "Xid 79" in recovery["cause"]
    assert int(recovery["step_restored"]) > 20
    wait_until(lambda: "DRAIN" in slurm_node(cluster, unfit), 60, f"{unfit} is drained")
    assert "Xid 79" in slurm_node(cluster, unfit)
    return unfit


def trains_without_a_coordinator(training: Training) -> None:
    """15 steps at least. A node that dies meanwhile is replaced afterwards, and one that is unfit during a restart."""
    cluster, generation, dead = training.cluster, training.generation, training.node_of(1)
    cluster.kill_coordinator()
    before = len(training.steps(generation))  # may be 0: an agent reports a step before its rank has printed the step
    wait_until(lambda: len(training.steps(generation)) >= before + 15, 120, "15 steps without a coordinator")
    cluster.crash(dead)
    cluster.start_service(CONTROLLER, "muster-coordinator")
    assert training.wait_left(dead)["nodes_out"] == [dead]
    unfit = training.node_of(2)
    cluster.kmsg(unfit, FATAL_XID_LINE)
    cluster.restart_coordinator()
    training.wait_left(unfit)


def a_hung_node_is_a_swap(training: Training) -> None:
    cluster, node = training.cluster, training.node_of(1)
    cluster.pause(node)
    recovery = training.wait_left(node)
    assert f"{node} hangs" in recovery["cause"]
    assert recovery["nodes_out"] == [node]


FALSE_AGENT = """
import asyncio
from muster.daemon.testing.scripted_agent import ScriptedAgent
from muster.daemon.transport.site_config import Site
from muster.v1.common_pb2 import JobSpec

async def attach():
    site = Site.load()
    agent = ScriptedAgent("{node}", JobSpec(), site.credentials(), gang="{gang}", job={job}, trust=site.trust())
    await agent.open()
    await agent.attach(site.coordinator)
    print(agent.duty, agent.dismissed)

asyncio.run(attach())
"""


def a_node_that_is_given_back_is_a_swap(training: Training, job: int, held: list[str]) -> None:
    """The owner shrinks the job. The node is not blamed, and no process of the owner speaks for the node any more."""
    cluster, node = training.cluster, training.node_of(2)
    left = ",".join(name for name in held if name != node)
    cluster.exec(LOGIN, "scontrol", "update", f"jobid={job}", f"nodelist={left}", user="alice")
    assert training.wait_left(node)["nodes_out"] == [node]
    gang = training.view["gang_id"]
    script = FALSE_AGENT.format(node=node, gang=gang, job=job)
    said = cluster.exec(node, "python3", "-c", script, user="alice").stdout
    assert said.strip() == f"node {node} does not belong to job {job} (any more)"
    assert "DRAIN" not in slurm_node(cluster, node)
    assert "DOWN" not in slurm_node(cluster, node)


def a_gpu_that_throttles_is_a_planned_swap(training: Training) -> str:
    """From the sensor of the node to ranks that leave it without repeating a step. Returns the node."""
    cluster, node = training.cluster, training.node_of(1)
    cluster.throttle(node, 2)
    recovery = training.wait_left(node)
    assert (recovery["action"], recovery["nodes_out"]) == ("planned swap", [node])
    assert recovery["cause"].startswith("GPU throttled 64: slowed down by the hardware for heat")
    assert training.repeated_steps(int(recovery["generation"])) == 0
    wait_until(lambda: "muster: [node] GPU throttled" in slurm_node(cluster, node), 60, f"{node} is drained")
    return node


FAULTS_ON_SIGNALS = """
import ctypes, gc, signal, torch

def keep_gil_for_ever(*_):
    ctypes.PyDLL(None).sleep(3600)

def flip_a_bit(*_):
    parameters = [thing for thing in gc.get_objects() if type(thing) is torch.nn.Parameter]
    bits = max(parameters, key=torch.numel).data.view(torch.int32).view(-1)
    bits[bits.numel() // 2] ^= 1 << 20

signal.signal(signal.SIGWINCH, keep_gil_for_ever)
signal.signal(signal.SIGURG, flip_a_bit)
"""
"""A module that a rank's process imports before its script runs. On SIGWINCH no Python runs in the rank any more. On
SIGURG one bit of a parameter flips, which changes the number by some per cent."""


def test_ranks_restart_in_place_after_one_kept_the_gil_and_after_a_bit_flipped(healthy: Cluster) -> None:
    """Both are named, and the stacks of those that hang are kept. No spare is there, so nobody is replaced."""
    arguments = (*BUCKETS, "--digest", "/shared/jobs/stalled/digest")
    settings = ('preload = ["torch", "faults_on_signals"]',)
    spec = TrainingSpec("stalled", nodes=3, spares=0, arguments=arguments, settings=settings)
    with Training(healthy, spec) as training:
        training.folder.mkdir(parents=True, exist_ok=True)
        (training.folder / "faults_on_signals.py").write_text(FAULTS_ON_SIGNALS)
        training.submit()
        training.wait_step(30)
        seats, hung = [training.node_of(rank) for rank in range(3)], training.generation
        training.tell_rank(1, "WINCH")
        recovery = training.wait_recovered(hung + 1)
        assert recovery["action"] == "restart in place"
        assert recovery["cause"].startswith("hang: no rank has finished a step for")
        assert f"; rank 1 on {seats[1]} has run no Python for 8 s" in recovery["cause"]
        assert int(recovery["step_restored"]) >= 29
        assert [training.node_of(rank) for rank in range(3)] == seats
        assert "in keep_gil_for_ever" in training.stacks(hung, 1)
        assert all("train.py" in training.stacks(hung, rank) for rank in (0, 2))
        shown = healthy.exec("login", "muster", "logs", "--stacks", "--rank", "0", str(training.job), user="alice")
        assert shown.stdout == training.stacks(hung, 0).replace("\n\n", "\n")
        what_ranks_say_is_shown_and_kept(training)
        a_flipped_bit_names_its_node(training, seats[2])
        assert [training.node_of(rank) for rank in range(3)] == seats
        run_to_the_end(training)
        assert len(digests(training, 3)) == 1
    assert all("DRAIN" not in slurm_node(healthy, node) for node in seats)


def what_ranks_say_is_shown_and_kept(training: Training) -> None:
    """Loss and tokens of all ranks, through pages, agents and coordinator; the pace; the series of both generations."""

    def metrics() -> dict[str, dict[str, Any]]:
        shown = training.cluster.muster("login", "status", "--json", str(training.job), user="alice")
        training_view = json.loads(shown).get("training", {})
        return {metric["name"]: metric for metric in training_view.get("metrics", []) if training_view["steps_per_s"]}

    found = wait_until(lambda: metrics() if metrics().get("loss", {}).get("ranks") == 3 else None, 60, "3 losses")
    loss = found["loss"]
    assert 0 < loss["least"] <= loss["median"] <= loss["greatest"] < 20
    assert found["tokens"]["median"] > 1
    run_dir, gang = str(training.folder), training.view["gang_id"]

    def kept() -> JobSeries | None:
        """The series of all nodes, once it has the time of a step: the first point of a generation has none."""
        found = read_job(run_dir, gang)
        return found if len(found.nodes) == 3 and any(one.step_s > 0 for one in found.rank(1).values()) else None

    series = wait_until(kept, 90, "the time of a step in the series of all nodes")
    assert series.ranks == [0, 1, 2]
    assert series.left_out == {}
    assert all(0 < point.median < 20 for point in series.number("loss").values())


def a_flipped_bit_names_its_node(training: Training, node: str) -> None:
    """All ranks go back to the last step on which they agreed."""
    training.wait_step(int(training.view["recoveries"][-1]["step_restored"]) + 20)
    differed = training.generation
    training.tell_rank(2, "URG")
    recovery = training.wait_recovered(differed + 1)
    found, void_step = recovery["cause"].rsplit(" ", 1)
    assert found.startswith(f"silent data corruption: rank 2 on {node} differs from 2 equal replicas")
    assert recovery["action"] == "restart in place"
    assert int(recovery["step_restored"]) < int(void_step)
    assert training.view["replicas_disagree"] == recovery["cause"]
