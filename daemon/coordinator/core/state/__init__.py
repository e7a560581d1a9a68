"""What the core knows: events in, facts out, the durable state with the records of each gang, and the observed state.

`core.turn` changes it.

May import: `checkpoint.format`, `checkpoint.redundancy`, `daemon.coordinator.core.losses`, `fabric.model`,
`fabric.sources`.
"""
