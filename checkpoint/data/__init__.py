"""The order in which samples are read, and which rank reads which of them. `sharded_sampler` holds the user's API.

The order needs numpy alone: it depends on no version of torch. Only the user's script imports this.

May import: `checkpoint.format`, `checkpoint.training.agreements`.
"""
