"""The journal's tables: one migration for each format that was ever released.

A released format is never changed. Whatever an older coordinator can't read makes a new format, a new kind of fact too.
A new field makes one, too: an older coordinator drops it, and writes snapshots that lack it.

Each migration rebuilds the durable state from all facts, because an older version's snapshot is not this version's
durable state. So a change of what older facts do to the durable state makes a new format as well.
"""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT",
        "CREATE TABLE facts ("
        "position INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, gang TEXT NOT NULL, node TEXT NOT NULL, "
        "name TEXT NOT NULL, json TEXT NOT NULL, text TEXT NOT NULL, cause TEXT NOT NULL) STRICT",
        "CREATE INDEX facts_of_gang ON facts (gang, position)",
        "CREATE TABLE snapshots (position INTEGER PRIMARY KEY, ledger TEXT NOT NULL) STRICT",
        "INSERT INTO meta VALUES ('schema', 1), ('term', 0)",
    ),
    (  # 2: GangForgotten; an index to find the owner of a forgotten gang; checksums against damage by the disk
        "CREATE INDEX gangs_of_job ON facts (json_extract(json, '$.job')) WHERE name = 'GangRegistered'",
        "ALTER TABLE facts ADD COLUMN crc INTEGER",
        "ALTER TABLE snapshots ADD COLUMN crc INTEGER",
    ),
    (),  # 3: StopPlanned
    (),  # 4: Withheld; nodes that are doubted
    (),  # 5: PoolAsked, PoolQueued, PoolClosed; generations of fewer ranks
    (),  # 6: HangFound
    (),  # 7: EchoHeard, EchoOver
    (),  # 8: no new fact. Snapshots of 7 may lack `in_vain`, or were copied from an older format
    (),  # 9: no new fact. Snapshots of 8 hold the whole spec of each gang, its environment included
    # 10: SwapPlanned, StragglerDetected, NodeDrainRequested, NodeDrainEnded, PrecursorEnded, ReplicasDisagreed,
    # NotFiniteReported, NodeChecked, FabricNoted, GangShrunk, CorruptCopyFound, StateRestored, GrowthPlanned;
    # exclusions with reasons, failures, precursors; calls that resume a node; the axes of a gang, the network of its
    # nodes, groups that are wider than asked
    (),
    # 11: LossNoted, RolledBack, LaunchUnsupervised; a second GangRegistered, once a user's own script launches.
    # PhaseChanged, GenerationFenced, GangEnded and snapshots of 10 say nothing of progress
    (),
)
"""The statements of each format, from the first one on."""

FORMAT = len(MIGRATIONS)
"""The format that this version writes."""
