"""The search for maps: which node carries which seat, at the start, after a loss, and which nodes are left as spares.

`rank_map`, `refill` and `spares` answer that. The others pack, count and search for them. What groups send and how long
that takes is in the folder above, which does not import this one.

May import: `fabric.groups`, `fabric.model`, `fabric.placement`.
"""
