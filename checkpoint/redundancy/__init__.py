"""How the shards of a gang outlive the loss of nodes: one seam, `scheme.Redundancy`, and the schemes behind it. Pure.

A *shard* is what one rank has written of a version. Each scheme answers three questions:

1. Who holds what? `Redundancy.protect` says it for the nodes of a generation: which nodes hold whole copies of a node's
   shards, and which nodes form a *protection group*. A place in such a group holds a *part* that combines the shards of
   several ranks. `Redundancy.memory_need` says how much of a node's memory that takes, before a job starts;
   `schemes.places_of` says what one node keeps and where it sends its shards, as an agent needs it.
2. What must have arrived before a version is committed? Each shard in each of its places (`NodePlaces.sent`).
3. From where is a lost shard had? What some node holds whole is taken from there, whatever the scheme. What no node
   holds is rebuilt, if `Redundancy.rebuild` finds its sources among what the nodes have reported.

    scheme   the seam: Redundancy, and what it speaks of
    copies   whole copies on one or several other nodes (buddies)
    parity   parts of the parity of a group, from which one lost node of the group is rebuilt
    schemes  which scheme a job has asked for, and what an order says to one node
    wire     the same as agents and coordinator send it

The coordinator's core, the launcher, the simulator and the agents import this room. Only `copies` and `parity` tell
the schemes apart; how bytes are combined is in `checkpoint.store.parity`.

May import: `fabric.placement`.
"""
