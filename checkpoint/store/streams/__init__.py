"""Piece streams: plain sockets beside gRPC carry the bytes of shards between agents, from the holder's memory straight
into the receiver's.

Promises that a piece counts only once its bytes have the digest that came over gRPC. Knows nothing of gangs, versions
and commits. Never imports torch. `checkpoint.store` imports it.

May import: `checkpoint.format`, `checkpoint.store.memory`, `daemon.host`.
"""
