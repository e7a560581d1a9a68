"""The verbs of the cluster tool: what a node's peers see of each fault, and that the repair works."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from muster.slurm.client.parsing.hostlist import expand
from muster.slurm.image.engine import EngineError
from muster.slurm.testcluster import registry
from muster.slurm.testcluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.testcluster.diagnostics import diagnostics
from muster.slurm.testcluster.leftovers import find_leftovers, wait_nothing_left
from muster.slurm.testcluster.spec import ClusterSpec
from muster.slurm.testcluster.waiting import WaitTimeout, wait_until

pytestmark = pytest.mark.cluster

# Sends a line each 0.1 s to whoever connects.
_SERVER = """
import socket, time
with socket.create_server(("", 9000)) as server:
    peer = server.accept()[0]
    while True:
        peer.sendall(b"tick\\n")
        time.sleep(0.1)
"""

# Prints what a peer sees of a connection: "tick" once, then the end of it, or silence of argv[2] seconds.
_CLIENT = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 9000), timeout=5)
peer.settimeout(float(sys.argv[2]))
peer.recv(100)
print("tick", flush=True)
try:
    while peer.recv(100):
        pass
    print("closed", flush=True)
except TimeoutError:
    print("silence", flush=True)
    peer.settimeout(20)
    print("again" if peer.recv(100) else "closed", flush=True)
except ConnectionError as error:
    print("reset", flush=True)
"""

_HOLDS_MEMORY = "import os, time; os.memfd_create('muster-gang'); time.sleep(100)"


class Line:
    """A TCP connection from `near` to `far`, and what the near end sees."""

    def __init__(self, cluster: Cluster, near: str, far: str, patience: float) -> None:
        self.cluster = cluster
        self.server = cluster.popen(far, "python3", "-c", _SERVER)
        listening = "ss -Hltn sport = :9000"
        wait_until(lambda: cluster.sh(far, listening), 10, "the server listens")
        self.client = cluster.popen(near, "python3", "-c", _CLIENT, far, str(patience))
        assert self.next_word() == "tick"

    def next_word(self) -> str:
        assert self.client.stdout is not None
        return self.client.stdout.readline().strip()

    def close(self) -> None:
        for process in (self.client, self.server):
            self.cluster.kill_and_read(process)


@pytest.fixture
def line(healthy: Cluster):
    opened: list[Line] = []

    def connect(patience: float) -> Line:
        opened.append(Line(healthy, "n1", "n0", patience))
        return opened[-1]

    yield connect
    for one in opened:
        one.close()


def test_peers_of_a_crashed_node_see_their_connections_end_at_once(healthy: Cluster, line) -> None:
    tcp = line(patience=30)
    healthy.crash("n0")
    assert tcp.next_word() in ("closed", "reset")


def test_peers_of_a_node_without_power_receive_nothing(healthy: Cluster, line) -> None:
    tcp = line(patience=3)
    healthy.power_off("n0")
    assert tcp.next_word() == "silence"
    assert not healthy.is_running("n0")


def test_a_partition_is_silent_and_heals_with_the_same_connection(healthy: Cluster, line) -> None:
    tcp = line(patience=2)
    healthy.partition("n0")
    assert tcp.next_word() == "silence"
    assert healthy.is_running("n0")
    healthy.heal("n0")
    assert tcp.next_word() == "again"


def test_the_kernel_of_a_paused_node_answers_and_its_processes_do_not(healthy: Cluster, line) -> None:
    tcp = line(patience=1)
    healthy.pause("n0")
    assert tcp.next_word() == "silence"
    assert "1 received" in healthy.sh("n1", "ping -c1 -W2 n0")
    healthy.unpause("n0")
    assert tcp.next_word() == "again"


