"""[checkpoint] of job.toml: where checkpoints are kept, how often they become durable, and for how long. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, field_validator

from muster.daemon.transport import job_limits
from muster.launcher.spec.table import Table

if TYPE_CHECKING:
    from muster.checkpoint.redundancy.scheme import Redundancy

MINUTE_S, HOUR_S = 60.0, 3600.0
_EVERY = re.compile(r"(\d+) (step|minute)s?")
AUTO = "auto"

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://([^\s/?#@%]+)(/[^\s?#%]*)?")
"""A scheme, a bucket and a prefix. No user, no password: job.toml is no place for secrets."""

Hours = Annotated[float, Field(ge=0, le=1_000_000)]


class CheckpointTable(Table):
    """[checkpoint]: where checkpoints are kept."""

    memory: Annotated[bool, Field(strict=True)] = True
    """Whether each finished step is kept in the memory of nodes."""
    copies: Annotated[int, Field(strict=True, ge=2, le=job_limits.MAX_COPIES)] = 2
    """On how many nodes each rank's state is kept in memory, its own node among them."""
    parity: Annotated[int, Field(strict=True, ge=0, le=job_limits.MAX_GROUP_NODES)] = 0
    """Instead of copies, groups of so many nodes at most hold one parity of their states together. 0: copies."""
    durable_every: str = ""
    """Write a durable checkpoint while the job trains: "500 steps", "30 minutes" or "auto". Empty: never unasked."""
    durable_keep: Annotated[int, Field(strict=True, ge=0, le=1_000_000)] = 0
    """The newest so many of this job's durable checkpoints are kept. 0: all, unless durable_keep_hours is given."""
    durable_keep_hours: Hours = 0.0
    """Older ones are kept for so many hours. 0: none, if durable_keep is given."""
    trust_durable_store: Annotated[bool, Field(strict=True)] = False
    """durable_dir is a URL, and whoever may write there is trusted: to load a checkpoint runs what it says, as you."""
    node_mtbf_hours: Hours = 0.0
    """Hours between two failures of one node, for intervals that Muster chooses. 0: as observed."""

    @field_validator("parity")
    @classmethod
    def _check_group(cls, value: int) -> int:
        if value in (1, 2):
            raise ValueError(
                f"must be the nodes of a group, 3 to {job_limits.MAX_GROUP_NODES}, or 0: with 2 it would be a copy"
            )
        return value

    @field_validator("durable_every")
    @classmethod
    def _check_durable_every(cls, value: str) -> str:
        found = _EVERY.fullmatch(value)
        if value not in ("", AUTO) and (found is None or not 0 < int(found[1]) <= job_limits.MAX_STEPS):
            raise ValueError('must be a number of steps or minutes, or "auto": "500 steps", "30 minutes"')
        return value

    @property
    def durable_every_steps(self) -> int:
        """Steps between two durable checkpoints; 0: steps don't count."""
        return self._every("step")

    @property
    def durable_every_s(self) -> float:
        """Seconds between two durable checkpoints; 0: the time does not count."""
        return self._every("minute") * MINUTE_S

    @property
    def redundancy(self) -> Redundancy:
        """How the states in memory outlive the loss of nodes."""
        from muster.checkpoint.redundancy.schemes import redundancy_of  # a submission seldom needs it

        return redundancy_of(self.copies - 2, self.parity)

    def _every(self, unit: str) -> int:
        found = _EVERY.fullmatch(self.durable_every)
        return int(found[1]) if found and found[2] == unit else 0


def is_url(durable_dir: str) -> bool:
    """Whether durable checkpoints go to a store of objects."""
    return "://" in durable_dir


def check_url(value: str) -> str:
    """A URL of fsspec, without a slash at its end. Raises ValueError: it is none."""
    found = _URL.fullmatch(value)
    if found is None or found[1] in ("file", "local"):
        raise ValueError(
            "must be an absolute path, or a URL of a store of objects that names a bucket and no password: "
            "s3://BUCKET/PREFIX"
        )
    return value.rstrip("/")


def check_trust(durable_dir: str, table: CheckpointTable) -> None:
    """Raises ValueError: the place can't say who has written a checkpoint, and the job does not say that it matters
    not."""
    if is_url(durable_dir) and not table.trust_durable_store:
        raise ValueError(
            f"durable_dir = {durable_dir!r} is in a store of objects, which does not say who has written a checkpoint. "
            "To load one runs what it says, as your user. If only you, or people that you trust, may write there, set "
            "checkpoint.trust_durable_store = true"
        )
    if table.trust_durable_store and not is_url(durable_dir):
        raise ValueError(
            "checkpoint.trust_durable_store is for a durable_dir that is a URL, such as s3://BUCKET/PREFIX"
        )


def check_redundancy(table: CheckpointTable, nodes: int) -> None:
    """Raises ValueError: the job can't have its states kept as it asks."""
    if table.parity > nodes:
        raise ValueError(
            f"checkpoint.parity = {table.parity} must not be more than nodes = {nodes}: a group has nodes with ranks"
        )
    if table.parity and table.copies > 2:
        raise ValueError(
            f"checkpoint.parity = {table.parity} is in place of copies, and checkpoint.copies = {table.copies} asks "
            "for more of them: keep one of both"
        )
