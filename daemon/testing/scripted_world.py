"""A coordinator on loopback with scripted agents: real streams, credentials and journal, Slurm in memory.

For tests. A job of three nodes (two with one rank each, one spare) runs in Slurm; the test starts and stops
coordinators.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.stored_names import stored_class
from muster.daemon.coordinator.journal.history import Record
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.server import Coordinator, Settings
from muster.daemon.host import clock
from muster.daemon.testing.scripted_agent import ScriptedAgent
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.channel import credential_metadata, open_channel
from muster.daemon.transport.identity import Credentials, SecretCredentials
from muster.daemon.transport.management_hosts import Resolve
from muster.daemon.transport.tls import Trust
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.slurm.client.parsing.sbatch_request import JobRequest
from muster.v1 import common_pb2, node_pb2, node_pb2_grpc

NODES = ("n1", "n2", "n3")
DEADLINE_S = 120.0


def spec(**more: object) -> common_pb2.JobSpec:
    """A job of two nodes with one rank each, and one spare."""
    wanted = {"name": "train", "nodes": 2, "spares": 1, "ranks_per_node": 1, "max_failures": 3, **more}
    return common_pb2.JobSpec(**wanted)  # type: ignore[arg-type]


async def _loopback(name: str) -> set[str]:
    """Resolve every node of the tests to this machine."""
    return {"127.0.0.1"}


@dataclass
class ScriptedWorld:
    """One Slurm, one journal folder, one coordinator at a time, and the agents of one job."""

    folder: Path
    credentials: Credentials
    slurm: FakeSlurm
    rights: Rights = Rights(frozenset())  # noqa: RUF009  # frozen
    agents: dict[str, ScriptedAgent] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    coordinator: Coordinator | None = None
    trust: Trust | None = None
    """Whom agents take for the coordinator; None: plain text."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of the coordinator's Settings that differ from their defaults."""

    @classmethod
    def create(cls, folder: Path, owner_uid: int | None = None) -> ScriptedWorld:
        """A world in which Slurm runs the job of `owner_uid` (None: this process's uid), without a coordinator yet."""
        cluster = FakeCluster(NODES, now=clock.wall, user=(os.getuid() if owner_uid is None else owner_uid, "user"))
        cluster.submit(JobRequest(nodes=len(NODES), no_kill=True))
        return cls(folder / "state", SecretCredentials.create(folder / "secret"), FakeSlurm(cluster))

    @property
    def cluster(self) -> FakeCluster:
        """The cluster of the in-memory Slurm."""
        return self.slurm.cluster

    async def close(self) -> None:
        """End all agents and the coordinator."""
        for agent in self.agents.values():
            await agent.die()
        await self.stop_coordinator()

    async def start_coordinator(
        self, journal: Journal | None = None, resolve: Resolve = _loopback, listen: str = "127.0.0.1:0"
    ) -> None:
        """Start a coordinator. Every agent without a duty EXIT attaches to it."""
        settings = Settings(listen, self.folder, self.slurm, self.credentials, self.rights, resolve=resolve)
        settings = replace(settings, **self.settings)
        self.coordinator = (
            Coordinator(settings, journal, journal.load()) if journal else await Coordinator.open(settings)
        )
        await self.coordinator.start()
        for name, agent in self.agents.items():
            if not agent.duty.startswith("EXIT"):
                self._attach(name)

    async def stop_coordinator(self) -> None:
        """Stop the coordinator. The agents keep running."""
        coordinator, self.coordinator = self.coordinator, None
        if coordinator:
            await coordinator.stop()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()

    async def running_coordinator(self) -> Coordinator:
        """Wait for a running coordinator and return it."""
        while self.coordinator is None or not self.coordinator.engine.running:  # noqa: ASYNC110  # see below
            await asyncio.sleep(0)  # one turn of the loop: the task that restarts the coordinator runs in this loop
        return self.coordinator

    async def wait_for_slurm(self) -> None:
        """Wait until no Slurm call is owed."""
        assert self.coordinator
        engine = self.coordinator.engine
        with engine.journal_subscribers.subscribe() as live:
            async with asyncio.timeout(DEADLINE_S):
                while engine.core.state.owed:
                    await live.get()

    async def start_agents(self, names: Sequence[str], **given: object) -> None:
        """Start agents on these nodes; they attach."""
        for name in names:
            agent = ScriptedAgent(name, spec(**given), self.credentials, batch_host=name == "n1", trust=self.trust)
            await agent.open()
            self.agents[name] = agent
            if self.coordinator:
                self._attach(name)

    def _attach(self, name: str) -> None:
        self.tasks.add(asyncio.create_task(self.agents[name].attach(self.address), name=name))

    def streams_of(self, name: str) -> list[asyncio.Task[None]]:
        """The tasks of one agent's streams since this coordinator started."""
        return [task for task in self.tasks if task.get_name() == name]

    async def wait_for_duty(self, duty: str, names: Sequence[str]) -> None:
        """Wait until each of these agents has this duty."""
        for name in names:
            agent = self.agents[name]
            async with asyncio.timeout(DEADLINE_S):
                await agent.wait_until(lambda agent=agent: agent.duty == duty)  # type: ignore[misc]

    async def wait_for_facts(self, kind: type[facts.Fact], count: int = 1) -> list[Record]:
        """Wait until the journal has `count` facts of this kind."""
        assert self.coordinator
        engine = self.coordinator.engine
        with engine.journal_subscribers.subscribe() as live:
            found = [r for r in engine.journal.history("", 0, 10_000) if r.name == stored_class(kind)]
            async with asyncio.timeout(DEADLINE_S):
                while len(found) < count:
                    record = await live.get()
                    assert record
                    found += [record] * (record.name == stored_class(kind))
        return found

    @property
    def address(self) -> str:
        """The address of the coordinator."""
        assert self.coordinator
        return f"127.0.0.1:{self.coordinator.port}"

    @property
    def gang(self) -> Gang:
        """The job's gang in the durable state."""
        assert self.coordinator
        return self.coordinator.engine.core.state.gangs["g1"]

    async def send_signal(self, node: str, code: int, kind: str = "xid") -> None:
        """Attach as the node's daemon and send a signal. Returns once the coordinator has confirmed it."""
        await self.running_coordinator()
        async with open_channel(self.address, self.credentials) as channel:
            hello = node_pb2.NodeHello(node=node, boot_id="b", probe_address="", incarnation="d")
            first = node_pb2.NodeMessage(hello=hello)
            metadata = await credential_metadata(channel, "/muster.v1.NodeService/Attach", first)
            stub: Any = node_pb2_grpc.NodeServiceStub(channel)
            call = stub.Attach(metadata=metadata)
            await call.write(first)
            await call.read()  # a rejection arrives here: a write to an ended stream would fail with INTERNAL instead
            await call.write(node_pb2.NodeMessage(signal=node_pb2.Signal(kind=kind, code=code, text="NVRM: Xid")))
            await call.read()
