"""Parts of the view of a gang, a module each: what people ask of a job besides its state. Pure.

`services` puts them into its views.

May import: `daemon.coordinator.core.recovery`, `daemon.coordinator.core.state`, `daemon.coordinator.journal`,
`daemon.host`, `daemon.transport`.
"""
