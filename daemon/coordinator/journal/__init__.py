"""The journal: every fact that the core decided. A fact is on disk before the coordinator acts on it.

`shell`, `services` and `leadership` import it.

May import: `daemon.coordinator.core.state`, `daemon.coordinator.core.turn`, `daemon.host`.
"""
