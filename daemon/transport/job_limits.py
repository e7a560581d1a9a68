"""The largest values that a job may ask for. The launcher checks job.toml; the coordinator checks every message again.

One event loop of the coordinator serves the whole site. A count that no cluster reaches would block the event loop for
seconds each time an order is built. A time that is not a finite number could not be read back from the journal.
"""

MAX_NODES = 100_000
"""Nodes of each kind: nodes with ranks, spares, nodes of the pool."""
MAX_RANKS_PER_NODE = 1_024
MAX_RANKS = 250_000
"""Ranks of the whole job. To build an order for so many ranks takes 0.5 s and 20 MB (measured)."""
MAX_FAILURES = 1_000_000
MAX_PLACEMENT_RETRIES = 1_000
"""How often in a row a job gives back nodes on which its groups would lie wider than it asks."""
MAX_GATHER_TIMEOUT_S = 7 * 86400.0
MAX_HANG_AFTER_S = 7 * 86400.0
MAX_STOP_BEFORE_S = 86400.0
MAX_SECONDS = 1e10
"""Of an interval, or between two failures: 300 years."""
MAX_STEPS = 1_000_000_000
MAX_NAME_CHARS = 256
"""Characters of a name that the caller chose, and of an address."""
MAX_PATH_CHARS = 4_096
"""Characters of a folder's path."""
MAX_LOG_GB = 1e6
"""Of the logs of a job's ranks: more than any storage has."""
MAX_VARIABLES = 10_000
"""Variables of a job's environment. A hundred thousand would take half a second of the coordinator (measured)."""
MAX_SPEC_CHARS = 1024 * 1024
"""Characters of a whole spec as JSON: the journal and each of its snapshots hold the spec."""
MAX_TEXT_CHARS = 4_096
"""Characters that are kept of a free text from an agent."""
MAX_SIGNAL_CHARS = 1_000
"""Characters that are kept of the text of a hardware signal: one line of the kernel log."""
MAX_DRIVER_LINE_CHARS = 200
"""A line of a driver that was not understood, as `muster nodes -v` shows it."""
MAX_CHECK_CHARS = 500
"""Characters that are kept of each text of a node check. The durable state holds the newest one of each node."""
MAX_STDERR_BYTES = 512 * 1024
"""Bytes of stderr in one status of an agent: with 1,024 ranks, a status still fits into the largest message."""

# An agent's status: each entry costs the coordinator about 2 µs (measured).
MAX_NAMED_RANKS = 64
"""Ranks that one disagreement of replicas names: all of a larger group would only fill the journal."""
MAX_RANK_STATUSES = 2 * MAX_RANKS_PER_NODE
"""Ranks in one status: those of the newest generation, and older ones that are not dead yet."""
MAX_BLOCKS_PER_RANK = 8
"""Blocks of step times of one rank in one status."""
MAX_COPIES = 4
"""Nodes that hold a rank's state, its own among them."""
MAX_GROUP_NODES = 32
"""Nodes of a protection group. More would take long to rebuild a state from."""
MAX_SHARDS_PER_NODE = 4 * MAX_COPIES * MAX_RANKS_PER_NODE
"""Shards in one status: two slots and two of each replica for each rank, and as many again while replicas are
rebuilt."""
MAX_NUMBERS = 32
"""Numbers that ranks of one node report of a step."""
MAX_NUMBER_NAME_CHARS = 64
MAX_TRAINING_BYTES = 16 * 1024
"""Bytes of what one status says of the training: half as much again as all numbers have with the longest names."""
MAX_ARITHMETIC = 1e30
"""Operations or tokens of a step, and operations a second of a GPU."""
MAX_POOL_ANSWERS = 10_000
"""Slurm's answers to one agent's pool requests."""
MAX_TRANSFERS = 64
"""Copies of shards to other nodes that one agent reports. It reports one for each of 8 buddies at most."""
MAX_CORRUPT_COPIES = 16
"""Corrupt copies in one status: the newest ones."""
MAX_BYTES = 1 << 44
"""Bytes of all states of one node."""
MAX_ADDRESSES = 256
"""IP addresses that one node reports."""
MAX_KEPT_GANGS = 256
"""Gangs in one heartbeat of a node daemon: as many descriptors as systemd stores for it (FileDescriptorStoreMax)."""
LOSS_BOUNDS: dict[str, tuple[int, int]] = {
    "deviations": (3, 1000),
    "in_a_row": (1, 1000),
    "window": (16, 1024),
    "plateau_values": (0, 10_000_000),
    "margin_steps": (0, MAX_STEPS),
    "roll_backs": (0, 100),
    "within_steps": (1, MAX_STEPS),
}
"""Least and greatest numbers in [loss] of a job, and of the policy."""
