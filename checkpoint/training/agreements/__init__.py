"""What the ranks of a job agree on while they train, through their process group and its store.

May import: `checkpoint.format`.
"""