@pytest.mark.parametrize("fault", ["crash", "power_off", "partition", "pause"])
def test_repair_undoes_every_fault(healthy: Cluster, fault: str) -> None:
    getattr(healthy, fault)("n2")
    healthy.exec(CONTROLLER, "scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    healthy.exec(CONTROLLER, "scontrol", "update", "nodename=n2", "state=down", "reason=test")
    assert "n2" in healthy.broken_nodes()
    healthy.repair("n2")
    assert healthy.sh(LOGIN, "srun -w n2 hostname", user="alice") == "n2"


def test_a_node_keeps_its_disk_and_loses_its_memory_when_it_reboots(healthy: Cluster) -> None:
    healthy.sh("n3", "echo kept >/var/tmp/disk; echo lost >/dev/shm/memory")
    healthy.restart("n3")
    assert healthy.sh("n3", "cat /var/tmp/disk; ls /dev/shm") == "kept"


def test_an_ordinary_user_submits_and_another_cannot_cancel(healthy: Cluster) -> None:
    job = healthy.sh(LOGIN, "sbatch --parsable -N2 --wrap 'srun sleep 60'", user="alice")
    refused = healthy.exec(LOGIN, "scancel", job, user="bob", check=False)
    assert "Access/permission denied" in refused.stderr
    assert healthy.sh(LOGIN, f"squeue -h -o %u -j {job}", user="bob") == "alice"


def test_jobs_live_through_a_restart_of_slurmctld(healthy: Cluster) -> None:
    job = healthy.sh(LOGIN, "sbatch --parsable -N2 --wrap 'srun sleep 60'", user="alice")
    state = f"squeue -h -o %T -j {job}"
    # Wait for the job's step: a slurmctld that is stopping may refuse an srun that requests a step.
    wait_until(lambda: f"{job}.0" in healthy.sh(LOGIN, f"squeue -h -s -o %i -j {job}"), 20, "the job's step runs")
    healthy.restart_slurmctld()
    assert healthy.sh(LOGIN, state) == "RUNNING"


def test_nodes_hang_on_four_leaf_switches(healthy: Cluster) -> None:
    topology = healthy.sh(LOGIN, "scontrol show topology")
    leaves = re.findall(r"SwitchName=(s\d) Level=0 .*Nodes=(\S+)", topology)
    # Slurm 24.11 prints the lists as topology.conf has them.
    nodes = {"s0": "n[0-2]", "s1": "n[3-4]", "s2": "n[5-7]", "s3": "n[8-9]"}
    assert [(leaf, expand(text)) for leaf, text in leaves] == [(leaf, expand(text)) for leaf, text in nodes.items()]


def test_the_tree_shows_the_state_of_each_node_and_its_jobs(healthy: Cluster) -> None:
    job = healthy.sh(LOGIN, "sbatch --parsable --exclusive -w n[0,3] --job-name=long --wrap 'sleep 60'", user="alice")
    healthy.sh(CONTROLLER, "scontrol update nodename=n4 state=drain reason='a fan'")
    wait_until(lambda: healthy.sh(LOGIN, f"squeue -h -o %T -j {job}") == "RUNNING", 20, "the job runs")
    used = f"ALLOCATED  job {job} (long, alice)"
    lines = healthy.sh(LOGIN, "muster topo", user="alice").splitlines()
    assert [re.sub(r" nodes?: .*", "", line) for line in lines] == [
        "topology/tree",
        "spine  any  10",
        "├─ s0  leaf  3",
        f"│  ├─ n0  {used}",
        "│  └─ n[1-2]  IDLE",
        "├─ s1  leaf  2",
        f"│  ├─ n3  {used}",
        "│  └─ n4  IDLE+DRAIN  a fan",
        "├─ s2  leaf  3",
        "│  └─ n[5-7]  IDLE",
        "└─ s3  leaf  2",
        "   └─ n[8-9]  IDLE",
    ]


def test_a_line_reaches_the_kernel_log_as_a_record(healthy: Cluster) -> None:
    healthy.kmsg("n4", "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.")
    last = healthy.sh("n4", "tail -n 1 /var/log/muster-kmsg")
    assert re.fullmatch(r"4,\d+,\d+,c;NVRM: Xid .*bus\.", last)


def _verdict(cluster: Cluster, node: str) -> tuple[str, str]:
    said = cluster.sh(LOGIN, "muster nodes --json", user="alice")
    (row,) = [row for row in map(json.loads, said.splitlines()) if row["node"] == node]
    return row["verdict"], row["reason"]


def test_an_idle_node_with_a_gpu_that_throttles_is_drained(healthy: Cluster) -> None:
    """From the sensor to the coordinator, over the real nvidia-ml-py. The host's memory errors arrive there, too."""
    wait_until(lambda: _verdict(healthy, "n9")[0] == "FIT", 30, "n9 has attached")
    healthy.throttle("n9", 2)
    reason = "GPU throttled 64: slowed down by the hardware for heat on 0000:3b:00"
    wait_until(lambda: _verdict(healthy, "n9") == ("UNFIT", reason), 60, "the coordinator knows that a GPU throttles")
    wait_until(lambda: healthy.node_states()["n9"] == "drained", 30, "n9 is drained")
    assert _verdict(healthy, "n8")[0] == "FIT"
    healthy.throttle("n9", 2, clear=True)
    log = "gpu-throttle-over 64 on 0000:3b:00"
    wait_until(lambda: log in healthy.logs(CONTROLLER, "muster-coordinator"), 90, "it is over")
    healthy.memory_error("n9")
    log = "host-memory 1 on mc0"
    wait_until(lambda: log in healthy.logs(CONTROLLER, "muster-coordinator"), 30, "an uncorrectable error is known")
    healthy.restore_all()
    wait_until(lambda: _verdict(healthy, "n9")[0] == "FIT", 30, "n9 is FIT again")


def _gpus_read(cluster: Cluster, node: str) -> int:
    """How many GPUs the node's musterd has read."""
    ask = (
        "from muster.daemon.agent import own_hardware as client; print(len(client.ask('/run/muster/memory.sock').gpus))"
    )
    return int(cluster.exec(node, "python3", "-c", ask, check=False).stdout or 0)


def test_an_idle_node_with_a_new_memory_error_of_a_gpu_is_drained(healthy: Cluster) -> None:
    """An error that musterd has not seen happen is old: here the GPUs are well at its first reading."""
    healthy.throttle("n7", 1, clear=True)
    wait_until(lambda: _gpus_read(healthy, "n7") > 1, 60, "musterd has read the GPUs")
    healthy.gpu_ecc("n7", 1)
    reason = "GPU memory 5: new uncorrected errors of the DRAM on 0000:2b:00"
    wait_until(lambda: _verdict(healthy, "n7") == ("UNFIT", reason), 60, "the coordinator knows of the error")
    wait_until(lambda: healthy.node_states()["n7"] == "drained", 30, "n7 is drained")
    healthy.restore_all()
    wait_until(lambda: _verdict(healthy, "n7")[0] == "FIT", 30, "n7 is FIT again")


COMPUTES = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, b"rank7", 0, 0, 0)
os.nice(-20)
if os.path.exists(group := "/proc/self/autogroup"):  # the kernel weighs sessions against each other
    with open(group, "w") as file:
        file.write("-20")
