"""The simulated cluster: Muster's processes around the real core, on the nodes, the network and the Slurm of
`environment`.

It promises: the same seed gives the same run. It imports no invariant: `observer` is the Protocol through which the
invariants are told. Faults, invariants and scenarios import this room.
"""
