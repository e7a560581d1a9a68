"""Reading the shards of another number of ranks from the agents' memory, as torch reads a checkpoint folder.

Promises: bytes are read only after the agent has said that they are verified, and no more of them are asked for than
the plan of the load needs, up to whole pieces.

May import: `checkpoint.format`.
"""
