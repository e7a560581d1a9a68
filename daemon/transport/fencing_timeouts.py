"""What the coordinator's core and every agent must hold alike: the times that fencing by silence rests on.

An agent that hears neither the coordinator nor a majority of its gang ends its ranks after `SILENT_S`; the core starts
no generation sooner after a silence. Changed in one place alone, two generations could run at once.
"""

ACCUSE_S = 1.25
"""Seconds of silence after which an agent accuses a neighbour."""
SILENT_S = 2.0
"""Seconds after which an agent without coordinator and majority kills its ranks (ARCHITECTURE.md)."""
