"""The timeouts that fencing by time depends on. The coordinator's core and every agent use the same values.

An agent that hears neither the coordinator nor a majority of its gang kills its own ranks after `SELF_FENCE_AFTER_S`.
The core starts no new generation before that time, plus a margin, has passed. If only one side changed a value, the
ranks of two generations could run at the same time.
"""

ACCUSE_AFTER_S = 1.25
"""Seconds of silence after which an agent accuses a watched peer."""
SELF_FENCE_AFTER_S = 2.0
"""Seconds without an answer from the coordinator and from a majority, after which an agent kills its own ranks."""
FENCING_TIMEOUTS_S = (ACCUSE_AFTER_S, SELF_FENCE_AFTER_S)
"""What agents and coordinators say in hello. docs/operations/upgrade.md: a change of either needs every job to end."""
