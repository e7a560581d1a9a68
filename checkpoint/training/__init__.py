"""The checkpoint library inside the user's training process: plan, snapshot, restore. `loop` holds the user's API.

Imports torch, `checkpoint.format` and the message types, and nothing else of Muster: no code of the daemons runs in a
user's process.
"""
