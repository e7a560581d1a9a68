"""The coordinator's heart: decisions without clock, socket, thread, subprocess or database.

`Core.decide(event, now)` takes one event and returns what follows from it: *facts*, which are journaled and make up the
durable state (`durable_state`), and *asks*, which are forgotten on a restart (probes). Open streams, last contacts and
statuses live in `observed_state`: they are not journaled, and a restarted coordinator observes them again. Orders to
agents are a pure function of the durable state. Calls to Slurm are owed in it until they are settled. So carrying a
decision out is idempotent, and a restart is replay.
"""
