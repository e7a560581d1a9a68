"""Who may call which method: one literal table, which decides.

Every method of every server has one row, and a row has one answer for each kind of caller. A caller may be of several
kinds: everybody with a credential is a user, and root on a management host is an operator as well. The strongest answer
of its kinds counts. A method without a row is refused to everybody.

A kind is relative to what the call concerns: the job, or the node. Some calls concern several jobs (List). The answer
OWN then lets the call through, and the service leaves out what the caller may not read.

`muster.daemon.transport.authorization` finds the kinds of a caller. docs/make_authority.py renders this table
into docs/SECURITY.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum


class CallerKind(StrEnum):
    """What a caller is to the job or the node that a call concerns.

    The owner and the agents of all the owner's jobs have the same uid, which is all that a credential proves. So an
    agent of another job counts as the owner, except where a message says from which job its sender is.

    An account coordinator (`sacctmgr add coordinator`) of the job's account is another user: Muster does not look into
    Slurm's accounting. So its column repeats that of another user. It may still cancel the job with Slurm's scancel.

    The owner has named a reader in job.toml, by login name or by group. Readers see the job and change nothing.

    Root of a node is what a node's own daemon is: root that calls from an address of the node. If the site names no
    management hosts, every host is one: root of a node is an operator as well.
    """

    ANONYMOUS = "anonymous"
    OTHER_USER = "another user"
    OWNER = "the owner of the job and its agents"
    OTHER_AGENT = "an agent of the owner's other job"
    NODE_ROOT = "root of the node"
    OPERATOR = "an operator on a management host"
    ACCOUNT_COORDINATOR = "an account coordinator"
    READER = "a reader whom the owner has named"


class Answer(StrEnum):
    """What a caller is answered. The value explains the answer; `code` is the status of gRPC."""

    ALLOWED = "allowed"
    OWN = "allowed, with what the caller owns"
    DENIED = "refused"
    HIDDEN = "refused as if there were no such job"
    DISMISSED = "refused with a message that ends the caller"
    UNPROVED = "refused: the call carries no credential"

    @property
    def code(self) -> str:
        """The name of the status code with which the call ends."""
        return _CODES[self]


_CODES = {
    Answer.ALLOWED: "OK",
    Answer.OWN: "OK",
    Answer.DENIED: "PERMISSION_DENIED",
    Answer.HIDDEN: "NOT_FOUND",
    Answer.DISMISSED: "OK",
    Answer.UNPROVED: "UNAUTHENTICATED",
}

_YES, _OWN, _NO, _BYE, _WHO = Answer.ALLOWED, Answer.OWN, Answer.DENIED, Answer.DISMISSED, Answer.UNPROVED
_HID = Answer.HIDDEN
# fmt: off
_ROWS: tuple[tuple[str, tuple[Answer, ...]], ...] = (
    # The kinds of callers:                      anonymous  other  owner  agent2  root   operator  account_c  reader
    ("/muster.v1.Muster/Register",                (_WHO,    _HID,  _YES,  _YES,   _HID,  _HID,     _HID,      _HID)),
    ("/muster.v1.Muster/Describe",                (_WHO,    _HID,  _YES,  _YES,   _HID,  _YES,     _HID,      _YES)),
    ("/muster.v1.Muster/Attend",                  (_WHO,    _HID,  _YES,  _YES,   _HID,  _HID,     _HID,      _NO)),
    ("/muster.v1.Muster/Watch",                   (_WHO,    _HID,  _YES,  _YES,   _HID,  _YES,     _HID,      _YES)),
    ("/muster.v1.Muster/List",                    (_WHO,    _OWN,  _YES,  _YES,   _OWN,  _YES,     _OWN,      _YES)),
    ("/muster.v1.Muster/Events",                  (_WHO,    _HID,  _YES,  _YES,   _HID,  _YES,     _HID,      _YES)),
    ("/muster.v1.Muster/Cancel",                  (_WHO,    _HID,  _YES,  _YES,   _HID,  _YES,     _HID,      _NO)),
    ("/muster.v1.Muster/Flush",                   (_WHO,    _HID,  _YES,  _YES,   _HID,  _YES,     _HID,      _NO)),
    ("/muster.v1.Muster/Swap",                    (_WHO,    _HID,  _YES,  _YES,   _HID,  _YES,     _HID,      _NO)),
    ("/muster.v1.Muster/Drain",                   (_WHO,    _NO,   _NO,   _NO,    _NO,   _YES,     _NO,       _NO)),
    # Every user sees the health of all nodes, as with sinfo, and the jobs that the user may read.
    ("/muster.v1.Muster/Nodes",                   (_WHO,    _OWN,  _YES,  _YES,   _OWN,  _YES,     _OWN,      _YES)),
    ("/muster.v1.Muster/NodeHistory",             (_WHO,    _OWN,  _YES,  _YES,   _OWN,  _YES,     _OWN,      _YES)),
    # As Describe: to measure a link takes half a second of it, and shows no more than the job's own traffic does.
    ("/muster.v1.Diagnosis/Measurements",         (_WHO,    _HID,  _YES,  _YES,   _HID,  _YES,     _HID,      _YES)),
    ("/muster.v1.Diagnosis/MeasureLink",          (_WHO,    _HID,  _YES,  _YES,   _HID,  _YES,     _HID,      _NO)),
    # As List: what the jobs have used that a caller may read.
    ("/muster.v1.Goodput/Account",                (_WHO,    _OWN,  _YES,  _YES,   _OWN,  _YES,     _OWN,      _YES)),
    ("/muster.v1.AgentService/Attach",            (_WHO,    _NO,   _YES,  _BYE,   _NO,   _NO,      _NO,       _NO)),
    ("/muster.v1.NodeService/Attach",             (_WHO,    _NO,   _NO,   _NO,    _YES,  _NO,      _NO,       _NO)),
    # Between the agents of one gang.
    ("/muster.v1.PeerService/Link",               (_WHO,    _NO,   _YES,  _NO,    _NO,   _NO,      _NO,       _NO)),
    ("/muster.v1.PeerService/Offer",              (_WHO,    _NO,   _YES,  _NO,    _NO,   _NO,      _NO,       _NO)),
    ("/muster.v1.PeerService/Fetch",              (_WHO,    _NO,   _YES,  _NO,    _NO,   _NO,      _NO,       _NO)),
    ("/muster.v1.PeerService/Stored",             (_WHO,    _NO,   _YES,  _NO,    _NO,   _NO,      _NO,       _NO)),
    ("/muster.v1.PeerService/Committed",          (_WHO,    _NO,   _YES,  _NO,    _NO,   _NO,      _NO,       _NO)),
    ("/muster.v1.PeerService/OpenSink",           (_WHO,    _NO,   _YES,  _NO,    _NO,   _NO,      _NO,       _NO)),
    # Of agents and of musterd: the reply only says that the process is alive.
    ("/muster.v1.ProbeService/Ping",              (_WHO,    _YES,  _YES,  _YES,   _YES,  _YES,     _YES,      _YES)),
    # Load balancers and tools such as grpcurl have no credential. These methods reveal nothing about any job.
    ("/grpc.health.v1.Health/Check",              (_YES,    _YES,  _YES,  _YES,   _YES,  _YES,     _YES,      _YES)),
    ("/grpc.health.v1.Health/List",               (_YES,    _YES,  _YES,  _YES,   _YES,  _YES,     _YES,      _YES)),
    ("/grpc.health.v1.Health/Watch",              (_YES,    _YES,  _YES,  _YES,   _YES,  _YES,     _YES,      _YES)),
    ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                                                  (_YES,    _YES,  _YES,  _YES,   _YES,  _YES,     _YES,      _YES)),
)
# fmt: on
AUTHORITY: Mapping[str, Mapping[CallerKind, Answer]] = {
    method: dict(zip(CallerKind, answers, strict=True)) for method, answers in _ROWS
}
"""By full name of a method and kind of caller."""


def answers(method: str, kinds: Iterable[CallerKind]) -> Collection[Answer]:
    """The answers of `method` to a caller of these kinds. None: the method has no row."""
    row = AUTHORITY.get(method, {})
    return {row[kind] for kind in kinds if kind in row}


def is_allowed(method: str, kinds: Iterable[CallerKind]) -> bool:
    """A caller of these kinds, relative to one job or node, may call `method` for that job or node."""
    return Answer.ALLOWED in answers(method, kinds)


def may_call(method: str, kinds: Iterable[CallerKind]) -> bool:
    """A caller of these kinds is let through to `method`, perhaps only for what the caller owns."""
    return not {Answer.ALLOWED, Answer.OWN}.isdisjoint(answers(method, kinds))


def is_public(method: str) -> bool:
    """`method` needs no credential."""
    return may_call(method, [CallerKind.ANONYMOUS])
