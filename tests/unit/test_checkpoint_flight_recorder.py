"""What PyTorch's flight recorder says of the collectives that a rank has entered. No torch: its JSON was recorded."""

import asyncio
import json
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from muster.checkpoint.testing.gang_in_one_process import InProcessGang
from muster.checkpoint.training.rank_signals.flight_recorder import entered_collectives, entered_in
from muster.v1.rank_pb2 import RankAlive, RankMessage, RankProgress

RECORDED = (
    b'{"comm_lib_version":"","nccl_comm_state":{},"pg_config":{"":{"desc":"","name":"","ranks":"[]"}},"pg_status":{"0":'
    b'{"last_completed_collective":"3","last_enqueued_collective":"4","last_started_collective":"-1"},"1":'
    b'{"last_completed_collective":"1","last_enqueued_collective":"9","last_started_collective":"-1"}},"version":"2.10"}'
)
"""What `torch._C._distributed_c10d._dump_fr_trace_json(includeCollectives=False)` of torch 2.13.0+cpu has returned, on
gloo with two process groups, while an all-reduce waited. Only one number of the second group was changed."""
NCCL = b'{"nccl_comm_state":{},"pg_status":{"0":{"last_enqueued_collective":"8"}},"version":"2.10"}'
"""The same format, as ProcessGroupNCCL writes it (FlightRecorderDetail.hpp). No GPU was at hand to record it."""


def status(**default_group: Any) -> str:
    return json.dumps({"version": "2.10", "pg_status": {"0": default_group}})


@pytest.mark.parametrize(
    ("dump", "number"),
    [
        (RECORDED, 4),
        (RECORDED.decode(), 4),
        (status(last_enqueued_collective="-1"), 0),
        (status(last_enqueued_collective=7), 7),
        (status(last_enqueued_collective="9" * 30), 2**63 - 1),
        (status(last_completed_collective="3"), None),
        (status(last_enqueued_collective="four"), None),
        (status(last_enqueued_collective=None), None),
        ('{"pg_status": {"1": {"last_enqueued_collective": "4"}}}', None),
        ('{"pg_status": []}', None),
        ('{"version": "2.10"}', None),
        ("[]", None),
        ("", None),
        (b"\x80\x02}q\x00.", None),  # a pickle
    ],
)
def test_the_collectives_of_the_default_group_are_read(dump: bytes | str, number: int | None) -> None:
    assert entered_in(dump) == number


def says(dump: bytes | str) -> Any:
    def recorder(*, includeCollectives: bool) -> bytes | str:
        assert not includeCollectives  # a look at collectives asks the GPU about its events
        return dump

    return recorder


def refuses(*, includeCollectives: bool) -> bytes:
    raise RuntimeError("the recorder has no buffer")


@pytest.mark.parametrize(
    ("recorders", "number"),
    [
        ({}, None),
        ({"_dump_fr_trace_json": says(RECORDED)}, 4),
        (
            {
                "_dump_nccl_trace_json": says(NCCL),
                "_dump_fr_trace_json": says(RECORDED),
            },
            8,
        ),
        ({"_dump_nccl_trace_json": says(b'{"pg_status": {}}'), "_dump_fr_trace_json": says(RECORDED)}, 4),
        ({"_dump_nccl_trace_json": refuses, "_dump_fr_trace_json": says(RECORDED)}, 4),
        ({"_dump_nccl_trace_json": refuses}, None),
        ({"_dump_nccl_trace_json": lambda: RECORDED}, None),
    ],
    ids=["none", "gloo", "both", "NCCL not used", "NCCL refuses", "only NCCL, refuses", "other arguments"],
)
def test_the_recorder_of_nccl_is_asked_before_that_of_gloo(recorders: dict[str, Any], number: int | None) -> None:
    assert entered_collectives(SimpleNamespace(**recorders)) == number


def test_without_pytorch_nobody_counts() -> None:
    assert entered_collectives() is None


async def test_an_agent_keeps_what_a_rank_without_a_step_says_and_drops_it_with_the_next_sign() -> None:
    gang = InProcessGang("g")
    await gang.add("n0")
    gang.begin({0: "n0"})
    service = gang.nodes["n0"].checkpoint_service
    with socket.socket(fileno=gang.socket(0, "n0")) as rank:
        for said, kept in ((7, 7), (None, None), (2**63, 2**63), (8, 8)):
            rank.send(RankMessage(alive=RankAlive(entered_collectives=said)).SerializeToString())
            rank.send(RankMessage(progress=RankProgress(step=(said or 1) % 1000)).SerializeToString())
            async with asyncio.timeout(60):
                while service.rank_reports.entered_collectives(0) != kept:  # noqa: ASYNC110 - a service tells nobody
                    await asyncio.sleep(0.01)
    await gang.close()
