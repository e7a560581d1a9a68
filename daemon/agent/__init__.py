"""muster-agent: one process per node of a gang, also on spares. It receives the coordinator's orders and reports the
node's status.

Its rooms: `ranks` (zygotes, ranks, rendezvous store), `failure_detector` (links to other agents), `start_checks` (what
the node lacks for the job), `training` (what ranks say of their training), `launch` (a user's own launcher that becomes
the gang), `batch` (the batch script's process, which is another one than the agent). No other program imports it; the
simulator imports its pure rules.

May import: `checkpoint.durable`, `checkpoint.format`, `checkpoint.store`, `checkpoint.store.memory`,
`checkpoint.store.replication`, `checkpoint.store.streams`, `daemon.agent.batch`, `daemon.agent.failure_detector`,
`daemon.agent.launch`, `daemon.agent.ranks`, `daemon.agent.ranks.imports`, `daemon.agent.ranks.place`,
`daemon.agent.start_checks`, `daemon.agent.training`, `daemon.host`, `daemon.host.process`, `daemon.preflight`,
`daemon.transport`, `slurm.client`, `slurm.client.backends`, `slurm.client.parsing`.
"""
