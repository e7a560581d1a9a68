"""The settings that `muster submit` leaves for a user's own batch script: what is written is read again."""

import json

import pytest

from muster.slurm.client.launch_settings import LaunchLine, LaunchSettings, WrongSettings, read, settings_file
from muster.v1.common_pb2 import JobSpec

SETTINGS = LaunchSettings(
    gang="tiny-0a1b2c",
    coordinator="login1:6820",
    agent="/opt/muster/bin/muster-agent",
    spares=1,
    spec=JobSpec(name="tiny", spares=1, run_dir="/shared/runs", requeue=True, hang_after_s=60.0, env={"A": "b c"}),
    launch=LaunchLine(27, ("srun", "torchrun", '"${ARGS[@]}"'), "it starts torchrun"),
)


def test_what_is_written_is_read_again() -> None:
    assert read(SETTINGS.to_json()) == SETTINGS


def test_a_script_without_a_known_line() -> None:
    without = LaunchSettings("tiny-0a1b2c", "", "/opt/muster-agent", 0, JobSpec(name="tiny"))
    assert read(without.to_json()) == without


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"version": 1}', "7", SETTINGS.to_json()[:-40]])
def test_a_damaged_file_is_refused_in_words(text: str) -> None:
    with pytest.raises(WrongSettings, match="damaged"):
        read(text)


def test_another_version_is_refused() -> None:
    with pytest.raises(WrongSettings, match="version 2, and this Muster reads 1"):
        read(json.dumps(json.loads(SETTINGS.to_json()) | {"version": 2}))


def test_the_file_is_named_after_the_gang() -> None:
    assert settings_file("/shared/runs", "tiny-0a1b2c") == "/shared/runs/tiny-0a1b2c.launch.json"
