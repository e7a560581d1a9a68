"""The nodes that a chaos run has faulted: when they are repaired, and whether Muster may drain them.

Muster may detect a fault late: a coordinator was frozen, a standby took over, or the node was cut off and reported the
fault after its repair. So a node's record expires only after the node was healthy for `FAULT_EXPIRY_S` without
interruption: repaired, in service in Slurm, and FIT in Muster. If Muster drains the node after that, Muster has made an
error.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from muster.slurm.testcluster.chaos.jobs import PromiseBroken
from muster.slurm.testcluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.testcluster.training import Training

FAULT_EXPIRY_S = 30.0
"""Seconds. A coordinator is frozen for at most 12 s. A standby serves after 9 s, and hears all nodes some seconds
later. Muster evicts a silent node after about 5 s.
"""


class RecentFaults:
    """The nodes that may be drained now. All times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._last_fault: dict[str, float] = {}  # the last time at which the node was not healthy

    def __contains__(self, node: str) -> bool:
        """Whether `node` may be drained."""
        return node in self._last_fault

    def record(self, node: str, now: float) -> None:
        """Records a fault of `node`."""
        self._last_fault[node] = now

    def expire(self, healthy: AbstractSet[str], now: float) -> list[str]:
        """Updates the records: the nodes `healthy` have no fault at `now`. Returns the nodes whose records have
        expired.
        """
        self._last_fault.update((node, now) for node in self._last_fault if node not in healthy)
        expired = [node for node, at in self._last_fault.items() if now - at >= FAULT_EXPIRY_S]
        for node in expired:
            del self._last_fault[node]
        return expired


@dataclass
class FaultedNodes:
    """The faulted nodes of a cluster. All times are those of the monotonic clock."""

    cluster: Cluster
    say: Callable[[str], None]
    repair_at: dict[str, float] = field(default_factory=dict)
    """The nodes that are not repaired yet, with the time of their repair."""
    recent: RecentFaults = field(default_factory=RecentFaults)
    rank_killed_on: dict[str, Training] = field(default_factory=dict)
    """Nodes on which a rank was killed, with the job. While the job runs, Muster may blame the node for a second
    crash."""

    def repair_due(self, everything: bool = False) -> None:
        """Checks all nodes, and repairs those that are due."""
        drained = self.check_drained()
        self._expire_faults(drained)
        now = time.monotonic()
        due = [node for node, at in self.repair_at.items() if everything or at <= now]
        due += [node for node in drained if node not in self.repair_at]
        if due:
            self.cluster.repair(*due)
            for node in due:
                self.repair_at.pop(node, None)
            self.say(f"repaired: {', '.join(due)}")

    def check_drained(self) -> list[str]:
        """Checks that every node that Muster has drained had a recent fault and has a reason. Returns the drained
        nodes.

        Raises:
            PromiseBroken: a drained node had no recent fault, or has no reason.
        """
        drained = []
        for node, state in self.cluster.node_states().items():
            if not re.search("drain|down", state):
                continue
            shown = self.cluster.sh(CONTROLLER, f"scontrol show node {node}")
            reason = re.search(r"Reason=(.*)", shown)
            if reason is None:
                raise PromiseBroken(f"{node} is {state} without a reason")
            if "muster:" in reason[1] and node not in self.recent:
                raise PromiseBroken(f"{node} is {state}, but had no recent fault: {reason[1]}")
            drained.append(node)
        return drained

    def _expire_faults(self, drained: Sequence[str]) -> None:
        """Removes the records of nodes that have been healthy long enough. Muster may no longer drain these nodes."""
        self.rank_killed_on = {node: job for node, job in self.rank_killed_on.items() if not job.view.get("final")}
        healthy = self._fit_nodes() - {*drained, *self.repair_at, *self.rank_killed_on}
        if expired := self.recent.expire(healthy, time.monotonic()):
            self.say(f"must not be drained any more: {', '.join(expired)}")

    def _fit_nodes(self) -> set[str]:
        """The nodes that Muster calls FIT; empty if no coordinator answers."""
        result = self.cluster.exec(LOGIN, "muster", "nodes", "--json", check=False)
        nodes = [json.loads(line) for line in result.stdout.splitlines()] if result.rc == 0 else []
        return {str(node["node"]) for node in nodes if node["verdict"] == "FIT"}
