"""Numbers of a run for TensorBoard's event files and for MLflow, through their own libraries.

`muster runs export` writes what a run has reported, and the agent's writer what it reports now (live_writer). The
median of all ranks has the name of the number, the least and the greatest that name and `.least` or `.greatest`. The
libraries are imported when they are needed: the writer runs in the user's interpreter, and nothing else needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

Tool = Literal["tensorboard", "mlflow"]
MLFLOW_BATCH = 1000
"""The most values that a server takes at once."""


class NoTracker(Exception):
    """The library is not installed for this interpreter. `extra`: the extra of Muster's that brings it."""

    def __init__(self, library: str, extra: Tool) -> None:
        super().__init__(f"{library} is not installed here")
        self.extra = extra


class TrackerFailed(Exception):
    """The library, the folder or the server has refused what was written."""


class Point(NamedTuple):
    """One value of a number. `at_s`: seconds since the epoch."""

    name: str
    step: int
    at_s: float
    value: float


def points_of(
    name: str, step: int, at_s: float, values: int, least: float, median: float, greatest: float
) -> Iterator[Point]:
    """The points of a number of which `values` ranks have reported a value."""
    yield Point(name, step, at_s, median)
    if values > 1:
        yield Point(f"{name}.least", step, at_s, least)
        yield Point(f"{name}.greatest", step, at_s, greatest)


class Tracker(Protocol):
    """One run in one tool. All methods block, and raise TrackerFailed."""

    def write(self, points: Sequence[Point]) -> None:
        """Add points. They can be seen when this returns."""
        ...

    def close(self, status: str = "") -> None:
        """Nothing follows. `status`: "FINISHED" or "FAILED"; empty: the run goes on later, or elsewhere."""
        ...


class TensorBoard:
    """An event file in `folder`. TensorBoard takes all event files of a folder for one run.

    Raises:
        NoTracker: the library is missing. TrackerFailed: the folder can't be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise NoTracker("TensorBoard", "tensorboard") from None
        self._event, self._summary = Event, Summary
        try:
            self._writer = EventFileWriter(str(folder))
        except OSError as error:
            raise TrackerFailed(f"{folder}: {error.strerror}") from None

    def write(self, points: Sequence[Point]) -> None:
        """See Tracker."""
        try:
            for point in points:
                value = self._summary.Value(tag=point.name, simple_value=point.value)
                summary = self._summary(value=[value])
                self._writer.add_event(self._event(wall_time=point.at_s, step=point.step, summary=summary))
            self._writer.flush()
        except OSError as error:
            raise TrackerFailed(f"the event file: {error.strerror}") from None

    def close(self, status: str = "") -> None:
        """See Tracker. An event file has no status."""
        self._writer.close()


class Mlflow:
    """A run of MLflow's, at the server or in the folder `address`; empty: where MLFLOW_TRACKING_URI says.

    Args:
        experiment: its name; it is made if there is none.
        name, start_s, params, tags: of a run that is made.
        same: the tags by which an earlier run is known, which goes on; none: a run is made.

    Raises:
        NoTracker: the library is missing. TrackerFailed: MLflow has refused something.
    """

    def __init__(
        self,
        address: str,
        experiment: str,
        name: str,
        start_s: float,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        same: Mapping[str, str],
    ) -> None:
        try:
            from mlflow.entities import Metric, Param, RunTag
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise NoTracker("MLflow", "mlflow") from None
        self._metric, self._error, self._address = Metric, MlflowException, address
        try:
            self._client = client = MlflowClient(tracking_uri=address or None)
            known = client.get_experiment_by_name(experiment)
            parent = known.experiment_id if known else client.create_experiment(experiment)
            self._run = _find(client, parent, same) if same else ""
            if self._run:
                client.update_run(self._run, "RUNNING")
                return
            self._run = client.create_run(parent, start_time=int(start_s * 1000), run_name=name).info.run_id
            client.log_batch(
                self._run,
                params=[Param(key, value[:500]) for key, value in params.items()],
                tags=[RunTag(key, value) for key, value in {**tags, **same}.items()],
            )
        except MlflowException as error:
            raise self._failed(error) from None

    def write(self, points: Sequence[Point]) -> None:
        """See Tracker."""
        for start in range(0, len(points), MLFLOW_BATCH):
            batch = points[start : start + MLFLOW_BATCH]
            metrics = [self._metric(p.name, p.value, int(p.at_s * 1000), p.step) for p in batch]
            try:
                self._client.log_batch(self._run, metrics=metrics)
            except self._error as error:
                raise self._failed(error) from None

    def close(self, status: str = "") -> None:
        """See Tracker."""
        try:
            if status:
                self._client.set_terminated(self._run, status)
        except self._error as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> TrackerFailed:
        return TrackerFailed(f"MLflow{f' at {self._address}' if self._address else ''}: {error}")


def _find(client: Any, experiment: str, tags: Mapping[str, str]) -> str:
    wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
    found = client.search_runs([experiment], wanted, max_results=1)
    return found[0].info.run_id if found else ""
