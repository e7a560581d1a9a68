"""Which names of a node an agent may be reached at, as Slurm has them."""

from __future__ import annotations

import grpc
import pytest

from muster.daemon.coordinator.core.state.durable_state import Node
from muster.daemon.coordinator.services.hello import check_peer_address
from muster.daemon.coordinator.slurm.lookup import SlurmLookup
from muster.daemon.host import clock
from muster.daemon.transport.calls.call_refused import CallRefused
from muster.daemon.transport.identity import Caller
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm

CALLER = Caller(1000, 1000, "10.0.0.1")
REPORTED = ("10.0.0.1", "10.1.0.1")


@pytest.fixture
def slurm() -> FakeSlurm:
    """Slurm, which has one node at 127.0.0.1."""
    cluster = FakeCluster((), now=clock.wall)
    cluster.add_running_node(1, "n1", CALLER.uid)
    return FakeSlurm(cluster)


async def test_slurms_address_of_a_node_is_one_of_its_own(slurm: FakeSlurm) -> None:
    node = Node("n1", addresses=REPORTED)
    await check_peer_address("127.0.0.1:7", CALLER, node, SlurmLookup(slurm))
    with pytest.raises(CallRefused) as refused:
        await check_peer_address("127.0.0.2:7", CALLER, node, SlurmLookup(slurm))
    assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED


async def test_while_slurm_does_not_answer_an_agent_keeps_the_name_that_it_had(slurm: FakeSlurm) -> None:
    slurm.unavailable_reason = "slurmctld does not answer"
    node, lookup = Node("n1", addresses=REPORTED), SlurmLookup(slurm, retry_for_s=0.0)
    await check_peer_address("n1-ib:7", CALLER, node, lookup, known="n1-ib:7")
    await check_peer_address("10.1.0.1:7", CALLER, node, lookup)
    with pytest.raises(CallRefused) as refused:
        await check_peer_address("n1-ib:7", CALLER, node, lookup, known="10.1.0.1:7")
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE


async def test_an_address_is_not_checked_while_no_daemon_of_the_node_has_reported_any(slurm: FakeSlurm) -> None:
    await check_peer_address("198.51.100.1:7", CALLER, Node("n1"), SlurmLookup(slurm))
