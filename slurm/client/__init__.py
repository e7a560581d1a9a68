"""The Slurm client: one Protocol, two backends, one fake."""
