"""The faults of the GPUs that a node of the test cluster pretends to have."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from muster.daemon.coordinator.policy.policy import Policy
from muster.slurm.image.engine import EngineError, Outcome
from muster.slurm.image.nvml_stand_in import CONTROL_SUFFIX, ControlFile
from muster.slurm.testcluster.hardware.faults import (
    NVML_CONTROL,
    THROTTLING,
    mend_gpus,
    read_gpus,
    with_memory_error,
    write_gpus,
)
from muster.slurm.testcluster.spec import POLICY


class OneHost:
    """Runs the commands here, with the library's folder replaced by one of the test."""

    def __init__(self, folder: Path) -> None:
        self.control = folder / Path(NVML_CONTROL).name
        (folder / Path(NVML_CONTROL.removesuffix(CONTROL_SUFFIX)).name).touch()

    def exec(self, host: str, *command: str, stdin: bytes | None = None, check: bool = True) -> Outcome:
        here = [word.replace(str(Path(NVML_CONTROL).parent), str(self.control.parent)) for word in command]
        done = subprocess.run(here, input=stdin or b"", capture_output=True)
        outcome = Outcome(command, done.returncode, done.stdout.decode(), done.stderr.decode())
        if check:
            outcome.checked()
        return outcome


@pytest.fixture
def host(tmp_path: Path) -> OneHost:
    return OneHost(tmp_path)


def test_a_node_gets_gpus_with_its_first_fault_and_keeps_them(host: OneHost) -> None:
    file = read_gpus(host, "n0", 3)
    assert file == ControlFile.of_healthy_gpus(3)
    file.gpus[2] |= THROTTLING
    assert write_gpus(host, "n0", file) > 0
    assert ControlFile.parse(host.control.read_text()) == file
    assert read_gpus(host, "n0", 1) == file
    assert len(read_gpus(host, "n0", 8).gpus) == 8


def test_a_repair_leaves_healthy_gpus_and_gives_none_to_a_node_without(host: OneHost) -> None:
    mend_gpus(host, "n0")
    assert not host.control.exists()
    file = read_gpus(host, "n0", 2)
    file.gpus[0] |= THROTTLING
    write_gpus(host, "n0", file)
    mend_gpus(host, "n0")
    assert ControlFile.parse(host.control.read_text()) == ControlFile.of_healthy_gpus(2)


def test_each_memory_error_is_one_more(host: OneHost) -> None:
    file = read_gpus(host, "n0", 2)
    file.gpus[1] = with_memory_error(with_memory_error(file.gpus[1]))
    assert (file.gpus[1]["ecc 1 0"], file.gpus[1]["memory 2"], file.gpus[1]["remapped"]) == ("2", "2", "0 1 1 0")
    write_gpus(host, "n0", file)
    mend_gpus(host, "n0")
    assert ControlFile.parse(host.control.read_text()) == ControlFile.of_healthy_gpus(2)


def test_an_image_without_the_library_says_what_is_missing(host: OneHost) -> None:
    (host.control.parent / Path(NVML_CONTROL.removesuffix(CONTROL_SUFFIX)).name).unlink()
    with pytest.raises(EngineError, match="install gcc"):
        read_gpus(host, "n0", 1)


def test_the_policy_of_the_test_cluster_waits_for_seconds(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    (rule,) = [
        rule for rule in Policy.load(tmp_path / "policy.toml").rules() if (rule.kind, rule.code) == ("gpu-throttle", 64)
    ]
    assert (rule.share, rule.window_s, rule.clear_s) == (0.2, 15, 20)


def test_musterd_looks_for_the_driver_where_the_library_has_its_control_file() -> None:
    script = (Path(__file__).resolve().parents[2] / "slurm" / "testcluster" / "init.sh").read_text()
    assert f"--nvidia-driver {NVML_CONTROL} " in script
