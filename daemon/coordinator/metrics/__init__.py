"""The coordinator's metrics: what was decided is counted as it happens, and what there is now is collected for each
scrape, from the same values as the views of users.

`server` imports it.

May import: `daemon.coordinator.accounting`, `daemon.coordinator.core.losses`, `daemon.coordinator.core.state`,
`daemon.coordinator.goodput`, `daemon.coordinator.policy`, `daemon.coordinator.services`, `daemon.coordinator.shell`,
`daemon.coordinator.slurm`, `daemon.coordinator.view_parts`, `daemon.host`, `daemon.metrics`.
"""
