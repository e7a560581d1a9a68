"""The coordinator's heart: decisions without clock, socket, thread, subprocess or database.

`Core.decide(event, now)` takes one event and returns what follows from it: *facts*, which are journaled and make up
the durable state (`ledger`), and *asks*, which are forgotten on a restart (probes). What is merely seen at the moment
(open streams, last contacts, statuses) lives in `sight` and is seen again after a restart. Orders to agents are a
pure function of the ledger, Slurm calls are owed in the ledger until they are settled; so carrying a decision out is
idempotent and a restart is replay.
"""
