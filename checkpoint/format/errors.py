"""The errors of checkpoints: CheckpointError is for the user to correct, FlushError concerns the site's storage."""


class CheckpointError(Exception):
    """A state can't be planned, kept or restored. The message says what is wrong and what would be right."""


class CorruptShard(CheckpointError):
    """The bytes are no shard, or not the expected shard."""


class OtherLayout(CorruptShard):
    """A shard that another version of Muster has written: this one can't read it."""


class CorruptCheckpoint(CheckpointError):
    """Bytes of a durable checkpoint are not those that were written. The message names the file and the offset."""


class UntrustedCheckpoint(CheckpointError):
    """Somebody else can have written the checkpoint, so it is not unpickled."""


class RestoreError(CheckpointError):
    """A generation has a state to start from, and no source could give it."""


class FlushError(CheckpointError):
    """A durable checkpoint could not be written. No incomplete folder has its final name."""
