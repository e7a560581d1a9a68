"""`muster report`: one HTML file that tells what a job did, what failed, what was done about it, and what it cost.

`story` reads the records of the job, `assemble`, `faults` and `series` make the values of `report_data`, the other
modules draw them. `show` and `series` read; all else is pure. Only `commands` imports this room. The pictures need the
extra `report`.

May import: `daemon.coordinator.accounting`, `daemon.coordinator.core.state`, `daemon.coordinator.core.turn`,
`daemon.coordinator.goodput`, `daemon.coordinator.journal`, `daemon.host`, `daemon.transport`, `fabric.model`,
`launcher`, `launcher.output`, `slurm.client.parsing`.
"""
