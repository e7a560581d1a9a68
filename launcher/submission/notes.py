"""What `muster submit` says of a job beforehand: what its spares cost, and what is lost at its end. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from muster.v1.common_pb2 import JobSpec


def notes(spec: JobSpec, limit_s: int | None) -> Iterator[str]:
    """One line each. `limit_s`: the job's time limit in seconds; None: the job names none."""
    if spec.spares:
        yield _cost_of_spares(spec, limit_s)
    if spec.memory_checkpoint and not spec.durable_dir:
        yield "without durable_dir the state is kept in memory only: all steps are lost when the job ends"


def _cost_of_spares(spec: JobSpec, limit_s: int | None) -> str:
    nodes = spec.nodes + spec.spares
    words = f"spares hold {spec.spares} of {nodes} nodes for the whole run"
    if limit_s is None:
        return f"{words}; no time limit is named"
    hours = limit_s / 3600
    return f"{words}: {hours * spec.spares:.4g} of {hours * nodes:.4g} node hours at the time limit"
