"""The checkpoint library inside the user's training process: plan, snapshot, restore.

Imports torch, `checkpoint.format`, and nothing else of Muster but the wire: a user's process carries nothing of the
daemons.
"""
