"""A known user holds all that one user can of a real coordinator and of another user's agent, while a node dies."""

from __future__ import annotations

import json
import re

import pytest

from muster.daemon.transport.call_binding import name_of_agent
from muster.slurm.testcluster.cluster import LOGIN, Cluster
from muster.slurm.testcluster.training import SLOW_STEPS, Training, TrainingSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long]
SECONDS = 40


def address_of_agent(training: Training, node: str) -> str:
    """Where the agent's server on this node listens, as events say it."""
    events = training.cluster.sh(LOGIN, f"muster events {training.job}", user="alice")
    found = re.search(rf"the agent on {node} joined from job \d+, at ([\d.]+:\d+)", events)
    assert found, events
    return found[1]


def test_a_gang_recovers_and_nobody_is_blamed_while_a_user_holds_all_that_one_can(healthy: Cluster) -> None:
    with Training(healthy, TrainingSpec("attacked", nodes=3, spares=1, arguments=SLOW_STEPS)) as training:
        training.submit()
        training.wait_step(20)
        attacked, dead = training.node_of(0), training.node_of(2)
        agent = address_of_agent(training, attacked)
        name = name_of_agent(str(training.view["gang_id"]), attacked)
        module = ("python3", "-m", "muster.daemon.testing.known_user")
        attack = healthy.popen(LOGIN, *module, agent, name, str(SECONDS), user="bob")
        refused = "ss -Htn state established '( dport = :7070 )' | wc -l"
        wait_until(lambda: int(healthy.sh(LOGIN, refused)) > 100, 30, "bob holds connections to the coordinator")
        healthy.crash(dead)
        assert training.wait_left(dead)["nodes_out"] == [dead]
        assert attack.poll() is None
        counts = json.loads(attack.communicate(timeout=SECONDS + 60)[0].splitlines()[-1])
        assert {count.partition(" ")[0] for count in counts} >= {"Register", "Attach", "Ping"}, counts
        training.finish()
        recoveries = training.wait_final()["recoveries"]
        assert {node for recovery in recoveries for node in recovery.get("nodes_out", ())} == {dead}
