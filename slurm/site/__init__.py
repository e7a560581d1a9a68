"""The site's network, as the launcher and the coordinator read it: Slurm's topologies and the site's own file.

It makes fabrics of `muster.fabric` from what the Slurm client gives. The launcher and the daemons may import it.

May import: `fabric.model`, `fabric.sources`, `slurm.client`, `slurm.client.parsing`.
"""
