"""The parts of a simulated world: nodes, network, Slurm, agents, training, coordinator."""
