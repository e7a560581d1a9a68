"""What the training process and the agent share: shard layout, versions, names of durable folders, stack files, errors.

Pure data and file formats, without torch. Everybody may import it.
"""
