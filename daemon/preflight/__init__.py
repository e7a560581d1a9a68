"""The node check: a short program that measures one node and compares a matrix product with a known digest.

It runs in a process of its own, as the job's user, with the job's interpreter. The agent and `muster check` start it,
and use its result. Nothing here imports another package than PyTorch and numpy: the job's interpreter may have no
other.

May import: `daemon.host`, `daemon.host.process`.
"""
