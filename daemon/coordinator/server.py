"""The coordinator as a whole: journal, engine, the watch on Slurm, and the gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from muster.daemon.coordinator.accounting.gang_accounts import GangAccounts
from muster.daemon.coordinator.accounting.goodput_service import GoodputService
from muster.daemon.coordinator.coordinator_names import CoordinatorNames
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.observed_state import NODE_HEARTBEAT_S
from muster.daemon.coordinator.diagnosis.diagnosis_service import DiagnosisService
from muster.daemon.coordinator.diagnosis.run_recorder import RunRecorder
from muster.daemon.coordinator.hooks.delivery import Hooks
from muster.daemon.coordinator.hooks.messages import messages
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.metrics.coordinator_metrics import Metrics
from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.coordinator.services.agent_service import AgentService
from muster.daemon.coordinator.services.api_service import MusterService
from muster.daemon.coordinator.services.login_names import LoginNames, ReaderNames
from muster.daemon.coordinator.services.node_service import NodeService
from muster.daemon.coordinator.shell.engine import Engine
from muster.daemon.coordinator.shell.load_shedding import NOBODY_IS_GIVEN_UP, SheddingLimits
from muster.daemon.coordinator.slurm.fabric_watch import FabricWatch
from muster.daemon.coordinator.slurm.job_comments import JobComments
from muster.daemon.coordinator.slurm.local_slurm import LocalSlurm
from muster.daemon.coordinator.slurm.lookup import ROSTER_VALID_S, SlurmLookup
from muster.daemon.coordinator.slurm.roster import SlurmRoster
from muster.daemon.coordinator.slurm.watch import SlurmWatch, jobs_in_doubt
from muster.daemon.host.name_resolution import NameResolver
from muster.daemon.metrics.metrics_access import MetricsAccess
from muster.daemon.transport import authority, call_binding, server_limits
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.calls.call_share import CallShare
from muster.daemon.transport.channel import bind, make_server, stop_server
from muster.daemon.transport.identity import Credentials
from muster.daemon.transport.management_hosts import Resolve
from muster.daemon.transport.server_limits import StreamLimits, coordinator_share, more_coordinator_calls
from muster.daemon.transport.tls import CertificateFiles, Trust
from muster.slurm.client.deadline import no_lease
from muster.slurm.client.types import Slurm
from muster.v1 import (
    agent_pb2,
    agent_pb2_grpc,
    api_pb2,
    api_pb2_grpc,
    diagnosis_pb2,
    diagnosis_pb2_grpc,
    goodput_pb2,
    goodput_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
)

GRACE_S = 0.2
"""Seconds that calls under way get to end when the coordinator stops."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a coordinator.

    Args:
        listen: "host:port", port 0 for any.
        confirm_leadership: is called before the coordinator acts; does not return if another coordinator may act.
        stream_limits: what one stream may send, and how long its client may leave messages unread.
        share_of: the share among whose calls one of a method counts.
        login_names: finds the names of users who request something.
        reader_names: finds the names and groups by which jobs name those who may read them.
        shedding: the load at which watchers are given up.
        lease_term: the term of the lease under which `state_dir` is used; 0: no other coordinator shares the folder.
        certificate_files: what this coordinator proves itself with; None: all connections are plain text.
        configured_names: the coordinators' hosts as callers name them. In plain text, a credential may be made for
            those of them that are this host.
        metrics: where metrics are served, and to whom; None: nowhere.
        private_jobs: nodes that no job of the caller has are shown to operators only, whatever PrivateData says.
        fabric_file: what the site says of its network; None: nothing.
    """

    listen: str
    state_dir: Path
    slurm: Slurm
    credentials: Credentials
    rights: Rights
    policy: Policy = field(default_factory=Policy.load)
    heartbeat_s: float = NODE_HEARTBEAT_S
    resolve: Resolve = field(default_factory=NameResolver)
    confirm_leadership: Callable[[], object] = no_lease
    lease_term: int = 0
    stream_limits: StreamLimits = field(default_factory=StreamLimits)
    share_of: Callable[[str], CallShare] = coordinator_share
    login_names: LoginNames = field(default_factory=LoginNames)
    reader_names: ReaderNames = field(default_factory=ReaderNames)
    shedding: SheddingLimits = field(default_factory=SheddingLimits)
    certificate_files: CertificateFiles | None = None
    configured_names: frozenset[str] = frozenset()
    fabric_file: Path | None = None
    private_jobs: bool = False
    metrics: MetricsAccess | None = None


class Coordinator:
    """One running coordinator. `await open()`, then `await start()`, then `await wait()`, then `await stop()`."""

    @classmethod
    async def open(cls, settings: Settings) -> Self:
        """A coordinator that has replayed its journal. The event loop runs meanwhile, however large the journal is.

        Raises:
            JournalError: the journal can't be opened or read.
            TlsError, OSError: the files of the issuing authority can't be used.
        """
        return cls(settings, *await asyncio.to_thread(_open_journal, settings.state_dir, settings.lease_term))

    def __init__(self, settings: Settings, journal: Journal, state: DurableState) -> None:
        """`state` is the replay of `journal`, which the coordinator closes when it stops."""
        self._settings = settings
        is_local = isinstance(settings.slurm, LocalSlurm)
        self._journal = journal
        self._issuing = authority.issuing_authority(settings.state_dir) if settings.certificate_files else None
        self._host_names = call_binding.names_of_this_host()
        self._plain_names = CoordinatorNames(settings.configured_names, self._host_names)
        self.engine = Engine(
            journal,
            state,
            settings.slurm,
            settings.credentials,
            trust=Trust(self._issuing_pem) if self._issuing else None,
            limits=settings.policy.limits,
            confirm_leadership=settings.confirm_leadership,
            shedding=NOBODY_IS_GIVEN_UP if is_local else settings.shedding,
        )
        self._recorder = RunRecorder(self.engine, settings.state_dir)
        self._accounts = GangAccounts(self.engine, settings.state_dir, settings.policy.goodput_kept_s)
        # The site's hooks are about its cluster: `muster run --local` reads the same policy.
        if hooks := Hooks([] if is_local else settings.policy.hooks):
            state, now = self.engine.core.state, self.engine.clock.now
            self.engine.on_facts.append(lambda decided: hooks.tell(messages(decided, state, now())))
        wanted = settings.policy.comments
        self._comments = JobComments(
            settings.slurm, self.engine.core.state, comment=wanted.comment, admin_comment=wanted.admin_comment
        )
        self.engine.on_facts.append(self._comments.note)
        self._watch = SlurmWatch(
            settings.slurm,
            self.engine.core.state,
            self.engine.post,
            lambda: self.engine.clock.ahead_s(),
            self._accounts.note_account,
            lambda: jobs_in_doubt(self.engine.core.state, self.engine.core.observed),
        )
        self.roster = SlurmRoster(settings.slurm)
        self.fabric = FabricWatch(settings.slurm, self.roster, self.engine.post, settings.fabric_file)
        self._watch_task: asyncio.Task[None] | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in grpc-stubs
        self._metrics = Metrics(settings.policy, self.engine, self.roster, settings.login_names, self._accounts)
        self._server = self._make_server()
        self.port = self.metrics_port = 0

    async def start(self) -> None:
        """Listen, and carry out what was owed before the restart.

        Raises:
            muster.daemon.transport.channel.ListenError: the address is in use.
        """
        files = self._settings.certificate_files
        if files is None and self._plain_names.is_waiting:
            await self._plain_names.resolve_names(self._settings.resolve)
        self.port = bind(self._server, self._settings.listen, files.certificates() if files else None)
        if self._settings.metrics:
            self.metrics_port = self._metrics.serve(self._settings.metrics)
        self.engine.start()
        self._watch_task = asyncio.create_task(self._watch_slurm())
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def wait(self) -> None:
        """Wait until the engine is closed.

        Raises:
            JournalError: the journal can't be written.
            Exception: a bug; the engine has stopped acting.
        """
        watch_task = self._watch_task
        await asyncio.wait(
            {self.engine.failed, *([watch_task] if watch_task else [])}, return_when=asyncio.FIRST_COMPLETED
        )
        if self.engine.failed.done():
            self.engine.failed.result()
        elif watch_task:
            watch_task.result()

    async def stop(self) -> None:
        """Stop to answer and close the journal. Agents keep running and attach to the next coordinator."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self.engine.aclose()
        self.engine.streams.close()
        await self._metrics.stop()
        if self._watch_task:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)
        await stop_server(self._server, GRACE_S)
        await asyncio.to_thread(self._recorder.close)
        await asyncio.to_thread(self._accounts.close)
        self._journal.close()

    async def _watch_slurm(self) -> None:
        resolve, hosts = self._settings.resolve, self._settings.rights.management_hosts
        names = () if self._settings.certificate_files else (self._plain_names.run(resolve),)
        watches = (
            self._watch.run(),
            self.roster.run(),
            self.fabric.run(),
            self._recorder.run(),
            self._accounts.run(),
            self._comments.run(),
            hosts.run(resolve),
        )
        await asyncio.gather(*watches, *names)

    def _make_server(self) -> grpc.aio.Server:
        settings, engine = self._settings, self.engine
        # The nodes of `muster run --local` appear one after another, and to ask for them costs nothing.
        valid_s = 0.0 if isinstance(settings.slurm, LocalSlurm) else ROSTER_VALID_S
        lookup = SlurmLookup(settings.slurm, self.roster, roster_valid_s=valid_s)
        server = make_server(
            settings.credentials,
            server_limits.COORDINATOR,
            server_names=self._names,
            refuse=settings.rights.refusal,
            share_of=lambda method, uid: settings.share_of(method),
            more_calls=self._more_calls,
        )
        agent_pb2_grpc.add_AgentServiceServicer_to_server(
            AgentService(
                engine, lookup, self.fabric, settings.slurm, settings.rights, settings.stream_limits, self._issuing
            ),
            server,
        )
        nodes = NodeService(
            engine,
            lookup,
            settings.policy,
            settings.rights,
            settings.stream_limits,
            heartbeat_s=settings.heartbeat_s,
            resolve=settings.resolve,
            issuing=self._issuing,
            on_signal=self._metrics.events.note_signal,
        )
        node_pb2_grpc.add_NodeServiceServicer_to_server(nodes, server)
        self.api = api = MusterService(
            engine,
            lookup,
            self.roster,
            settings.rights,
            settings.stream_limits,
            login_names=settings.login_names,
            reader_names=settings.reader_names,
            private_jobs=settings.private_jobs,
            goodput=self._accounts.view,
            driver_lines=nodes.driver_lines,
        )
        api_pb2_grpc.add_MusterServicer_to_server(api, server)
        diagnosis_pb2_grpc.add_DiagnosisServicer_to_server(DiagnosisService(engine, api, self._recorder), server)
        goodput_pb2_grpc.add_GoodputServicer_to_server(GoodputService(engine, api, self._accounts), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection([*_SERVICES, reflection.SERVICE_NAME], server)
        return server

    def _more_calls(self, method: str, uid: int) -> int:
        gangs = self.engine.core.state.gangs.values()
        nodes = sum(len(gang.roster.members) for gang in gangs if gang.account.owner_uid == uid and not gang.final)
        return more_coordinator_calls(method, nodes, operates=self._settings.rights.is_operators(uid))

    def _names(self) -> frozenset[str]:
        """The names under which this coordinator may be called. Its certificate names no other coordinator."""
        files = self._settings.certificate_files
        return self._host_names | files.names if files else self._plain_names.current

    def _issuing_pem(self) -> bytes:
        assert self._issuing
        return self._issuing.pem

    async def _set_health(self, state: object) -> None:
        for service in ("", *_SERVICES):
            await self._health.set(service, state)


def _open_journal(folder: Path, lease_term: int) -> tuple[Journal, DurableState]:
    journal = Journal(folder, lease_term=lease_term)
    return journal, journal.load()


_SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (agent_pb2, "AgentService"),
        (node_pb2, "NodeService"),
        (api_pb2, "Muster"),
        (diagnosis_pb2, "Diagnosis"),
        (goodput_pb2, "Goodput"),
    )
)
