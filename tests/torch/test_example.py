"""The example trains alone and with faults, and both runs give the same bits."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny_transformer"
NARROW = ["--width", "32", "--layers", "2", "--heads", "2", "--batch", "8", "--lr", "5e-3", "--bucket-cap-mb", "0.02"]


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one machine may be more than its GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def losses(text: str) -> list[float]:
    """The loss of each step that was printed."""
    return [float(found) for found in re.findall(r"^step \d+ loss (\S+) ", text, re.M)]


def train(world: int, *arguments: str) -> str:
    """Run ranks as torchrun starts them, without Muster; returns what rank 0 printed."""
    base = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "USE_LIBUV": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",  # as torchrun sets it; OpenBLAS spins on more than there are cores
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(EXAMPLE / "train.py"), *NARROW, *arguments],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(said)
    return said[0]


def digests(path: Path, world: int) -> set[str]:
    """The digests that the ranks wrote."""
    return {Path(f"{path}.{rank}").read_text() for rank in range(world)}


@pytest.mark.long
def test_a_script_of_torchrun_goes_on_from_its_own_snapshot(tmp_path: Path) -> None:
    words = [
        sys.executable,
        str(EXAMPLE.parent / "own_script" / "train.py"),
        "--snapshot",
        str(tmp_path / "snapshot.pt"),
    ]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    environ = {**os.environ, **place, "USE_LIBUV": "0", "GLOO_SOCKET_IFNAME": "lo"}
    said = [
        subprocess.run([*words, "--epochs", epochs], env=environ, capture_output=True, text=True, check=True).stdout
        for epochs in ("2", "3")
    ]
    assert [re.findall("epoch ([0-9]+)", text) for text in said] == [["0", "1"], ["2"]]


# The example goes through the same faults on the real Slurm (tests/cluster/test_recovery.py).
@pytest.mark.long
def test_the_loss_goes_down_and_a_local_run_with_faults_ends_with_the_same_bits(tmp_path: Path) -> None:
    steps = ("--steps", "60", "--dropout", "0.1")
    found = losses(train(2, *steps, "--sample", "20", "--digest", str(tmp_path / "calm")))
    assert len(found) == 60
    assert sum(found[-10:]) / 10 < 0.75 * found[0]
    command = [sys.executable, "-m", "muster.launcher", "run", "--local", "--nodes", "2", "--spares", "1"]
    faults = ["--fault", "kill-rank@step=10,rank=0", "--fault", "kill-node@step=30"]
    script = ["python3", str(EXAMPLE / "train.py"), *NARROW, *steps, "--digest", str(tmp_path / "hit")]
    done = subprocess.run([*command, *faults, "--", *script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("generation 2 starts from memory", "generation 3 starts from memory"):
        assert words in done.stderr
    assert len(digests(tmp_path / "hit", 2)) == 1
    assert digests(tmp_path / "hit", 2) == digests(tmp_path / "calm", 2)
