"""All targets, by name. A target's modules are imported when it is loaded, so that a bug can be planted before."""

from __future__ import annotations

import importlib
import logging

from fuzzing.target import Target, bounded_work

PARSERS: dict[str, str] = {
    "kernel_lines": "parsers.kernel_lines",
    "job_spec": "parsers.job_spec",
    "job_yaml": "parsers.job_yaml",
    "batch_script": "parsers.batch_script",
    "site_policy": "parsers.site_policy",
    "slurm_json": "parsers.slurm_json",
    "slurm_text": "parsers.slurm_text",
    "protocol_messages": "parsers.protocol_messages",
    "memory_requests": "parsers.memory_requests",
    "snapshot_headers": "parsers.snapshot_headers",
    "shard_transfers": "parsers.shard_transfers",
    "journal_rows": "parsers.journal_rows",
    "host_files": "parsers.host_files",
}
SERVERS: dict[str, str] = {
    "coordinator_server": "servers.coordinator_server",
    "node_servers": "servers.node_servers",
    "memory_server": "servers.memory_server",
}
"""Servers and their callers share one event loop, so the lines that are counted are those of both."""
TARGETS = PARSERS | SERVERS
"""Name -> the module of its `check`."""


def load(name: str) -> Target:
    """The target `name`."""
    module = importlib.import_module(f"fuzzing.{TARGETS[name]}")
    logging.getLogger().addHandler(logging.NullHandler())  # or each warning would be printed

    if name in SERVERS:
        module.check(b"")  # starts the servers

    def check(data: bytes) -> None:
        with bounded_work(len(data), interrupts=name in PARSERS):
            module.check(data)

    return Target(name, check)
