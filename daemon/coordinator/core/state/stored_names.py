"""The names that the journal stores and for which the code has a better name today.

The journal stores each fact by its class name and its field names, the durable state by its field names, and the cause
of a decision by the event's class name and field names. A class or field that is renamed keeps its stored name: a row
of this table says which. So a journal reads the same in every version, and every version writes the same names. The
fields of a gang's records are stored as fields of the gang (`durable_state.RECORDS`).

Rename a class: add it to STORED_CLASSES. Rename a field: add it to STORED_FIELDS under the class's present name, and
mark the class with `keeps_stored_names`. A row is never removed.
"""

from typing import TypeVar

from pydantic import ConfigDict, with_config

Stored = TypeVar("Stored")

STORED_CLASSES: dict[str, str] = {
    "ActionWithheld": "Withheld",
    "AgentDisconnected": "AgentGone",
    "AgentHeartbeat": "AgentHeard",
    "BatchHeartbeat": "BatchHeard",
    "CancelRequested": "CancelAsked",
    "CorrelatedFaultResolved": "EchoOver",
    "CorrelatedFaultSuspected": "EchoHeard",
    "FlushEnded": "Flushed",
    "FlushOrdered": "Flushing",
    "FlushRequested": "FlushAsked",
    "HangDetected": "HangFound",
    "JobEnded": "JobOver",
    "MemberRemoved": "MemberOut",
    "NodeDisconnected": "NodeGone",
    "NodeHeartbeat": "NodeHeard",
    "PeerAccused": "NeighbourAccused",
    "PoolJobQueued": "PoolQueued",
    "PoolNodeRequested": "PoolAsked",
    "PoolRequestClosed": "PoolClosed",
    "ProbeAnswered": "Probed",
    "SlurmCallOwed": "SlurmOwed",
    "SlurmCallSettled": "SlurmSettled",
    "SlurmJobChanged": "JobSeen",
    "SlurmNodeChanged": "NodeSeen",
}
"""Present class name → stored class name."""

STORED_FIELDS: dict[str, dict[str, str]] = {
    "Account": {"shown_spec": "spec_json"},
    "AgentStatus": {
        "combined": "parities",
        "fenced_generation": "fenced",
        "sigterm_notice": "notice",
        "stacks_generation": "stacks",
    },
    "Checkpoint": {"rank_counts": "sizes"},
    "DurableState": {"correlated_faults": "echoes", "last_call": "calls", "taken_out_at": "taken"},
    "FirstStep": {"observed_live": "watched"},
    "Gang": {"order_serial": "serial"},
    "GangSpec": {"group_nodes": "parity_nodes", "more_holders": "more_copies"},
    "GenerationStarted": {"protection_groups": "parity_groups"},
    "Growth": {"pool_requested_at": "pool_since"},
    "Member": {"removal_reason": "out"},
    "MemberRemoved": {"attributed": "proven"},
    "NewestGeneration": {
        "current_store_node": "master_node",
        "current_store_port": "master_port",
        "stepped_generation": "stepped",
    },
    "Node": {"health": "verdict"},
    "NodeJudged": {"health": "verdict"},
    "NodeSignalled": {"signal_action": "judgement"},
    "PhaseChanged": {"next_phase": "after"},
    "Plans": {"phase_after_drain": "drain_to"},
    "PoolNodeRequested": {"requesting_node": "via"},
    "PoolRequest": {"requesting_node": "via"},
    "RecoveryState": {
        "failures_in_a_row": "failures",
        "fenced_generation": "fenced",
        "furthest_step": "reached",
        "group_ranks_swapped_once": "doubts",
        "next_store_node": "store_node",
        "unattributed_node": "doubted",
    },
    "Restore": {
        "protection_groups": "parity_groups",
        "restore_sources": "sources",
        "restored_version": "version",
    },
    "Seat": {"holder": "buddy", "more_holders": "more_buddies", "watched_peers": "neighbours"},
    "Shard": {"primary": "own"},
    "ShardSource": {"combined_ranks": "parity_ranks", "primary": "own"},
    "SlurmJob": {"completion_owed": "completed", "runs_without_start": "in_vain"},
    "SlurmJobChanged": {"pending_reason": "waits"},
    "Stop": {"next_phase": "after"},
    "StopPlanned": {"next_phase": "after"},
}
"""Present class name → present field name → stored field name."""

NUMBERS_AS_WRITTEN = ConfigDict(ser_json_inf_nan="strings")
"""Infinity and NaN are stored as strings. By default pydantic writes them as null, and then refuses to read that."""


def stored_class(kind: type) -> str:
    """The name under which instances of `kind` are stored."""
    return STORED_CLASSES.get(kind.__name__, kind.__name__)


def stored_field(kind: type, name: str) -> str:
    """The name under which the field `name` of `kind` is stored."""
    return STORED_FIELDS.get(kind.__name__, {}).get(name, name)


def keeps_stored_names(kind: type[Stored]) -> type[Stored]:
    """Class decorator: JSON of `kind` has the stored field names. Applied before `kind` is part of another class.

    What reads and writes the JSON is built when it is first needed: to build all took a fifth of a coordinator's start.
    """
    config = ConfigDict(alias_generator=lambda name: stored_field(kind, name), defer_build=True, **NUMBERS_AS_WRITTEN)
    return with_config(config)(kind)
