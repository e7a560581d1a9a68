"""How a job ends that cannot continue: a clear message, a non-zero exit status, nothing left behind."""

import json
import re

import pytest

from muster.slurm.testcluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.testcluster.leftovers import find_leftovers, wait_nothing_left
from muster.slurm.testcluster.training import SLOW_STEPS, SMALL_MODEL, Training, TrainingSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = pytest.mark.cluster

NO_TORCH = 'preload = ["json"]'
"""For a job that never starts a rank: importing PyTorch on each of its nodes would be in vain."""


def assert_nothing_left(cluster: Cluster) -> None:
    wait_nothing_left(cluster, 20)


def losses(text: str) -> dict[int, float]:
    """The loss of each step that rank 0 has printed."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+) ", text, re.M)}


def output(training: Training) -> str:
    return "".join(path.read_text(errors="replace") for path in training.folder.glob("*.out"))


def test_no_spare_left_requeues_without_the_bad_node_and_resumes_from_durable_storage(healthy: Cluster) -> None:
    hook = '{on = ["requeue", "restart", "end"], command = ["sh", "-c", "sleep 1; cat >> told; echo >> told"]}'
    settings = (
        'durable_dir = "/shared/jobs/requeued/durable"',
        "pool_nodes = 0",
        f"hooks.own = {hook}",
        'record.live = "tensorboard"',
    )
    spec = TrainingSpec("requeued", nodes=3, spares=0, arguments=SLOW_STEPS, settings=settings)
    with Training(healthy, spec) as training:
        job = training.submit()
        training.wait_step(20)
        dead = training.node_of(2)
        healthy.crash(dead)
        training.wait(lambda v: v.get("phase") == "REQUEUED", 60, "REQUEUED")
        shown = f"scontrol show job {job}"
        wait_until(lambda: f"ExcNodeList={dead}" in healthy.sh(CONTROLLER, shown), 20, f"{dead} is excluded")
        said = re.compile(r" Comment=muster: REQUEUED at step \d+, 1 recovery: no spare is left")
        wait_until(lambda: said.search(healthy.sh(CONTROLLER, shown)), 20, "the job's comment says why")
        training.wait(lambda v: v.get("phase") == "RUNNING", 240, "RUNNING")
        training.finish()
        view = training.wait_final()
        assert view["phase"] == "DONE", view.get("reason")
        steps = training.steps(training.generation)
        assert steps[0][0] > 15, "it resumed from the flushed step"
        training.wait_job_ended()
        text = healthy.sh(CONTROLLER, shown)
        assert f" Comment=muster: DONE at step {steps[-1][0]}, 1 recovery, the last: requeue of {dead}" in text
        assert f"AdminComment=[muster: {dead} left in generation 2 (requeue), LOST: " in text
    assert 'TensorBoard is not installed here: pip install "muster[tensorboard]" there' in output(training)
    lines = {path.name: path.read_text() for path in training.folder.glob("logs/*/hardware/*")}
    assert dead in lines
    assert all("processors" in line for line in lines.values())
    told = [json.loads(line) for line in (training.folder / "told").read_text().splitlines()]
    assert [message["occasion"] for message in told] == ["requeue", "restart", "end"]
    assert told[1]["details"]["recovery"]["nodes_out"] == [dead]
    saved = sorted(path.name for path in (training.folder / "durable").iterdir())
    assert saved[-1].startswith(f"step_{steps[-1][0]:08d}_")
    assert not [name for name in saved if "tmp" in name]


def test_a_script_that_fails_at_import_is_reported_with_its_own_error(healthy: Cluster) -> None:
    with Training(healthy, TrainingSpec("dies", nodes=2, spares=1, arguments=("--no-such-option",))) as training:
        job = training.submit()
        view = training.wait_final(90)
        assert (view["phase"], view["exit_code"]) == ("FAILED", 93)
        assert "no-such-option" in view["reason"]
        training.wait_job_ended()
        assert "no-such-option" in output(training)
        shown = healthy.muster(LOGIN, "status", str(job), user="alice")
        assert re.search(r"last words\t.*no-such-option", shown)
        assert "ExitCode=93:0" in healthy.sh(CONTROLLER, f"scontrol show job {job}")
        assert_nothing_left(healthy)


def test_what_nodes_lack_is_found_before_the_first_generation(healthy: Cluster) -> None:
    """Four jobs at once. The login node has all that they need. The script is missing on all nodes, or on one of them,
    for which there is a spare. The run folder is each node's own, or the login node's alone."""
    *having, lacking = ("n0", "n1", "n2")
    for host in (LOGIN, *having):
        healthy.sh(host, "mkdir -p /opt/most; echo echo trained > /opt/most/train.sh")
    for host in (LOGIN, *healthy.nodes):
        healthy.sh(host, "mkdir -p /var/local/own; chown alice: /var/local/own")
    healthy.sh(LOGIN, "mkdir -p /opt/login/run; echo true > /opt/login/train.sh; chown alice: /opt/login/run")
    own, spare = (
        "the folder that the job's first node sees",
        f"{lacking} is removed from the gang: {lacking}: command: ",
    )
    jobs = {
        "script": (
            "/opt/login/train.sh",
            "/shared/lack",
            2,
            "n3,n4",
            "n3, n4: command: the script /opt/login/train.sh",
        ),
        "own": ("/opt/most/train.sh", "/var/local/own", 2, "n0,n1", f"n1: run_dir = '/var/local/own' is not {own}"),
        "login": (
            "/opt/most/train.sh",
            "/opt/login/run",
            1,
            "n5",
            "n5 could not open the job's output file: run_dir = ",
        ),
        "spare": ("/opt/most/train.sh", "/shared/lack", 2, ",".join((*having, lacking)), ""),
    }
    ids = {}
    healthy.sh(LOGIN, "mkdir -p /shared/lack", user="alice")
    for name, (script, folder, nodes, where, _) in jobs.items():
        text = f'name = "{name}"\nnodes = {nodes}\nspares = {int(name == "spare")}\n'
        text += f'command = ["sh", "{script}"]\nrun_dir = "{folder}"\n{NO_TORCH}\n'
        text += f'[slurm]\noptions = ["--nodelist={where}"]\n'
        healthy.exec(LOGIN, "tee", f"/shared/lack/{name}.toml", user="alice", stdin=text.encode())
        ids[name] = healthy.exec(LOGIN, "muster", "submit", f"/shared/lack/{name}.toml", user="alice").stdout.strip()

    def view(name: str) -> dict[str, object]:
        shown = healthy.exec(LOGIN, "muster", "status", "--json", ids[name], user="alice").stdout
        found: dict[str, object] = json.loads(shown)
        return found

    wait_until(lambda: all(view(name).get("final") for name in jobs), 90, "all jobs have ended")
    for name, (*_, words) in jobs.items():
        found = view(name)
        events = healthy.exec(LOGIN, "muster", "events", ids[name], user="alice").stdout
        assert found["phase"] == ("DONE" if name == "spare" else "FAILED"), found
        assert words in str(found.get("reason", "")), found
        assert (spare in events) == (name == "spare"), events
        assert int(str(found.get("generation", 0))) == int(name == "spare"), events
    assert "drain" not in "".join(healthy.node_states().values())


@pytest.mark.long
def test_a_sharded_job_without_a_spare_goes_on_with_fewer_ranks_from_memory(healthy: Cluster) -> None:
    """No durable checkpoint is there: the ranks put their states together from the shards of all."""
    settings = ("elastic = true", "pool_nodes = 0", 'parallelism.sharding = "parameters"')
    spec = TrainingSpec("sharded", nodes=4, spares=0, arguments=(*SLOW_STEPS, "--fsdp"), settings=settings)
    with Training(healthy, spec) as training:
        training.submit()
        training.wait_step(20)
        healthy.crash(training.node_of(1))
        recovery = training.wait_recovered(2)
        assert (recovery["action"], len(training.view["ranks"])) == ("fewer replicas", 3)
        restored = int(recovery["step_restored"])
        assert restored > 0
        training.wait_step(restored + 3)  # a step is reported before its loss is printed
        before, after = losses(training.log(1, 0)), losses(training.log(2, 0))
        assert f"3 ranks, starting after step {restored}" in training.log(2, 0)
        assert min(after) == restored + 1
        assert abs(after[restored + 1] - before[restored]) < 0.5, "the loss goes on where it was"
        training.wait_step(int(training.view["step"]) + 20)
        training.finish()
        assert training.wait_final()["phase"] == "DONE", training.view.get("reason")
        training.wait_job_ended()


@pytest.mark.long
def test_a_sharded_job_with_a_parity_rebuilds_the_state_of_a_lost_node_then_saves_the_next_one(
    healthy: Cluster,
) -> None:
    """No node has a copy of another one's state. A spare takes the first lost rank; after the second loss there is no
    spare, and the state that is written before the requeue is rebuilt, too."""
    settings = (
        'durable_dir = "/shared/jobs/parity/durable"',
        "pool_nodes = 0",
        'parallelism.sharding = "parameters"',
        "checkpoint.parity = 4",
    )
    spec = TrainingSpec("parity", nodes=4, spares=1, arguments=(*SLOW_STEPS, "--fsdp"), settings=settings)
    with Training(healthy, spec) as training:
        training.submit()
        training.wait_step(20)
        healthy.crash(training.node_of(1))
        recovery = training.wait_recovered(2)
        assert recovery["action"] == "swap"
        restored = int(recovery["step_restored"])
        assert int(recovery["step_before"]) - restored <= 2
        training.wait_step(restored + 3)
        before, after = losses(training.log(1, 0)), losses(training.log(2, 0))
        assert min(after) == restored + 1
        assert abs(after[restored + 1] - before[restored]) < 0.5, "the loss goes on where it was"
        assert "is rebuilt from the parity of ranks [0, 1, 2, 3]" in output(training)
        training.wait_step(int(training.view["step"]) + 20)
        healthy.crash(training.node_of(2))
        training.wait(lambda v: v.get("phase") == "REQUEUED", 120, "REQUEUED")
        reached = max(losses(training.log(2, 0)))
        (saved,) = (training.folder / "durable").glob("step_*")
        assert reached - int(saved.name.split("_")[1]) <= 2
        training.cancel()


@pytest.mark.long  # the simulated worlds have pools that two jobs want
def test_two_jobs_want_the_last_node_of_the_shared_pool(healthy: Cluster) -> None:
    """One job gets the node, in a pool job. The other one, which is elastic too, continues with fewer replicas.

    Then the nodes that both have lost are repaired, one of them a batch host. The node of the pool gives way, and the
    other job grows back.
    """
    specs = [
        TrainingSpec(name, nodes=3, spares=0, arguments=SLOW_STEPS, settings=("elastic = true",))
        for name in ("one", "two")
    ]
    with Training(healthy, specs[0]) as one, Training(healthy, specs[1]) as two:
        both = (one, two)
        for training in both:
            training.submit()
        for training in both:
            training.wait_step(20)
        taken = {training.node_of(rank) for training in both for rank in range(3)}
        last, *others = sorted(set(healthy.nodes) - taken)
        healthy.sh(CONTROLLER, f"scontrol update nodename={','.join(others)} state=drain reason=elsewhere")
        healthy.crash(one.node_of(1))
        host = re.search(r"BatchHost=(\S+)", healthy.sh(CONTROLLER, f"scontrol show job {two.job}"))
        assert host is not None
        healthy.crash(host[1])
        for training in both:
            training.wait_recovered(2)
        came = {t: [n for r in t.view["recoveries"] for n in r.get("nodes_in", ())] for t in both}
        (winner,), (loser,) = [t for t in both if came[t] == [last]], [t for t in both if not came[t]]
        queue = healthy.sh(CONTROLLER, f"squeue -h -w {last} -o '%A %u %P'").split()
        assert queue[1:] == ["alice", "shared"]
        assert int(queue[0]) != winner.job
        assert loser.view["recoveries"][-1]["action"] == "fewer replicas"
        assert [len(t.view["ranks"]) for t in (winner, loser)] == [3, 2]
        assert "2 ranks, starting after step" in loser.log(loser.generation, 0)
        for training in both:
            training.wait_step(int(training.view["step"]) + 20)
        lost = {t: t.view["recoveries"][-1]["nodes_out"] for t in both}
        before = {t: t.generation for t in both}
        healthy.repair(*(node for nodes in lost.values() for node in nodes))
        for training, action in ((winner, "pool node gives way"), (loser, "more replicas")):
            back = training.wait_recovered(before[training] + 1)
            assert (back["action"], back["nodes_in"]) == (action, lost[training])
            assert back["step_restored"] == back["step_before"], "no step is repeated"
            assert len(training.view["ranks"]) == 3
            assert "Restarts=0" in healthy.sh(CONTROLLER, f"scontrol show job {training.job}")
        assert "3 ranks, starting after step" in loser.log(loser.generation, 0)
        wait_until(lambda: not healthy.sh(CONTROLLER, f"squeue -h -w {last}"), 30, "the node of the pool is free again")
        for training in both:
            training.wait_step(int(training.view["step"]) + 20)
        for training in both:
            training.cancel()
            assert training.wait_final(20)["phase"] == "CANCELLED"
        wait_until(lambda: not healthy.sh(CONTROLLER, "squeue -h"), 30, "the pool job has ended, too")
        assert_nothing_left(healthy)


def test_a_node_that_never_attaches_is_named(healthy: Cluster) -> None:
    healthy.sh("n1", "chmod -x /opt/muster/bin/muster-agent")
    try:
        spec = TrainingSpec(
            "absent", nodes=10, spares=0, arguments=SMALL_MODEL, settings=("gather_timeout = 12", NO_TORCH)
        )
        with Training(healthy, spec) as training:
            training.submit()
            view = training.wait_final(90)
            assert view["phase"] == "FAILED"
            assert "missing: n1" in view["reason"]
            training.wait_job_ended()
            assert "n1" in output(training)
            assert_nothing_left(healthy)
    finally:
        healthy.sh("n1", "chmod +x /opt/muster/bin/muster-agent")


def test_a_full_disk_is_reported_and_nothing_remains(healthy: Cluster) -> None:
    spec = TrainingSpec("full", nodes=2, spares=1, arguments=SMALL_MODEL, settings=(NO_TORCH,))
    healthy.sh(LOGIN, "mkdir -p /shared/jobs/full/logs; chown -R alice: /shared/jobs/full")
    logs = "/shared/jobs/full/logs"
    mount = f"mkdir -p {logs}; mount -t tmpfs -o size=4k,mode=1777 none {logs}"
    fill = f"dd if=/dev/zero of={logs}/fill bs=4k count=1 2>/dev/null"
    for node in healthy.nodes:
        healthy.sh(node, f"{mount} && {fill}")
    try:
        with Training(healthy, spec) as training:
            training.submit()
            view = training.wait_final(90)
            assert view["phase"] == "FAILED"
            assert "space" in view["reason"]
            training.wait_job_ended()
            assert_nothing_left(healthy)
    finally:
        for node in healthy.nodes:
            healthy.sh(node, f"umount -l {logs}")


def test_cancel_frees_everything(healthy: Cluster) -> None:
    with Training(healthy, TrainingSpec("cancelled", nodes=2, spares=1, arguments=SLOW_STEPS)) as training:
        training.submit()
        training.wait_step(5)
        left = find_leftovers(healthy)
        for kind, word in ((left.processes, "rank"), (left.memory, "/memfd:muster-cancelled-")):
            assert {line.split()[0] for line in kind if word in line} >= {training.node_of(rank) for rank in range(2)}
        training.cancel()
        assert training.wait_final(20)["phase"] == "CANCELLED"
        assert_nothing_left(healthy)