def share():
    began, used = time.monotonic(), time.process_time()
    while time.monotonic() < began + 2:
        pass
    return (time.process_time() - used) / (time.monotonic() - began)
while True:
    print(f"{share():.2f}", flush=True)
"""
"""A process with the name of a rank. It prints its share of a core, every two seconds. It comes before the other tests'
processes: on a busy machine it would get less than half of a core without being slowed."""

MOST_SHARES = 30
"""A busy machine gives the process little for some seconds."""


def test_a_slow_rank_has_at_most_half_of_a_core_until_it_is_as_fast_as_before(healthy: Cluster) -> None:
    computing = healthy.popen("n3", "python3", "-c", COMPUTES)
    try:
        assert any(share_of_a_core(computing) > 0.5 for _ in range(MOST_SHARES))
        healthy.slow_rank("n3", 7)
        share_of_a_core(computing)  # in part before
        assert share_of_a_core(computing) < 0.5
        healthy.slow_rank("n3", 7, clear=True)
        assert any(share_of_a_core(computing) > 0.5 for _ in range(MOST_SHARES))
    finally:
        healthy.kill_and_read(computing)


def share_of_a_core(computing: subprocess.Popen[str]) -> float:
    """What the process has had in the last two seconds."""
    assert computing.stdout
    return float(computing.stdout.readline())


def test_a_killed_service_stays_down_until_it_is_started(healthy: Cluster) -> None:
    healthy.stop_service("n5", "slurmd", "KILL")
    alive = "pgrep -x slurmd || true"
    assert healthy.sh("n5", alive) == ""
    healthy.start_service("n5", "slurmd")
    wait_until(lambda: healthy.sh("n5", alive), 5, "slurmd runs again")


def test_leftovers_of_every_user_are_found(healthy: Cluster) -> None:
    healthy.crash("n3")
    wait_nothing_left(healthy, 20, in_queue=True)
    left = [
        healthy.popen("n1", "sleep", "100", user="alice"),
        healthy.popen("n2", "python3", "-c", _HOLDS_MEMORY),
    ]
    try:
        wait_until(lambda: find_leftovers(healthy).processes and find_leftovers(healthy).memory, 10, "both are seen")
        seen = find_leftovers(healthy)
        assert [re.sub(r"\d+", "N", line) for line in seen.processes] == ["nN process N sleep of N"]
        assert [line.split()[0] for line in (*seen.processes, *seen.memory)] == ["n1", "n2"]
        assert "/memfd:muster-gang" in seen.memory[0]
        with pytest.raises(WaitTimeout, match=r"n1 process .*\n.*muster-gang"):
            wait_nothing_left(healthy, 1)
    finally:
        for process in left:
            healthy.kill_and_read(process)
    wait_nothing_left(healthy, 10)


def test_an_unknown_host_is_named_with_the_existing_hosts(cluster: Cluster) -> None:
    with pytest.raises(EngineError, match=r"no host 'n10'.*it has ctl, login, n0, n1"):
        cluster.exec("n10", "true")


def test_two_clusters_run_at_the_same_time(cluster: Cluster, suite: str) -> None:
    with Cluster.up(ClusterSpec(nodes=5, daemons=False, suite=suite)) as other:
        assert other.subnet != cluster.subnet
        assert other.sh("n0", "getent hosts ctl").split()[0] == other.address(CONTROLLER)
        _the_roll_call_shows_who_is_missing(other)
        _the_diagnostics_name_a_host_that_is_down(other)
    assert _traces(cluster, other.name) == ""
    assert cluster.node_states().keys() == set(cluster.nodes)


def _the_roll_call_shows_who_is_missing(cluster: Cluster) -> None:
    """On a cluster without Muster's daemons, of which the coordinator and one musterd are started."""
    as_slurm = ("setpriv", "--reuid", "slurm", "--regid", "slurm", "--init-groups")
    coordinator = ("muster-coordinator", "--listen", "0.0.0.0:7070", "--state-dir", "/var/lib/muster")
    daemons = [
        cluster.popen(CONTROLLER, *as_slurm, *coordinator),
        cluster.popen("n4", "musterd", "--listen", "0.0.0.0:7071", "--kmsg", "/var/log/muster-kmsg"),
    ]
    rows: list[dict[str, object]] = []

    def listed() -> bool:
        said = cluster.exec(LOGIN, "muster", "nodes", "--json", check=False, user="alice")
        rows[:] = [json.loads(line) for line in said.stdout.splitlines()] if said.rc == 0 else []
        heard = any(row["verdict"] == "FIT" for row in rows)
        return len(rows) == 5 and heard and all(row["leaf"] for row in rows)

    try:
        wait_until(listed, 20, "all nodes are listed with their leaf, and one of them was heard")
    finally:
        for daemon in daemons:
            cluster.kill_and_read(daemon)
    assert {row["node"]: row["verdict"] for row in rows} == {
        node: "FIT" if node == "n4" else "UNHEARD" for node in cluster.nodes
    }
    assert [row["leaf"] for row in rows] == [cluster.spec.leaf_of(node) for node in cluster.nodes]
    assert rows[0]["reason"] == "no musterd was ever heard; in service in Slurm (IDLE)"


