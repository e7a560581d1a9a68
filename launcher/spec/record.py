"""[record] of job.toml: what is kept of each run, and where. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from muster.daemon.transport import job_limits
from muster.launcher.spec.table import Table
from muster.slurm.client import names
from muster.v1.common_pb2 import LiveNumbers

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
    live: Literal["", "tensorboard", "mlflow"] = ""
    """Where the numbers of the run are written while it trains: tensorboard or mlflow."""
    live_to: Annotated[str, Field(max_length=MOST_CHARS)] = ""
    """The folder of TensorBoard's event files, or the address of MLflow."""

    @model_validator(mode="after")
    def _check_live(self) -> Record:
        if self.live_to and not self.live:
            raise ValueError('live_to needs live = "tensorboard" or live = "mlflow"')
        if not names.is_one_line(self.live_to):
            raise ValueError("live_to must be one line without control characters")
        if self.live == "tensorboard" and self.live_to and not self.live_to.startswith("/"):
            raise ValueError("live_to must be an absolute path on shared storage, for example /shared/runs/tensorboard")
        return self

    def live_numbers(self) -> LiveNumbers | None:
        """As the job's spec has it; None: nothing is written."""
        if not self.live:
            return None
        said = {"data": self.data, "seed": self.seed, "note": self.note}
        return LiveNumbers(tool=self.live, to=self.live_to, params={key: text for key, text in said.items() if text})
