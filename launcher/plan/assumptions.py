"""What an estimate rests on beside job.toml: what the command line says, and defaults for what nobody says. Pure.

Each default is named: a reader can tell them from what the job says.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the command line of `muster plan` says. None: not given."""

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


@dataclass(frozen=True, slots=True)
class Default:
    """A value that nobody gave."""

    name: str
    value: str
    """With its unit."""
    source: str
    """Where it comes from."""
    instead: str
    """How to give another one."""


@dataclass(slots=True)
class Defaults:
    """The defaults that were taken, in order."""

    taken: list[Default] = field(default_factory=list)

    def take(self, name: str, value: str, source: str, instead: str) -> None:
        """Notes a default."""
        self.taken.append(Default(name, value, source, instead))