def _the_diagnostics_name_a_host_that_is_down(cluster: Cluster) -> None:
    """On a cluster that nobody needs afterwards: its controller stays down."""
    cluster.sh(LOGIN, "mkdir -p /shared/jobs/kept && printf 'step 1\\nstep 2\\n' >/shared/jobs/kept/slurm-1.out")
    whole = diagnostics(cluster, lines=1, jobs=1)
    assert re.search(r"^n0 .* idle", whole, re.MULTILINE)
    assert "does not answer" not in whole
    cluster.crash(CONTROLLER)
    parts = diagnostics(cluster, lines=1, jobs=1).splitlines()
    down = "ctl does not answer: there is no process N: the container is not running"
    assert [re.sub(r"process \d+", "process N", line) for line in parts] == [
        *(down, "==> ctl <==", down),
        *("==> jobs/kept/slurm-1.out <==", "step 2"),
    ]


def test_an_interrupted_start_leaves_nothing_behind(cluster: Cluster) -> None:
    name = f"{cluster.name}-int"
    starting = _tool("up", "--nodes", "3", "--name", name)
    wait_until(lambda: _traces(cluster, name), 20, "the first container is there")
    starting.send_signal(signal.SIGINT)
    assert starting.wait(timeout=300) == 130
    assert _traces(cluster, name) == ""
    assert not (registry.clusters_dir() / name).exists()


def test_only_the_leftovers_of_a_dead_run_are_removed(cluster: Cluster) -> None:
    name = f"{cluster.name}-dead"
    code = f"from muster.slurm.testcluster.cluster import *; from muster.slurm.testcluster.spec import *; import time; \
Cluster.up(ClusterSpec(nodes=1, daemons=False), {name!r}); print('up', flush=True); time.sleep(60)"
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "up\n"
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    assert _traces(cluster, name) != ""
    assert _tool("down", "--stale").wait(timeout=300) == 0
    assert _traces(cluster, name) == ""
    assert cluster.is_running("n0")


def _tool(*args: str) -> subprocess.Popen[bytes]:
    # A shell that runs the tests in the background ignores SIGINT, and all its children inherit this.
    heeds = ["env", "--default-signal=INT"]
    return subprocess.Popen([*heeds, sys.executable, "-m", "muster.slurm.testcluster", *args])


def _traces(cluster: Cluster, name: str) -> str:
    """The containers and networks of cluster `name`, as the engine lists them."""
    label = f"label={registry.LABEL}={name}"
    containers = cluster.engine.call("ps", "-aq", "--filter", label).checked()
    return containers + cluster.engine.call("network", "ls", "-q", "--filter", label).checked()
