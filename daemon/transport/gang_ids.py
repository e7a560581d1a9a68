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
_TASK: Final = "(?:_[0-9]{1,10})?"
"""Behind the id: the task of an array job, each of which is a gang of its own."""
_NAMED: Final = re.compile(rf"(.{{1,100}}?)-(?:u[0-9]{{1,10}}-[0-9a-f]{{{_DIGITS}}}{_TASK}|[0-9a-f]{{8}})")
_OWNED: Final = re.compile(rf".{{1,100}}-u([0-9]{{1,10}})-[0-9a-f]{{{_DIGITS}}}{_TASK}")


def new_gang_id(job_name: str, uid: int) -> str:
    """A new id for a gang of user `uid`: `train-u1000-0a1b2c3d4e5f`."""
    return f"{job_name}-u{uid}-{secrets.token_hex(_DIGITS // 2)}"


def owner_of(gang: str) -> int | None:
    """The uid that the id names; None: it names nobody."""
    found = _OWNED.fullmatch(gang)
    return int(found[1]) if found else None


def name_of(gang: str) -> str:
    """The name of the job that the id begins with; empty: it begins with none."""
    found = _NAMED.fullmatch(gang)
    return found[1] if found else ""


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
    """Equal for all runs of a job of one owner: those with equal name, command, [env], work_dir and durable folder.
    Empty: the job has no durable folder.

    A run goes on from the checkpoint of an earlier run of its job, never from that of another job. The jobs of a sweep
    differ in their command, in a variable or in their folder.
    """
    if not spec.durable_dir:
        return ""
    fields = [spec.name, spec.durable_dir, list(spec.command), spec.work_dir, sorted(spec.env.items())]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:_IDENTITY_DIGITS]


def differences(one: JobSpec, other: JobSpec) -> list[str]:
    """What makes two jobs of equal name and durable folder two jobs, by its name in job.toml: "command", "env.LR".

    No value is among it, because [env] may hold secrets.
    """
    fields = [name for name in ("command", "work_dir") if getattr(one, name) != getattr(other, name)]
    variables = sorted(name for name in {*one.env, *other.env} if one.env.get(name) != other.env.get(name))
    return [*fields, *(f"env.{name}" for name in variables)]
