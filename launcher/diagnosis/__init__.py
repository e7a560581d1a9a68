"""`muster diagnose`: is each group where the job wanted it, which link is slow, how fast are steps, and what to change.

What was measured comes from the coordinator, the network from Slurm, the prediction from `fabric/estimate`. All but
`show` is pure. `launcher/commands` imports this room.
"""
