"""The memory checkpoints of one node, inside `muster-agent`: slots, shards, replication, commit, recall, flush.

Never imports torch. The agent, `musterd`'s kept memory and the simulator import it.
"""
