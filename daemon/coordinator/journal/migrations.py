"""The journal's tables, one step for each format that ever was: what brings a journal of the format before up to it.

A format is never changed once it was released. Whatever an older coordinator could not read is a new one, a new kind of
fact too. At each step the durable state is folded anew from all facts: an older version's snapshot is not this one's
durable state. So whatever changes what facts of before fold to is a new format as well.
"""

STEPS = (
    """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
CREATE TABLE facts (
    position INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, gang TEXT NOT NULL, node TEXT NOT NULL,
    name TEXT NOT NULL, json TEXT NOT NULL, text TEXT NOT NULL, cause TEXT NOT NULL) STRICT;
CREATE INDEX facts_of_gang ON facts (gang, position);
CREATE TABLE snapshots (position INTEGER PRIMARY KEY, ledger TEXT NOT NULL) STRICT;
INSERT INTO meta VALUES ('schema', 1), ('term', 0);
""",
    # 2: GangForgotten; whose a gang was that has left the durable state; checksums, for a disk may garble what it
    # keeps.
    """
CREATE INDEX gangs_of_job ON facts (json_extract(json, '$.job')) WHERE name = 'GangRegistered';
ALTER TABLE facts ADD COLUMN crc INTEGER;
ALTER TABLE snapshots ADD COLUMN crc INTEGER;
""",
    "-- 3: StopPlanned.",
    "-- 4: Withheld; nodes that are doubted.",
    "-- 5: PoolAsked, PoolQueued, PoolClosed; generations of fewer ranks.",
    "-- 6: HangFound.",
    "-- 7: EchoHeard, EchoOver.",
    "-- 8: no fact is new, but ledgers are: snapshots of 7 may lack `in_vain`, or be an older format's, brought along.",
)

FORMAT = len(STEPS)
"""What this version writes."""
