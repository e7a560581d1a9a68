"""How much Muster may do without asking: a site's own numbers (policy.toml, [limits])."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pool:
    """Nodes that jobs share as spares (policy.toml, [pool])."""

    options: tuple[str, ...] = ()
    """sbatch's options that lead there; none: the site has no pool."""
    wait_s: float = 60.0
    """A gang waits so long for a node of it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be done at most."""

    nodes_per_hour: int = 20
    """Nodes taken out of service within an hour."""
    fraction: float = 0.1
    """Of the nodes that are known, out of service at the same time, ..."""
    nodes_at_least: int = 4
    """... but so many may be, however few are known."""
    swaps_per_hour: int = 20
    """Nodes that one gang may lose within an hour and go on."""
    observe: bool = False
    """Say what would be done, and leave nodes and training alone."""
    pool: Pool = Pool()
