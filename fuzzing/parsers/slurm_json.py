"""What Slurm's commands print with --json. It gives jobs and nodes with fields of the right types, or one error.

A user chooses a job's name, comment and work_dir.
"""

import asyncio

from muster.slurm.client.parsing import json_stream, records
from muster.slurm.client.types import Job, Node


def check(data: bytes) -> None:
    """`data` as the output of `squeue --json` and of `scontrol show node --json`."""
    asyncio.run(_check(data.decode(errors="replace")))


async def _check(text: str) -> None:
    try:
        async for record in json_stream.records(text, "jobs"):
            _check_job(records.job(record))
    except ValueError:
        pass
    try:
        async for record in json_stream.records(text, "nodes"):
            _check_node(records.node(record))
    except ValueError:
        pass


def _check_job(job: Job) -> None:
    assert type(job.id) is int
    assert type(job.user_id) is int
    assert all(isinstance(name, str) for name in (*job.nodes, *job.excluded, job.name, job.batch_host, job.comment))
    assert job.exit_code is None or job.state.ended
    assert job.time_limit_s is None or type(job.time_limit_s) is int


def _check_node(node: Node) -> None:
    assert all(isinstance(text, str) for text in (node.name, node.address, node.hostname, node.reason, node.gres))
    assert type(node.memory_mib) is int
    assert node.boot_time is None or type(node.boot_time) is float
