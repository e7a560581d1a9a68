"""Lost shards that can be rebuilt from parities. Pure: like the rest of the core, it decides and does nothing.

The rest of the recovery imports this.

May import: `daemon.coordinator.core.state`.
"""
