"""What counts as a spike or a plateau of the loss, and what follows: the site's rule, and the job's own choice."""

from dataclasses import dataclass, fields, replace
from enum import StrEnum


class LossResponse(StrEnum):
    """What follows from a loss that is not finite, a spike or a plateau."""

    RECORD = "record"
    STOP = "stop"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True, slots=True)
class LossRule:
    """The rule of a site (policy.toml, [loss])."""

    not_finite: LossResponse = LossResponse.RECORD
    spike: LossResponse = LossResponse.RECORD
    plateau: LossResponse = LossResponse.RECORD
    deviations: float = 10.0
    """A spike is so many deviations above the median of the window."""
    in_a_row: int = 3
    """So many values in a row must be that high."""
    window: int = 64
    """The newest ordinary values that a value is compared with. Half of them must be there."""
    plateau_values: int = 2000
    """Values that a plateau has at least; 0: plateaus are not looked for."""
    margin_steps: int = 100
    """A roll back goes to so many steps before the spike, and skips the batches of as many after it."""
    roll_backs: int = 3
    """Roll backs of a run within `within_steps` steps. Instead of a further one, the job is stopped."""
    within_steps: int = 10_000


@dataclass(frozen=True, slots=True)
class LossChoice:
    """What a job has chosen (job.toml, [loss]), as in LossRule; None: what the site has."""

    not_finite: LossResponse | None = None
    spike: LossResponse | None = None
    plateau: LossResponse | None = None
    deviations: float | None = None
    in_a_row: int | None = None
    window: int | None = None
    plateau_values: int | None = None
    margin_steps: int | None = None
    roll_backs: int | None = None
    within_steps: int | None = None

    def over(self, site: LossRule) -> LossRule:
        """The rule of the job on a site with the rule `site`."""
        chosen = {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}
        return replace(site, **chosen) if chosen else site  # asked at each report of each gang
