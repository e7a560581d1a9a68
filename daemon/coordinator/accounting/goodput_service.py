"""The Goodput service: to what the time of the nodes went, over all jobs that the caller may read."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

import grpc.aio

from muster.daemon.coordinator.accounting.account_store import Reader, Row
from muster.daemon.coordinator.accounting.gang_accounts import GangAccounts
from muster.daemon.coordinator.services.api_handlers import stream_handler
from muster.daemon.coordinator.services.api_service import BesideApi, MusterService
from muster.daemon.coordinator.services.rpc_errors import invalid_argument, unavailable
from muster.daemon.coordinator.shell.engine import Engine
from muster.daemon.transport.identity import current_caller
from muster.v1 import goodput_pb2 as pb
from muster.v1 import goodput_pb2_grpc

_Context = grpc.aio.ServicerContext[object, object]
PAGE_ROWS = 500
"""Rows of one page: some 200 KB."""
GROUPS = {
    pb.GOODPUT_GROUP_JOB: "job",
    pb.GOODPUT_GROUP_ACCOUNT: "account",
    pb.GOODPUT_GROUP_CAUSE: "cause",
    pb.GOODPUT_GROUP_NODE: "node",
    pb.GOODPUT_GROUP_LEAF: "leaf",
}


class GoodputService(BesideApi, goodput_pb2_grpc.GoodputServicer):
    """The servicer. `api` says whose jobs the caller may read."""

    def __init__(self, engine: Engine, api: MusterService, accounts: GangAccounts) -> None:
        super().__init__(engine, api)
        self._accounts = accounts

    @stream_handler
    async def Account(self, request: pb.GoodputRequest, context: _Context) -> AsyncIterator[pb.GoodputPage]:
        """See goodput.proto."""
        by = GROUPS.get(request.by)
        if by is None:
            raise invalid_argument(f"an account is grouped by one of {', '.join(GROUPS.values())}")
        until = request.until_s or self._engine.clock.now()
        if not (math.isfinite(request.since_s) and math.isfinite(until) and request.since_s < until):
            wrong = f"since_s = {request.since_s}, until_s = {until}"
            raise invalid_argument(f"{wrong}: give finite times, and an earlier since_s than until_s")
        reader = None
        if not self.callers_gangs.allows(None):
            reader = Reader(current_caller().uid, await self.callers_gangs.names_of_reader())
        async with self._api.one_of_the_site():
            rows = await self._accounts.summary(request.since_s, until, by, reader)
        if rows is None:
            raise unavailable("the store of what jobs have used can't be read: see the coordinator's log")
        for first in range(0, max(1, len(rows)), PAGE_ROWS):
            page = rows[first : first + PAGE_ROWS]
            yield pb.GoodputPage(
                since_s=request.since_s,
                until_s=until,
                rows=map(_row, page),
                incomplete=not self._accounts.is_complete,
            )


def _row(row: Row) -> pb.GoodputRow:
    return pb.GoodputRow(
        key=row.key,
        parts=[
            pb.GoodputPart(category=category, node_s=node_s, gpu_s=row.gpu_s[category])
            for category, node_s in sorted(row.node_s.items(), key=lambda item: -item[1])
        ],
        faults=row.faults,
        saved_node_s=row.saved_node_s,
        saved_gpu_s=row.saved_gpu_s,
    )
