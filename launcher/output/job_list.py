"""The list of jobs that `muster status` prints without JOB, and which jobs are on it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from muster.launcher.output.job_lines import by_number, goodput_share, job_ids, pace, says_no_step
from muster.launcher.output.screen import Screen
from muster.launcher.output.table import table
from muster.launcher.output.tables import coloured, committed
from muster.v1.api_pb2 import GangView

RECENT_S = 86400.0
"""Seconds for which the list shows a job that has ended, unless others are asked for."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which jobs are shown. `within_s`: those that have ended have done so within these seconds; None: whenever.
    `states`: phases; none: all. `name`: a pattern with * and ?; empty: all. `owner_uid`: None: of everybody."""

    within_s: float | None = RECENT_S
    states: Sequence[str] = ()
    name: str = ""
    owner_uid: int | None = None

    def includes(self, view: GangView, now: float) -> bool:
        """The job is shown. An earlier version does not say when a job has ended."""
        ended_ago = now - view.ended_s if view.final and view.ended_s else 0.0
        return (
            (self.within_s is None or ended_ago < self.within_s)
            and (not self.states or view.phase in self.states)
            and (not self.name or fnmatchcase(view.name, self.name))
            and self.owner_uid in (None, view.owner_uid)
        )


def gang_list(views: Iterable[GangView], screen: Screen, owners: Mapping[int, str] | None = None) -> Iterator[str]:
    """One record for each gang: those that go on first, then those that have ended, each by the number of the job.
    `owners`: uid → login name, if jobs of several users are listed."""
    titles = (
        "job", "name", "user", "phase", "step", "pace", "goodput", "committed", "recoveries", screen.titled("ended"),
        "why",
    )  # fmt: skip
    names = owners or {}
    rows = []
    for view in sorted(views, key=by_number):
        waits = f"waits for {view.waiting_for}" if view.waiting_for else ""
        rows.append(
            (
                job_ids(view),
                view.name,
                names.get(view.owner_uid, ""),
                coloured(view.phase),
                "" if says_no_step(view) else str(view.step),
                "" if view.final else pace(view.training),
                goodput_share(view),
                committed(view),
                str(view.recovery_count or len(view.recoveries)),
                screen.time(view.ended_s),
                view.reason if view.final else waits,
            )
        )
    return table(screen, titles, rows)
