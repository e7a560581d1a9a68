"""What the training process and the agent share: shard layout, versions, names of durable folders, stack files, errors.

File formats only, without torch. Every other room may import it.
"""
