"""Which nodes `make chaos` lets Muster drain, and for how long."""

from muster.slurm.testcluster.chaos.faulted_nodes import FAULT_EXPIRY_S, RecentFaults

ALL_HEALTHY: set[str] = {"n0", "n1"}


def test_a_node_without_a_fault_may_not_be_drained() -> None:
    assert "n0" not in RecentFaults()


def test_a_fault_expires_after_the_node_was_healthy_long_enough() -> None:
    faults = RecentFaults()
    faults.record("n0", 100.0)
    assert faults.expire(ALL_HEALTHY, 99.0 + FAULT_EXPIRY_S) == []
    assert "n0" in faults
    assert faults.expire(ALL_HEALTHY, 100.0 + FAULT_EXPIRY_S) == ["n0"]
    assert "n0" not in faults
    assert faults.expire(ALL_HEALTHY, 200.0 + FAULT_EXPIRY_S) == []


def test_each_new_fault_restarts_the_expiry_time() -> None:
    faults = RecentFaults()
    faults.record("n0", 100.0)
    assert faults.expire({"n1"}, 150.0) == []
    assert faults.expire(ALL_HEALTHY, 149.0 + FAULT_EXPIRY_S) == []
    faults.record("n0", 170.0)
    assert faults.expire(ALL_HEALTHY, 169.0 + FAULT_EXPIRY_S) == []
    assert faults.expire(ALL_HEALTHY, 170.0 + FAULT_EXPIRY_S) == ["n0"]
