"""What nodes report of their hardware, in the coordinator: kept, shown, told to agents, and used for placement."""

from __future__ import annotations

import argparse
from typing import Any

import grpc.aio

from muster.daemon.coordinator.core.state.account import Account
from muster.daemon.coordinator.core.state.events import GangSpec
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedState
from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.state.slurm_jobs import SlurmJob
from muster.daemon.coordinator.core.turn.communication import fabric_of_gang
from muster.daemon.coordinator.services.views import gang_view
from muster.daemon.coordinator.shell.orders import Orders
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld
from muster.daemon.transport.channel import credential_metadata, open_channel
from muster.fabric.model.level import Level
from muster.fabric.model.node import Nic
from muster.fabric.sources.node_reports import NodeReport
from muster.launcher.fabric import ReportedDomains, ask_domains, ask_reports
from muster.launcher.output.node_tables import node_lines
from muster.launcher.output.screen import Screen
from muster.v1 import api_pb2_grpc, node_pb2, node_pb2_grpc
from muster.v1.api_pb2 import ListRequest
from muster.v1.common_pb2 import Adapter, Gpu, Hardware

HARDWARE = Hardware(
    numa_nodes=[0, 1],
    gpus=[
        Gpu(index=at, numa_node=at, nvlink_cluster="4a1c", nvlink_clique=7, nearest_adapters=["mlx5_0"])
        for at in range(2)
    ],
    adapters=[Adapter(infiniband_device="mlx5_0", gbit_per_s=20)],
)
REPORT = NodeReport(2, (0, 1), (Nic("mlx5_0", (0, 1)),), "4a1c.7", 2.5e9)


async def attached(channel: grpc.aio.Channel, node: str, hardware: Hardware | None) -> Any:
    """A call that the daemon of a node has opened."""
    hello = node_pb2.NodeHello(node=node, boot_id="b", incarnation="i", hardware=hardware)
    message = node_pb2.NodeMessage(hello=hello)
    metadata = await credential_metadata(channel, "/muster.v1.NodeService/Attach", message)
    stub: Any = node_pb2_grpc.NodeServiceStub(channel)
    call = stub.Attach(metadata=metadata)
    await call.write(message)
    await call.read()
    return call


async def answered(call: Any, hardware: Hardware) -> node_pb2.NodeOrder:
    await call.write(node_pb2.NodeMessage(hardware=hardware))
    order = await call.read()
    assert isinstance(order, node_pb2.NodeOrder)
    return order


def seen(world: ScriptedWorld, node: str) -> NodeReport | None:
    assert world.coordinator
    return world.coordinator.engine.core.observed.node(node).report


async def test_what_a_node_has_comes_with_hello_and_again_when_it_changes(world: ScriptedWorld) -> None:
    async with open_channel(world.address, world.credentials) as channel:
        call = await attached(channel, "n1", HARDWARE)
        assert seen(world, "n1") == REPORT
        await answered(call, Hardware())
        assert seen(world, "n1") == NodeReport()
        await attached(channel, "n2", None)
        assert seen(world, "n2") is None


async def test_nodes_shows_what_drivers_said_that_was_not_understood(world: ScriptedWorld) -> None:
    said = node_pb2.DriverLines(count=2, newest="mlx5_core 0000:c1:00.0: a new error\x1b[2J")
    async with open_channel(world.address, world.credentials) as channel:
        call = await attached(channel, "n1", None)
        await call.write(node_pb2.NodeMessage(heartbeat=node_pb2.Heartbeat(seq=1, driver_lines=said)))
        await call.read()
        api: Any = api_pb2_grpc.MusterStub(channel)
        shown = (await api.Nodes(ListRequest())).nodes[0]
        *_, record = node_lines([shown], Screen(), verbose=True)
        words = (
            "2 lines of drivers in trouble are not understood, the newest: mlx5_core 0000:c1:00.0: a new error\\x1b[2J"
        )
        assert record.endswith(words)
        await attached(channel, "n1", None)  # its daemon has started again, and counts anew
        assert not any(node.driver_lines for node in (await api.Nodes(ListRequest())).nodes)


async def test_a_report_that_no_node_has_changes_nothing_and_ends_no_stream(world: ScriptedWorld) -> None:
    async with open_channel(world.address, world.credentials) as channel:
        call = await attached(channel, "n1", HARDWARE)
        for _ in range(2):
            assert (await answered(call, Hardware(gpus=[Gpu(uuid="x" * 99)]))).heartbeat_s
        assert seen(world, "n1") == REPORT


async def test_a_node_s_domain_is_in_orders_and_views_and_ranks_have_their_place(world: ScriptedWorld) -> None:
    async with open_channel(world.address, world.credentials) as channel:
        for node in ("n1", "n2"):
            await attached(channel, node, HARDWARE)
        await world.start_agents(NODES)
        await world.wait_for_duty("RUN 1", ["n1", "n2"])
        assert world.coordinator
        core = world.coordinator.engine.core
        view = gang_view(core.state, core.observed, world.gang, 0.0)
    assert {node: member.nvlink_domain for node, member in world.gang.roster.members.items()} == {
        "n1": "4a1c.7",
        "n2": "4a1c.7",
        "n3": "",
    }
    slow = {node: member.adapter_bandwidth for node, member in world.gang.roster.members.items()}
    assert slow == {"n1": 2.5e9, "n2": 2.5e9, "n3": 0}
    fabric = fabric_of_gang(world.gang, core.observed)
    assert fabric.link("n1", "n3").bandwidth == 2.5e9
    order = Orders(world.gang).for_node("n1")
    assert {member.node: member.nvlink_domain for member in order.members}["n2"] == "4a1c.7"
    assert [(rank.rank, rank.local_rank, rank.nvlink_domain) for rank in view.ranks] == [
        (0, 0, "4a1c.7"),
        (1, 0, "4a1c.7"),
    ]
    assert [dict(rank.coordinates) for rank in view.ranks] == [
        {"tensor": 0, "context": 0, "data": at, "pipeline": 0} for at in range(2)
    ]
    assert {node.node: node.nvlink_domain for node in view.nodes}["n2"] == "4a1c.7"


def test_members_of_one_nvlink_domain_are_nearer_than_a_leaf() -> None:
    def member(node: str, domain: str) -> Member:
        return Member(node, 1, "i", f"{node}:9", batch_host=False, leaf="s0", nvlink_domain=domain)

    members = [member("n1", "c.1"), member("n2", "c.1"), member("n3", "")]
    gang = Gang("g", GangSpec(3, 0), Account(0, "g", "", 0.0), SlurmJob(1))
    gang.roster.members = {one.node: one for one in members}
    fabric = fabric_of_gang(gang, ObservedState(observing_since=0.0))
    assert fabric.level_between("n1", "n2") is Level.NVLINK
    assert fabric.level_between("n1", "n3") is Level.LEAF


async def test_commands_can_ask_which_domains_nodes_report(world: ScriptedWorld) -> None:
    secret = f"secret:{world.folder.parent}/secret"
    options = argparse.Namespace(coordinator=world.address, auth=secret, connections=None, config=None)
    async with open_channel(world.address, world.credentials) as channel:
        await attached(channel, "n1", HARDWARE)
        await attached(channel, "n2", Hardware())
        assert await ask_reports(options) == {"n1": NodeReport(nvlink_domain="4a1c.7", adapter_bandwidth=2.5e9)}
        nodes = len(NODES)
        assert await ask_domains(options) == ReportedDomains((1,), silent=nodes - 2)
