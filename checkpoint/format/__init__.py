"""What the training process and the agent share: shard layout, versions, names of durable folders, stack files, errors;
and whether replicas agree, which the agent and the coordinator must judge alike.

Never imports torch. Every other room may import it.

May import: nothing.
"""
