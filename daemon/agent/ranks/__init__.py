"""Ranks of one node: the reconcile rules, zygotes, forked ranks, their environment, logs and stacks, the rendezvous
store.

Imports `daemon.host`. The agent imports this room.
"""
