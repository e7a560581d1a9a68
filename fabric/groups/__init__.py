"""From the degrees of parallelism to groups of ranks: which ranks communicate with each other, in which order.

The groups are those that Megatron-LM's `parallel_state` makes. Pure. `launcher/spec` and `fabric/placement` import this
folder.

May import: nothing.
"""
