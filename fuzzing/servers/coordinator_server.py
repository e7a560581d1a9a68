"""A coordinator with the job of an honest user, called by strangers, by an owner of another job, and by a node's root.

After each input: the honest user is answered, strangers have changed nothing of the honest gang, and no bug was logged.
Now and then the coordinator stops, and the next one must be able to read the journal.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio

from fuzzing.servers import calls
from fuzzing.servers.health import BugLog
from muster.daemon.coordinator.core.state import events
from muster.daemon.host import clock
from muster.daemon.testing.chosen_users import ChosenUser
from muster.daemon.testing.scripted_world import ScriptedWorld
from muster.daemon.transport import job_limits
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.channel import open_channel
from muster.daemon.transport.identity import SecretCredentials
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.slurm.client.parsing.sbatch_request import JobRequest
from muster.v1 import api_pb2, api_pb2_grpc

ROOT, SLURM, HONEST, OWNER, OTHER = 0, 64030, 1001, 1002, 1003
NODES = ("n1", "n2", "n3", "n4", "n5")
SPEC = events.GangSpec(2, 1, gather_timeout_s=job_limits.MAX_GATHER_TIMEOUT_S)
_SERVER = "127.0.0.1"
_NODE_DAEMON = "/muster.v1.NodeService/Attach"
METHODS = (
    *map(
        "/muster.v1.Muster/{}".format,
        ("Register", "Describe", "Attend", "Watch", "List", "Events", "Cancel", "Flush", "Nodes"),
    ),
    "/muster.v1.AgentService/Attach",
    _NODE_DAEMON,
    "/muster.v1.Muster/Swap",
    "/muster.v1.Muster/Drain",
    "/muster.v1.Diagnosis/Measurements",
    "/muster.v1.Diagnosis/MeasureLink",
    "/muster.v1.Muster/NodeHistory",
    "/muster.v1.Goodput/Account",
)
"""The kept inputs name a method by its place, so a new one comes last."""
CALLERS = (None, OTHER, OWNER, ROOT)
RESTART_AFTER = 200
"""Inputs after which the coordinator is restarted."""


class _World:
    """The coordinator, and what the honest user has there."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-coordinator-")
        self._log = BugLog()
        self._inputs = self._worlds = 0
        self._loop.run_until_complete(self._create())

    async def _create(self) -> None:
        self._worlds += 1
        cluster = FakeCluster(NODES, now=clock.wall, user=(HONEST, "honest"))
        cluster.submit(JobRequest(nodes=3, no_kill=True))
        cluster.submit(JobRequest(nodes=2, no_kill=True), (OWNER, "owner"))
        folder = Path(self._folder.name) / str(self._worlds)
        folder.mkdir()
        secret = SecretCredentials.create(folder / "secret")
        self._world = ScriptedWorld(folder / "state", secret, FakeSlurm(cluster))
        self._world.credentials = self._slurm = ChosenUser(SLURM)
        self._world.rights = Rights(frozenset(), own_uid=SLURM)
        await self._start()
        assert self._world.coordinator
        engine = self._world.coordinator.engine
        engine.post(events.GangSubmitted("g1", 1, HONEST, "train", SPEC, "{}"))
        engine.post(events.SlurmJobChanged("g1", 1, NODES[:3], 0, None))
        await self._world.coordinator.roster.refresh()
        await self._ask()

    async def _start(self) -> None:
        await self._world.start_coordinator()
        self._channels = AsyncExitStack()
        plain = grpc.aio.insecure_channel(self._world.address)
        self._plain = await self._channels.enter_async_context(plain)
        honest = open_channel(self._world.address, self._slurm.as_uid(HONEST))
        self._honest = await self._channels.enter_async_context(honest)

    async def _stop(self) -> None:
        await self._channels.aclose()
        await self._world.stop_coordinator()

    def check(self, data: bytes) -> None:
        """One input."""
        self._loop.run_until_complete(self._check(data))

    async def _check(self, data: bytes) -> None:
        before = repr(self._world.gang)
        by_root = False
        for call in calls.calls_of(data, METHODS, len(CALLERS)):
            uid = CALLERS[call.caller]
            if uid == ROOT and call.method != _NODE_DAEMON:
                uid = OTHER  # root may do everything, and would
            by_root |= uid == ROOT
            await calls.make(call, self._plain, None if uid is None else self._slurm.as_uid(uid), _SERVER)
        await self._ask()
        assert by_root or repr(self._world.gang) == before, "a stranger has changed the honest gang"
        self._log.check()
        self._inputs += 1
        if self._inputs % RESTART_AFTER == 0 or self._world.gang.final:
            await self._restart()

    async def _ask(self) -> None:
        """The honest user asks for the job."""
        async with asyncio.timeout(calls.DEADLINE_S):
            view = await api_pb2_grpc.MusterStub(self._honest).Describe(api_pb2.GangRef(slurm_job_id=1))
        assert view.gang_id == "g1"

    async def _restart(self) -> None:
        """The next coordinator reads the journal of this one. An ended gang needs a new world."""
        ended = self._world.gang.final
        await self._stop()
        await (self._create() if ended else self._start())
        await self._ask()


_worlds: list[_World] = []


def check(data: bytes) -> None:
    """`data` as a sequence of calls. The first input starts the coordinator."""
    if not _worlds:
        _worlds.append(_World())
    _worlds[0].check(data)
