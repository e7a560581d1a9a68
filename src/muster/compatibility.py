"""Which versions of Muster work together: what each process says of itself in its hello, and the rule.

A process that says nothing is of the version before hello had this part: protocol 1, with that version's timeouts.

`PROTOCOL` is raised only by a change after which processes of both versions misunderstand each other. A new field that
an older process may ignore is no such change. `OLDEST_PROTOCOL` is the oldest one that this version still serves: it is
raised only by a release that says so in CHANGELOG.md, and never above the protocol of the release before. So releases
that follow each other always fit.

The fencing timeouts (daemon/transport/fencing_timeouts.py) are compared beside the protocol. Time fencing is safe only
while the coordinator and all agents of a gang count with the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from muster import __version__
from muster.v1.common_pb2 import Release

PROTOCOL, OLDEST_PROTOCOL = 1, 1

RELEASE_KEY = "muster-release-bin"
"""In the metadata of a call and of its answer: a Release. Calls of commands have no hello."""

MAX_VERSION_CHARS = 64
"""Of what another process calls its version. The rest is cut off, and so is what no line of a log should hold."""


@dataclass(frozen=True, slots=True)
class Side:
    """One process of a pair. Without arguments beside `who`: a version whose hello does not say it.

    who: the process in words, with its node: "the agent on n3".
    fencing_ms: after how many milliseconds of silence an agent accuses a peer, and after how many it kills its own
        ranks; None: the process has no part in fencing.
    """

    who: str
    version: str = "0.1.0 or older"
    protocol: int = 1
    oldest_protocol: int = 1
    fencing_ms: tuple[int, int] | None = (1250, 2000)


def own_side(who: str, fencing_s: tuple[float, float] | None = None) -> Side:
    """This process."""
    fencing_ms = (round(1000 * fencing_s[0]), round(1000 * fencing_s[1])) if fencing_s else None
    return Side(who, __version__, PROTOCOL, OLDEST_PROTOCOL, fencing_ms)


def to_wire(side: Side) -> Release:
    """What `side` says of itself."""
    accuse, fence = side.fencing_ms or (0, 0)
    return Release(
        version=side.version,
        protocol=side.protocol,
        oldest_protocol=side.oldest_protocol,
        accuse_after_ms=accuse,
        self_fence_after_ms=fence,
    )


def read(who: str, release: Release) -> Side:
    """What another process has said of itself. An empty `release`: it has said nothing."""
    if not release.protocol:
        return Side(who)
    fencing_ms = (release.accuse_after_ms, release.self_fence_after_ms)
    version = "".join(filter(str.isprintable, release.version[:MAX_VERSION_CHARS]))
    return Side(who, version, release.protocol, release.oldest_protocol, fencing_ms if any(fencing_ms) else None)


def metadata(side: Side) -> tuple[tuple[str, bytes], ...]:
    """The same, in the metadata of a command's call, and of the answer to it."""
    return ((RELEASE_KEY, to_wire(side).SerializeToString()),)


def read_metadata(who: str, found: Iterable[tuple[str, str | bytes]] | None) -> Side:
    """What another process has said of itself in such metadata. Metadata without a version, or with one that can't be
    read: it has said nothing."""
    said = dict(found or ()).get(RELEASE_KEY, b"")
    try:
        return read(who, Release.FromString(said if isinstance(said, bytes) else b""))
    except DecodeError:
        return Side(who)


def misfit(mine: Side, theirs: Side) -> str | None:
    """Why the two do not work together, in words; None: they do."""
    older, newer = sorted((mine, theirs), key=lambda side: side.protocol)
    if older.protocol < newer.oldest_protocol:
        return (
            f"{_words(older)} speaks protocol {older.protocol}, and {_words(newer)} protocols {newer.oldest_protocol} "
            f"to {newer.protocol}: install versions that docs/operations/upgrade.md allows side by side"
        )
    if mine.fencing_ms and theirs.fencing_ms and mine.fencing_ms != theirs.fencing_ms:
        return (
            f"{_timeouts(mine)}, and {_timeouts(theirs)}: ranks of two generations could run at once. Install the same "
            "version on both"
        )
    return None


def _words(side: Side) -> str:
    return f"{side.who} (muster {side.version})"


def _timeouts(side: Side) -> str:
    accuse, fence = side.fencing_ms or (0, 0)
    return f"{_words(side)} accuses after {accuse / 1000:g} s of silence and fences after {fence / 1000:g} s"
