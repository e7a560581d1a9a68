"""How large a job may be: what job.toml is checked against, and again the coordinator, whoever wrote the message.

The coordinator serves a whole site in one loop. A count that no machine has would stop all of its jobs for seconds each
time that an order is built; a time that is no number could not even be read back from its journal.
"""

NODES = 100_000
"""Nodes of each kind: those that carry ranks, spares, nodes of the pool."""
RANKS_PER_NODE = 1_024
RANKS = 250_000
"""Of the whole job: an order that names each of them is built in half a second, and takes 20 MB."""
FAILURES = 1_000_000
GATHER_TIMEOUT_S = 7 * 86400.0
HANG_AFTER_S = 7 * 86400.0
STOP_BEFORE_S = 86400.0
NAME = 256
"""Characters of a name that a caller chose, and of an address."""
PATH = 4_096
"""Characters of a folder."""
SPEC = 1024 * 1024
"""Characters of a whole spec as JSON: it stands in the journal and in each of its snapshots."""
WORDS = 4_096
"""Characters that are kept of what an agent says in its own words."""
