"""The coordinator's core: all decisions, without clock, socket, thread, subprocess or database.

`Core.decide(event, now)` takes one event and returns what follows from it. *Facts* go to the journal and make up the
durable state (`durable_state`). *Probe requests* are forgotten at a restart. Open streams, times of last contact and
statuses form the observed state (`observed_state`): they are not journaled, because a restarted coordinator observes
them again. Orders to agents are a pure function of the durable state. The durable state owes each call to Slurm until
Slurm has answered it. So every decision can be carried out twice without harm, and a restart is a replay.

May import: `daemon.coordinator.core.detection`, `daemon.coordinator.core.recovery`,
`daemon.coordinator.core.recovery.growth`, `daemon.coordinator.core.state`, `daemon.coordinator.core.turn`.
"""
