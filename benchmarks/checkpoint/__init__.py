"""What memory checkpoints cost, with each agent and each rank in a process of its own, as on nodes.

`bench_checkpoint` above is the program. The peers that it is compared with are in benchmarks/peers/checkpoints.
"""
