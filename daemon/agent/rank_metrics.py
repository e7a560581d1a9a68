"""Tells this node's musterd what the ranks do, for the node's metrics: no process of a user listens for Prometheus.

Where musterd serves no metrics, or is not there, it is asked again after a while. Nothing of the job waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from statistics import median
from typing import NoReturn

from google.protobuf import json_format

from muster.daemon.host import kept_memory_client
from muster.v1.agent_pb2 import RankStatus, ShardStatus, Tier
from muster.v1.memory_pb2 import RankReport, ReportRanks

INTERVAL_S, REFUSED_S = 15.0, 600.0
"""Seconds between two reports, and after one that was not taken."""
TIMEOUT_S = 1.0
"""Seconds that musterd may take: it answers from memory."""
_log = logging.getLogger(__name__)


def report_of(job: int, ranks: list[RankStatus], shards: list[ShardStatus], logged: int = 0) -> ReportRanks:
    """What is reported. `logged`: the newest step that a rank has said, for ranks that finish none by the library."""
    own = sum(shard.bytes for shard in shards if shard.tier == Tier.TIER_OWN)
    return ReportRanks(
        slurm_job_id=job,
        ranks=(_rank_report(rank, logged) for rank in ranks),
        own_bytes=own,
        replica_bytes=sum(shard.bytes for shard in shards) - own,
    )


def _rank_report(rank: RankStatus, logged: int) -> RankReport:
    report = RankReport(rank=rank.rank, step=rank.step or logged)
    if rank.HasField("gpu"):
        report.gpu = rank.gpu
    if rank.block_times.compute_us:
        report.compute_s = median(rank.block_times.compute_us) / 1e6
    return report


async def keep_reporting(socket: str, report: Callable[[], ReportRanks], interval_s: float = INTERVAL_S) -> NoReturn:
    """Report to musterd at the socket `socket` for ever."""
    while True:
        refused = await asyncio.to_thread(send, socket, report())
        if refused:
            _log.debug("no metrics of ranks: %s", refused)
        await asyncio.sleep(REFUSED_S if refused else interval_s)


def send(socket: str, report: ReportRanks) -> str:
    """Returns why the report was not taken; empty: it was."""
    request = {"report_ranks": json_format.MessageToDict(report, preserving_proto_field_name=True)}
    try:
        answer, _ = kept_memory_client.send_request(socket, request, timeout_s=TIMEOUT_S)
    except (OSError, ValueError) as error:
        return str(error)
    return str(answer.get("refused", ""))
