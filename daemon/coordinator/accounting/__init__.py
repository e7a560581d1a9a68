"""The goodput of the fleet: the ledger of each gang that lives, and a store of what all gangs have used.

The store is a projection of the journal: what it lacks is read again. Nothing here decides. `daemon/coordinator`
imports this room, and `launcher/report` reads the store.

May import: `daemon.coordinator.core.state`, `daemon.coordinator.diagnosis`, `daemon.coordinator.goodput`,
`daemon.coordinator.journal`, `daemon.coordinator.services`, `daemon.coordinator.shell`, `daemon.transport`.
"""
