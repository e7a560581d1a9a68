"""The numbers of a run in the forms of other tools: TensorBoard's event files, and MLflow (trackers).

The numbers are those that the ranks have reported (metric_series): one point for each bin of time, at the newest step
of the bin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from muster.daemon.agent.training.trackers import (
    Mlflow,
    NoTracker,
    Point,
    TensorBoard,
    Tracker,
    TrackerFailed,
    points_of,
)
from muster.daemon.host import metric_series
from muster.launcher.errors import NotNow, SiteFault, Unavailable
from muster.launcher.runs.store import Run


def points(run: Run) -> list[Point]:
    """All points of a run, in the order of time.

    Raises:
        NotNow: there are none.
    """
    series = metric_series.read_job(str(run.record.get("run_dir", "")), run.gang)
    found = sorted(_points(series), key=lambda point: (point.at_s, point.name))
    if not found:
        raise NotNow(
            f"run {run.gang} has no numbers",
            "checkpoint.step(n, loss=...) and muster.log(...) report them; they lie in the run's run_dir",
        )
    return found


def _points(series: metric_series.JobSeries) -> Iterator[Point]:
    for name in series.names:
        for at_s, point in series.number(name).items():
            yield from points_of(name, point.step, float(at_s), point.values, point.least, point.median, point.greatest)


def to_tensorboard(run: Run, folder: Path) -> int:
    """Write an event file into `folder`. Returns the number of points.

    Raises:
        SiteFault: the library is not installed. NotNow: there is nothing to write. Unavailable: it can't be written.
    """
    found = points(run)
    with _explained():
        return _write(TensorBoard(folder), found)


def to_mlflow(run: Run, address: str, experiment: str) -> int:
    """Log the run to the MLflow server, or the folder, at `address`. Returns the number of points.

    Raises:
        SiteFault: the library is not installed. NotNow: there is nothing to log. Unavailable: MLflow has refused it.
    """
    found, record = points(run), run.record
    tags = {"muster.gang": run.gang, "slurm.job": str(record["slurm_job_id"])}
    if commit := record.get("repository", {}).get("commit"):
        tags["mlflow.source.git.commit"] = commit
    params = {key: str(record[key]) for key in ("data", "seed", "note") if record.get(key)}
    params["command"] = " ".join(record["spec"]["command"])
    with _explained():
        tracker = Mlflow(address, experiment, record["name"], record["submitted_s"], params, tags, {})
        return _write(tracker, found, "FINISHED" if run.outcome.get("phase") == "DONE" else "FAILED")


def _write(tracker: Tracker, found: Sequence[Point], status: str = "") -> int:
    tracker.write(found)
    tracker.close(status)
    return len(found)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except NoTracker as error:
        raise SiteFault(str(error), f'install it: pip install "muster[{error.extra}]"') from None
    except TrackerFailed as error:
        raise Unavailable(str(error), "what was written until then may be there") from None
