"""What was measured of jobs, for `muster diagnose`: step times, links, and generations that have ended;
and how a file beside the journal is kept.

Nothing here decides, and nothing is journaled. A store that can't be written costs the history, not the coordinator.
`daemon/coordinator` and `daemon/coordinator/accounting` import this room.

May import: `daemon.coordinator.core.recovery`, `daemon.coordinator.core.state`, `daemon.coordinator.goodput`,
`daemon.coordinator.journal`, `daemon.coordinator.services`, `daemon.coordinator.shell`,
`daemon.coordinator.view_parts`, `daemon.host`.
"""
