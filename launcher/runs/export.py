"""The numbers of a run in the forms of other tools: TensorBoard's event files, and MLflow. Through their own libraries.

The numbers are those that the ranks have reported (metric_series): one point for each bin of time, at the newest step
of the bin. The median of all ranks has the name of the number, the least and the greatest that name and `.least` or
`.greatest`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from muster.daemon.host import metric_series
from muster.launcher.errors import NotNow, SiteFault, Unavailable
from muster.launcher.runs.store import Run


class Point(NamedTuple):
    """One value of a number. `at_s`: seconds since the epoch."""

    name: str
    step: int
    at_s: float
    value: float


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
            yield Point(name, point.step, float(at_s), point.median)
            if point.values > 1:
                yield Point(f"{name}.least", point.step, float(at_s), point.least)
                yield Point(f"{name}.greatest", point.step, float(at_s), point.greatest)


def to_tensorboard(run: Run, folder: Path) -> int:
    """Write an event file into `folder`. Returns the number of points.

    Raises:
        SiteFault: the library is not installed. NotNow: there is nothing to write.
    """
    found = points(run)
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise SiteFault("TensorBoard is not installed here", 'install it: pip install "muster[tensorboard]"') from None
    writer = EventFileWriter(str(folder))
    for point in found:
        value = Summary.Value(tag=point.name, simple_value=point.value)
        writer.add_event(Event(wall_time=point.at_s, step=point.step, summary=Summary(value=[value])))
    writer.close()
    return len(found)


def to_mlflow(run: Run, address: str, experiment: str) -> int:
    """Log the run to the MLflow server, or the folder, at `address`. Returns the number of points.

    Raises:
        SiteFault: the library is not installed. NotNow: there is nothing to log. Unavailable: MLflow has refused it.
    """
    found = points(run)
    try:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError:
        raise SiteFault("MLflow is not installed here", 'install it: pip install "muster[mlflow]"') from None
    try:
        _log_to(MlflowClient(tracking_uri=address), run, found, experiment)
    except MlflowException as error:
        raise Unavailable(f"MLflow at {address}: {error}", "what was logged until then may be there") from None
    return len(found)


def _log_to(client: Any, run: Run, found: Sequence[Point], experiment: str) -> None:
    from mlflow.entities import Metric, Param, RunTag

    known = client.get_experiment_by_name(experiment)
    parent = known.experiment_id if known else client.create_experiment(experiment)
    record = run.record
    made = client.create_run(parent, start_time=int(record["submitted_s"] * 1000), run_name=record["name"]).info.run_id
    tags = {"muster.gang": run.gang, "slurm.job": str(record["slurm_job_id"])}
    if commit := record.get("repository", {}).get("commit"):
        tags["mlflow.source.git.commit"] = commit
    settings = {key: str(record[key])[:500] for key in ("data", "seed", "note") if record.get(key)}
    settings["command"] = " ".join(record["spec"]["command"])[:500]
    client.log_batch(
        made,
        params=[Param(key, value) for key, value in settings.items()],
        tags=[RunTag(key, value) for key, value in tags.items()],
    )
    for start in range(0, len(found), 1000):  # the most that a server takes at once
        batch = found[start : start + 1000]
        client.log_batch(made, metrics=[Metric(p.name, p.value, int(p.at_s * 1000), p.step) for p in batch])
    client.set_terminated(made, "FINISHED" if run.outcome.get("phase") == "DONE" else "FAILED")
