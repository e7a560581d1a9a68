"""muster-coordinator: verdicts, recovery, the journal, the public API.

`core` decides, `journal` persists, `shell` acts; `services` speaks gRPC, `slurm` calls Slurm, `leadership` holds the
lease, `policy` holds the tables that a site may change. No other program imports the coordinator; the simulator does.

May import: `daemon.coordinator.accounting`, `daemon.coordinator.core.state`, `daemon.coordinator.diagnosis`,
`daemon.coordinator.hooks`, `daemon.coordinator.journal`, `daemon.coordinator.metrics`, `daemon.coordinator.policy`,
`daemon.coordinator.services`, `daemon.coordinator.shell`, `daemon.coordinator.slurm`, `daemon.host`, `daemon.metrics`,
`daemon.transport`, `daemon.transport.calls`, `slurm.client`.
"""
