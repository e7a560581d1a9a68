"""The spec of a job as it was registered, from the journal; and what makes two runs of a job comparable."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress

from google.protobuf.json_format import MessageToDict, Parse, ParseError

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.journal.journal import Journal
from muster.v1.common_pb2 import JobSpec

_COMPARED = (
    "nodes",
    "ranks_per_node",
    "command",
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "context_parallel",
    "expert_parallel",
    "parallel_order",
    "node_options",
    "estimate_tables",
)
"""What the time of a step follows from. The environment is left out: it names runs, hosts and folders."""
_SHOWN = (
    "name",
    "nodes",
    "spares",
    "ranks_per_node",
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "context_parallel",
    "expert_parallel",
    "parallel_order",
    "traffic",
    "estimate_tables",
)
"""What a diagnosis needs. Environment and command may hold secrets, also to operators."""


def registered_spec(journal: Journal, gang: str) -> JobSpec | None:
    """The spec with which the gang was registered; None if the journal has none that this version can read.

    Raises:
        JournalError: the journal can't be read.
    """
    for record in journal.history(gang, 0, 1):
        with suppress(ValueError, KeyError, ParseError):
            fact = facts.decode(record.name, record.json)
            if isinstance(fact, facts.GangRegistered):
                return Parse(fact.spec_json or "{}", JobSpec(), ignore_unknown_fields=True)
    return None


def settings_digest(spec: JobSpec) -> str:
    """Equal for runs whose steps can be compared."""
    return hashlib.sha256(json.dumps(_fields(spec, _COMPARED), sort_keys=True).encode()).hexdigest()[:32]


def shown(spec: JobSpec) -> JobSpec:
    """The part that is shown to those who ask for a diagnosis."""
    return JobSpec(**{name: getattr(spec, name) for name in _SHOWN})


def _fields(spec: JobSpec, names: tuple[str, ...]) -> dict[str, object]:
    kept = MessageToDict(spec, preserving_proto_field_name=True)
    return {name: kept[name] for name in names if name in kept}
