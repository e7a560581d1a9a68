"""What a simulated cluster is made of before any Muster process runs: time, nodes, network and Slurm.

It promises: every delay and every failure is drawn from one random generator. `schedule` is virtual time and samples
how long things take, `machine` is a node and its processes, `network` carries streams and calls, `site_network` is what
Slurm says of the network, `unreliable_slurm` is Slurm. `simulator/world` imports this room.

May import: `daemon.coordinator.core.state`, `fabric.model`, `fabric.sources`, `slurm.client`, `slurm.client.fake`.
"""
