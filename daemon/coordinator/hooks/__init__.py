"""The site's hooks: a command or a web address that is told what was decided.

Hooks are told after the coordinator has acted. Threads do the work: no decision, no order and no heartbeat waits for a
hook. Only `daemon/coordinator` imports this room.

May import: `daemon.coordinator.core.state`, `daemon.coordinator.policy`, `daemon.host`.
"""
