"""The Diagnosis service: what was measured of a job and of its links, and one measurement of a link on request.

Whoever may read a job with `muster status` may call both methods (`authority_table`).
"""

from __future__ import annotations

import grpc.aio

from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedGang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.diagnosis.past_generations import PastGeneration
from muster.daemon.coordinator.diagnosis.run_recorder import RunRecorder
from muster.daemon.coordinator.services import views
from muster.daemon.coordinator.services.api_handlers import unary_handler
from muster.daemon.coordinator.services.api_service import BesideApi, MusterService
from muster.daemon.coordinator.services.job_specs import shown
from muster.daemon.coordinator.services.rpc_errors import aborted, invalid_argument
from muster.daemon.coordinator.shell.engine import Engine
from muster.daemon.coordinator.shell.link_rates import KnownRate, NotMeasured
from muster.daemon.coordinator.view_parts.measured_steps import RankStep, measured_steps
from muster.daemon.host import clock
from muster.v1 import api_pb2, diagnosis_pb2_grpc
from muster.v1 import diagnosis_pb2 as pb

_Context = grpc.aio.ServicerContext[object, object]
MOST_PAST = 50
"""Past generations of one answer."""


class DiagnosisService(BesideApi, diagnosis_pb2_grpc.DiagnosisServicer):
    """The servicer. `api` finds the gang, and refuses callers without the right to it."""

    def __init__(self, engine: Engine, api: MusterService, recorder: RunRecorder) -> None:
        super().__init__(engine, api)
        self._recorder = recorder

    @unary_handler
    async def Measurements(self, request: api_pb2.GangRef, context: _Context) -> pb.JobMeasurements:
        """See diagnosis.proto."""
        gang = self.callers_gangs.find(request)
        past = await self._recorder.of_job(gang.account.owner_uid, gang.account.name)
        core = self._engine.core
        seen, settings = core.observed.gangs.get(gang.id, ObservedGang()), self._recorder.settings(gang.id)
        found = measured_steps(gang, seen)
        runs = gang.phase is Phase.RUNNING
        reply = pb.JobMeasurements(
            gang=views.gang_view(core.state, core.observed, gang, self._engine.clock.now()),
            ranks=map(_rank, found.ranks) if runs else [],
            step_s=found.step_s if runs else 0.0,
            links=map(_link_rate, self._engine.links.of_gang(gang.id)),
            past=[_past(one, settings) for one in past[:MOST_PAST]],
        )
        if spec := await self._api.registered_spec(gang):
            reply.spec.CopyFrom(shown(spec))
        return reply

    @unary_handler
    async def MeasureLink(self, request: pb.MeasureLinkRequest, context: _Context) -> pb.LinkRate:
        """See diagnosis.proto."""
        gang = self.callers_gangs.find(request.gang)
        sender, receiver = request.from_node, request.to_node
        for node in (sender, receiver):
            if node not in gang.roster.members or gang.roster.members[node].removed:
                raise invalid_argument(f"{node[:80]} is no node of {_words(gang)}: see muster status {gang.slurm.job}")
        if sender == receiver:
            raise invalid_argument(f"a link joins two nodes, not {sender} with itself")
        stream = self._engine.streams.get(gang.id, sender)
        if stream is None:
            raise aborted(f"the agent on {sender} is not attached: try again")
        try:
            address = gang.roster.members[receiver].peer_address
            rate = await self._engine.links.measure(self._engine.journal.term, stream, receiver, address)
        except NotMeasured as error:
            raise aborted(str(error)) from None
        return _link_rate(rate)


def _words(gang: Gang) -> str:
    return f"{gang.account.name or gang.id} (job {gang.slurm.job})"


def _rank(one: RankStep) -> pb.RankStepTime:
    return pb.RankStepTime(rank=one.rank, compute_s=one.compute_s, wait_s=one.wait_s, fetch_s=one.fetch_s)


def _link_rate(rate: KnownRate) -> pb.LinkRate:
    return pb.LinkRate(
        from_node=rate.sender,
        to_node=rate.receiver,
        bytes=rate.size,
        seconds=rate.seconds,
        ago_s=clock.monotonic() - rate.at,
        requested=rate.requested,
        cores_shared=rate.cores_shared,
        rated=rate.rated,
    )


def _past(one: PastGeneration, settings: str) -> pb.PastGeneration:
    return pb.PastGeneration(
        gang_id=one.gang,
        slurm_job_id=one.job,
        generation=one.generation,
        started_s=one.started_at,
        ended_s=one.ended_at,
        steps=one.steps,
        step_s=one.step_s,
        compute_s=one.compute_s,
        wait_s=one.wait_s,
        nodes=one.nodes,
        same_settings=bool(settings) and one.settings == settings,
        best_step_s=one.best_step_s,
        best_s=one.best_at,
    )
