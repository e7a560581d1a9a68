"""Ranks of one node: the reconcile rules, zygotes, forked ranks, their environment, logs and stacks, the rendezvous
store.

The agent imports this room.

May import: `checkpoint.format`, `daemon.agent.ranks.imports`, `daemon.agent.ranks.place`,
`daemon.agent.start_checks`, `daemon.host`, `daemon.host.process`, `daemon.transport`, `fabric.model`.
"""
