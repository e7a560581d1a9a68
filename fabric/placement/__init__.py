"""Which node carries which ranks: the map of least predicted communication, at the start and after a loss.

This folder has what the groups of a gang send between nodes, how long that takes, what a job prefers, and failure
domains. `maps` searches for the maps. Pure, and always the same for the same input: the coordinator's core replays it.
Nothing here needs more than the standard library. The launcher and the coordinator's core may import both folders.

May import: `fabric.groups`, `fabric.model`.
"""
