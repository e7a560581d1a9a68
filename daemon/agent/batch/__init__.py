"""`muster-agent batch`: the process that the batch script becomes. It launches srun and outlives it.

`startup` imports it.
"""
