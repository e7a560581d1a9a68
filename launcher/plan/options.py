"""What the command line of `muster plan` says beside job.toml. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """None: not given."""

    accelerator: str | None = None
    efficiency: float | None = None
    """Share of the peak that matrix products reach."""
    measured_step: float | None = None
    """Seconds."""
    node_mtbf: float | None = None
    """Hours."""
    repair: float | None = None
    """Hours."""
    recovery: float | None = None
    """Seconds from a fault to the next step, without the transfer of the state."""
    price: float | None = None
    """Of a GPU for an hour."""
    in_network: bool = False
