"""The numbers of a run in TensorBoard's event files and in MLflow, read again by these libraries themselves."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from muster.daemon.agent.training.live_writer import serve
from muster.daemon.host.metric_series import NodeSeries, NumberPoint, write_node
from muster.launcher.errors import NotNow
from muster.launcher.runs import export
from muster.launcher.runs.store import Run

pytestmark = pytest.mark.long
SECONDS = (1_796_000_000, 1_796_000_010, 1_796_000_020)


def run(folder: Path) -> Run:
    record = {
        "gang_id": "g1", "slurm_job_id": 42, "name": "tiny", "submitted_s": 1.0, "run_dir": str(folder), "data": "c4",
        "spec": {"command": ["python3", "train.py"]}, "repository": {"commit": "a" * 40},
    }  # fmt: skip
    return Run(record, {"phase": "DONE"})


@pytest.fixture
def trained(tmp_path: Path) -> Run:
    series = NodeSeries("n1")
    for number, at_s in enumerate(SECONDS):
        series.add_number(at_s, "loss", NumberPoint(number * 10, 2, 1.0, 2.0 - number / 4, 3.0, 0, 1))
    write_node(str(tmp_path), "g1", series)
    return run(tmp_path)


def test_tensorboard_reads_what_is_exported(trained: Run, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert export.to_tensorboard(trained, tmp_path / "events") == 9
    found = EventAccumulator(str(tmp_path / "events")).Reload()
    assert found.Tags()["scalars"] == ["loss", "loss.greatest", "loss.least"]
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [(0, 2.0), (10, 1.75), (20, 1.5)]


def test_mlflow_reads_what_is_exported(trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the small package has no database, and no server runs here
    from mlflow.tracking import MlflowClient

    address = f"file://{tmp_path}/mlflow"
    assert export.to_mlflow(trained, address, "muster") == 9
    client = MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name("muster")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.data.params == {"command": "python3 train.py", "data": "c4"}
    assert found.data.tags["slurm.job"] == "42"
    assert [(one.step, one.value) for one in client.get_metric_history(found.info.run_id, "loss")] == [
        (0, 2.0), (10, 1.75), (20, 1.5),
    ]  # fmt: skip
    assert found.info.status == "FINISHED"


def log_live(tool: str, to: str, steps: Sequence[int], *last: str) -> None:
    """What one run of a job logs while it trains."""
    of_run = {"gang": "g1", "job": 42, "name": "tiny", "params": {"seed": "3"}}
    head = {"tool": tool, "to": to, "experiment": "muster", **of_run}
    lines = [json.dumps({"at": 1_796_000_000 + step, "numbers": [["loss", step, 2, 1.0, 2.0, 3.0]]}) for step in steps]
    said = list[str]()
    serve([json.dumps(head), *lines, *last], said.append)
    assert said == []


def test_tensorboard_reads_what_two_runs_of_a_job_log_as_one(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    log_live("tensorboard", str(tmp_path / "g1"), (1, 2))
    log_live("tensorboard", str(tmp_path / "g1"), (3,), '{"status": "FINISHED"}')
    found = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    assert list(found.Runs()) == ["g1"]
    assert [(one.step, one.value) for one in found.Scalars("g1", "loss")] == [(1, 2.0), (2, 2.0), (3, 2.0)]


def test_mlflow_reads_what_two_runs_of_a_job_log_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    address = f"file://{tmp_path}/mlflow"
    client = MlflowClient(tracking_uri=address)
    for steps, last, status in (((1, 2), (), "RUNNING"), ((3,), ('{"status": "FINISHED"}',), "FINISHED")):
        log_live("mlflow", address, steps, *last)
        experiment = client.get_experiment_by_name("muster")
        (found,) = client.search_runs([experiment.experiment_id])
        assert (found.info.status, found.data.params, found.data.tags["muster.gang"]) == (status, {"seed": "3"}, "g1")
    history = client.get_metric_history(found.info.run_id, "loss.greatest")
    assert [(one.step, one.value) for one in history] == [(1, 3.0), (2, 3.0), (3, 3.0)]


def test_a_run_without_numbers_exports_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotNow, match="run g1 has no numbers"):
        export.to_tensorboard(run(tmp_path), tmp_path / "events")
    assert not (tmp_path / "events").exists()
