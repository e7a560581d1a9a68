"""Ids of gangs, and what makes two gangs runs of one job. An id names the user who may register it.

Everybody can learn an id before its gang is registered: Slurm shows the path of a job's script, and its name is the id.
So it does not protect an id that nobody can guess it. The id names its owner instead, and the coordinator lets no other
user register it. Ids of earlier versions of Muster (`train-0a1b2c3d`) name nobody. They are valid still, because
journals and the folders of checkpoints hold them. Pure, except for the random digits.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from muster.v1.common_pb2 import JobSpec

_DIGITS: Final = 12
"""Random hexadecimal digits of an id: 2.8e14 ids for each name. Ids of earlier versions end in eight, so no such id is
taken for one that names its owner."""
_IDENTITY_DIGITS: Final = 32
_OWNED: Final = re.compile(rf".{{1,100}}-u([0-9]{{1,10}})-[0-9a-f]{{{_DIGITS}}}")


def new_gang_id(job_name: str, uid: int) -> str:
    """A new id for a gang of user `uid`: `train-u1000-0a1b2c3d4e5f`."""
    return f"{job_name}-u{uid}-{secrets.token_hex(_DIGITS // 2)}"


def owner_of(gang: str) -> int | None:
    """The uid that the id names; None: it names nobody."""
    found = _OWNED.fullmatch(gang)
    return int(found[1]) if found else None


def why_not_registered(gang: str, uid: int) -> str:
    """Why user `uid` may not register this id; empty: they may."""
    owner = owner_of(gang)
    if owner is None or owner == uid:
        return ""
    return (
        f"the id {gang} is not for a gang of uid {uid}: "
        "let muster submit make an id for your own gang, as the user who runs it"
    )


def job_identity(spec: JobSpec) -> str:
    """Equal for all runs of a job of one owner: those with equal name, command and durable folder. Empty: the job has
    no durable folder.

    A run goes on from the checkpoint of an earlier run of its job, never from that of another job. The jobs of a sweep
    differ in their command.
    """
    if not spec.durable_dir:
        return ""
    fields = json.dumps([spec.name, list(spec.command), spec.durable_dir])
    return hashlib.sha256(fields.encode()).hexdigest()[:_IDENTITY_DIGITS]
