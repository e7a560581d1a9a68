"""[record] of job.toml: what is kept of each run, and where. Pure."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from muster.daemon.transport import job_limits
from muster.launcher.spec.table import Table

MOST_CHARS = 1000


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Words = Annotated[
    str,
    Field(max_length=MOST_CHARS),
    BeforeValidator(_as_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer"}]}),
]


class Record(Table):
    """[record]: what `muster runs` keeps of a run."""

    keep: Annotated[bool, Field(strict=True)] = True
    """Whether a record of each run is kept."""
    store: str = ""
    """The folder of the records. Default: MUSTER_RUNS, else muster/runs in XDG_DATA_HOME or ~/.local/share."""
    data: Words = ""
    """Which data the run reads, in your words: "c4, snapshot 2026-10"."""
    seed: Words = ""
    """The seed of the run, if a person chose it."""
    note: Words = ""
    """What the run is for."""
    secrets: Annotated[tuple[str, ...], Field(max_length=job_limits.MAX_VARIABLES)] = ()
    """Variables whose values are left out, beside those whose names or values look like a secret."""
