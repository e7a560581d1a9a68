"""What the core knows: events in, facts out, durable state, observed state, and the indexes of both.

`detection` and `recovery` read and change state through `turn` alone.

May import: `checkpoint.format`, `daemon.transport`, `fabric.groups`, `fabric.model`, `fabric.placement`,
`fabric.placement.maps`, `fabric.sources`.
"""
