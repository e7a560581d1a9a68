"""Loading a durable checkpoint: its files are trusted and verified, and a damaged one is replaced by an older one.

Promises that a rank uses no byte of a checkpoint that is not what Muster has written. `checkpoint.training.resume` and
`checkpoint.training.loop` import it.

May import: `checkpoint.durable`, `checkpoint.format`, `checkpoint.training.agreements`.
"""
