"""The coordinator's side of Slurm: owed calls, look-ups, the watch on jobs and nodes, the roster of all nodes.

`shell` and `services` import it.

May import: `daemon.coordinator.core.detection`, `daemon.coordinator.core.state`, `daemon.host`, `fabric.sources`,
`slurm.client`, `slurm.client.fake`, `slurm.client.parsing`.
"""
