"""One turn of the core: what it reads, how its facts change the durable state, and what is counted of both states.

`detection` and `recovery` read and change state through `turn` alone.

May import: `checkpoint.format`, `checkpoint.redundancy`, `daemon.coordinator.core.state`, `daemon.transport`,
`fabric.groups`, `fabric.model`, `fabric.placement`, `fabric.placement.maps`, `fabric.sources`.
"""
