"""What differs between two runs, key by key. Pure."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from muster.wording import counted

# What differs between any two runs and explains nothing.
_OWN = frozenset({"format", "gang_id", "slurm_job_id", "submitted_s", "host"})
_OWN_VARIABLES = frozenset({"environment.SHLVL", "environment._", "environment.OLDPWD", "environment.WINDOWID"})
_OF_OUTCOME = (
    "phase", "exit_code", "reason", "generation", "step", "training", "goodput", "ranks_by_node", "durable_path",
)  # fmt: skip
_OF_TRAINING = ("step_s", "steps_per_s", "compute_s", "wait_s", "fetch_s", "mfu", "tokens_per_gpu_s")
ABSENT = "(absent)"


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The keys of two records that differ, with both values. The changes of the repository are compared apart."""
    first, second = _flat(_opened(one)), _flat(_opened(other))
    for key in sorted(first.keys() | second.keys()):
        if key in _OWN or key in _OWN_VARIABLES or key == "repository.diff":
            continue
        values = first.get(key, ABSENT), second.get(key, ABSENT)
        if values[0] != values[1]:
            yield key, *values


def outcome_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The same of how the runs went."""
    yield from differences(_shown(one), _shown(other))


def _shown(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Which nodes had the hardware explains nothing: how many had it may."""
    hardware = {line: len(nodes) for line, nodes in outcome.get("hardware", {}).items()}
    counts = [f"{counted(count, 'node')} with {line}" for line, count in sorted(hardware.items())]
    kept = {key: outcome[key] for key in _OF_OUTCOME if key in outcome}
    if training := outcome.get("training"):
        kept["training"] = _numbers(training)
    if goodput := outcome.get("goodput"):
        kept["goodput"] = _shares(goodput)
    return kept | ({"hardware": "; ".join(counts)} if counts else {})


def _numbers(training: Mapping[str, Any]) -> dict[str, str]:
    """How fast it trained, and the median of each number that the script has reported, under its name."""
    found = {key: training[key] for key in _OF_TRAINING if key in training}
    found |= {one["name"]: one.get("median", 0.0) for one in training.get("metrics", ())}
    return {key: f"{float(value):.5g}" for key, value in found.items()}  # JSON has NaN as a text


def _shares(goodput: Mapping[str, Any]) -> dict[str, str]:
    """What trained of the allocated time, and where the rest went."""
    allocated = goodput.get("allocated_node_s") or 1.0
    unknown = goodput.get("steps_unknown_node_s", 0.0)
    found = {"useful": goodput.get("useful_node_s", 0.0) - unknown} | ({"steps_unknown": unknown} if unknown else {})
    found |= {one["category"]: one.get("node_s", 0.0) for one in goodput.get("lost", ())}
    return {key: f"{node_s / allocated:.1%}" for key, node_s in found.items()}


def changes(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """The lines that differ between the uncommitted changes of both, as a diff of diffs."""
    first, second = (str(record.get("repository", {}).get("diff", "")).splitlines() for record in (one, other))
    yield from difflib.unified_diff(first, second, "uncommitted changes of the first", "of the second", lineterm="")


def _opened(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record with the keys of the tables that the job carries as JSON."""
    if not isinstance(spec := record.get("spec"), Mapping) or "estimate_tables" not in spec:
        return record
    return {**record, "spec": {**spec, "estimate_tables": json.loads(spec["estimate_tables"])}}


def _flat(table: Mapping[str, Any], parent: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{parent}{key}.")
        else:
            found[f"{parent}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return found
