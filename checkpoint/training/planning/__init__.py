"""How a state becomes the bytes of a shard: what lies where, and which rank publishes what.

May import: `checkpoint.format`, `checkpoint.training.agreements`, `checkpoint.training.states`.
"""
