"""From where lost shards are had. Pure: like the rest of the core, it decides and does nothing.

The rest of the recovery imports this.

May import: `checkpoint.redundancy`, `daemon.coordinator.core.state`.
"""
