"""Errors of checkpoints, by who has to act: the user (CheckpointError), the site's storage (FlushError)."""


class CheckpointError(Exception):
    """A state can't be laid out, saved or restored. The message says what is wrong and what would be right."""


class CorruptShard(CheckpointError):
    """Bytes that aren't a shard, or not the shard that they should be."""


class RestoreError(CheckpointError):
    """No source gave the state that a generation has to start from."""


class FlushError(CheckpointError):
    """A durable checkpoint could not be written: nothing half-done is left under its final name."""
