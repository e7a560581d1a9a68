"""slurmd runs muster-healthcheck and muster-epilog: a node that fails while the coordinator is away takes no job."""

import json

import pytest

from muster.slurm.testcluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.testcluster.training import FATAL_XID_LINE
from muster.slurm.testcluster.waiting import wait_until

pytestmark = pytest.mark.cluster

HEALTHCHECK = "/opt/muster/bin/muster-healthcheck"


def test_a_node_that_fails_while_the_coordinator_is_away_is_drained_after_its_job(healthy: Cluster) -> None:
    """Its own word drains it. The coordinator then gives it the reason."""

    def shown(node: str) -> str:
        return healthy.sh(CONTROLLER, f"scontrol show node {node}")

    def verdict(name: str) -> str:
        rows = map(json.loads, healthy.sh(LOGIN, "muster nodes --json", user="alice").splitlines())
        return next((row["verdict"] for row in rows if row["node"] == name), "")

    node, beside = healthy.nodes[-1], healthy.nodes[-2]
    wait_until(lambda: verdict(node) == "FIT", 30, f"{node} has attached, and knows the policy")
    wait_until(lambda: healthy.exec(node, HEALTHCHECK, check=False).rc == 0, 30, f"{node} is fit")
    healthy.kill_coordinator()
    healthy.kmsg(node, FATAL_XID_LINE)
    said = "muster-healthcheck: UNFIT: xid 79"
    wait_until(
        lambda: said in healthy.exec(node, HEALTHCHECK, check=False).stderr, 30, f"{node} knows that it is unfit"
    )
    for name in (node, beside):
        healthy.exec(LOGIN, "srun", "--nodelist", name, "-N1", "true", user="alice")
    wait_until(lambda: "DRAIN" in shown(node), 60, f"{node} is drained after its job")
    assert "Reason=Epilog error" in shown(node)
    assert "DRAIN" not in shown(beside)
    wait_until(lambda: said in healthy.logs(node, "slurmd"), 120, "slurmd has logged the health check")
    healthy.start_service(CONTROLLER, "muster-coordinator")
    wait_until(lambda: "Reason=muster: [node] Xid 79" in shown(node), 60, "the coordinator gives the reason")


def test_a_node_whose_prolog_fails_keeps_no_job_in_the_queue(healthy: Cluster) -> None:
    """Slurm drains the node, and holds the job until somebody releases it. The coordinator does, without the node."""
    node, prolog = healthy.nodes[1], "/opt/muster/bin/muster-prolog"
    text = "\n".join(('name = "held"', "nodes = 2", "spares = 1", 'command = ["true"]', 'run_dir = "/shared/held/run"'))
    try:
        healthy.sh(node, f"mv {prolog} {prolog}.kept; printf '#!/bin/sh\nexit 1\n' > {prolog}; chmod 755 {prolog}")
        healthy.sh(LOGIN, f"mkdir -p /shared/held; echo '{text}' > /shared/held/job.toml", user="alice")
        job = healthy.exec(LOGIN, "muster", "submit", "/shared/held/job.toml", user="alice").stdout.strip()

        def state() -> str:
            return healthy.sh(LOGIN, f"scontrol show job {job}").partition("JobState=")[2].split()[0]

        wait_until(lambda: state() == "COMPLETED", 60, "the job has started on other nodes, and ended")
        told = healthy.exec(LOGIN, "muster", "events", job, user="alice").stdout
        assert "the launch of the job failed" in told
        assert "Reason=Prolog error" in healthy.sh(LOGIN, f"scontrol show node {node}")
    finally:
        healthy.sh(node, f"mv -f {prolog}.kept {prolog}")
        healthy.sh(CONTROLLER, f"scontrol update nodename={node} state=resume")
