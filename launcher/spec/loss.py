"""[loss] of job.toml: what counts as a spike or a plateau of the loss, and what follows. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from muster.daemon.transport.job_limits import LOSS_BOUNDS
from muster.launcher.spec.table import Table
from muster.v1.common_pb2 import LossChoice

Response = Literal["record", "stop", "roll_back"]


def _within(name: str) -> object:
    least, most = LOSS_BOUNDS[name]
    return Field(ge=least, le=most)


def _whole(name: str) -> object:
    least, most = LOSS_BOUNDS[name]
    return Field(strict=True, ge=least, le=most)


class Loss(Table):
    """[loss]: what Muster does about the loss that the script reports. A missing key is as the site's policy says."""

    not_finite: Response | None = None
    """What follows if it is NaN or infinite."""
    spike: Response | None = None
    """What follows if it jumps."""
    plateau: Literal["record", "stop"] | None = None
    """What follows if it falls no more."""
    deviations: Annotated[float | None, _within("deviations")] = None
    """A spike is so many deviations above the median of the newest values."""
    in_a_row: Annotated[int | None, _whole("in_a_row")] = None
    """So many values in a row must be that high."""
    window: Annotated[int | None, _whole("window")] = None
    """Values before that a value is compared with."""
    plateau_values: Annotated[int | None, _whole("plateau_values")] = None
    """A plateau has so many values at least. 0: plateaus are not looked for."""
    margin_steps: Annotated[int | None, _whole("margin_steps")] = None
    """A roll back goes to so many steps before a spike, and skips the batches of as many after it."""
    roll_backs: Annotated[int | None, _whole("roll_backs")] = None
    """So many roll backs within within_steps steps. Instead of a further one, the job stops."""
    within_steps: Annotated[int | None, _whole("within_steps")] = None
    """Steps in which roll backs are counted."""

    def to_proto(self) -> LossChoice | None:
        """What the job has chosen; None: nothing."""
        # model_dump would first build a serializer of its own for this table.
        chosen: dict[str, Any] = {name: value for name, value in self if value is not None}
        return LossChoice(**chosen) if chosen else None
