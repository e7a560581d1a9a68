"""Memory runs out, really: the kernel refuses an allocation beyond a limit of the process (RLIMIT_AS)."""

from __future__ import annotations

import configparser
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.host.process.process_memory import EXIT_MEMORY

LIMIT_BYTES, TOO_MUCH_BYTES = 3 << 30, 4 << 30
ROOT = Path(__file__).parents[2]
SPEC = '{"command": ["true"], "runDir": "/nowhere", "ranksPerNode": 1}'

LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
module, sys.argv = sys.argv[2], sys.argv[2:]
runpy.run_module(module, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        ("muster.daemon.coordinator", []),
        ("muster.daemon.node", ["--coordinator", "mgmt1:7070"]),
        ("muster.daemon.agent", ["run", "--coordinator", "mgmt1:7070", "--gang", "g1", "--spec", SPEC]),
    ],
)
def test_a_program_that_gets_no_more_memory_says_so(tmp_path: Path, module: str, flags: list[str]) -> None:
    """Its settings are a file of holes that does not fit into the memory."""
    config = tmp_path / "muster.toml"
    with config.open("wb") as file:
        file.truncate(TOO_MUCH_BYTES)
    command = [sys.executable, "-Ic", LIMITED, str(LIMIT_BYTES), module, *flags, "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == EXIT_MEMORY, done.stderr
    assert "memory has run out on" in done.stderr
    assert "bug" not in done.stderr


SHORT_ENGINE = """
import asyncio, resource, sys
from pathlib import Path
from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.shell.engine import Engine
from muster.daemon.host import clock
from muster.daemon.transport.identity import SecretCredentials
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm

async def main(folder):
    journal = Journal(folder / "state")
    slurm = FakeSlurm(FakeCluster((), now=clock.wall))
    engine = Engine(journal, journal.load(), slurm, SecretCredentials.create(folder / "secret"))
    engine.start()
    engine.post(events.NodeAttached("n1", "boot", "i", "n1:1"))
    long = "x" * (64 << 20)
    in_use = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (32 << 20), resource.RLIM_INFINITY))
    engine.post(events.NodeAttached("n2", long, "i", "n2:1"))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    engine.post(events.NodeAttached("n3", "boot", "i", "n3:1"))
    print(type(engine.failed.exception()).__name__, engine.running, journal.position)

asyncio.run(main(Path(sys.argv[1])))
"""


def test_a_coordinator_that_gets_no_more_memory_decides_nothing_and_its_journal_is_whole(tmp_path: Path) -> None:
    """It has no room for one fact. The next start knows all that was written before.

    Python raises MemoryError. A library in C++ or Rust ends the process with SIGABRT instead, and says why.
    """
    command = [sys.executable, "-Ic", SHORT_ENGINE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode == -signal.SIGABRT:
        assert "memory allocation of" in done.stderr
    else:
        assert done.stdout.split() == ["MemoryError", "False", "1"], done.stderr
    journal = Journal(tmp_path / "state")
    assert set(journal.load().nodes) == {"n1"}
    journal.append([facts.NodeRegistered("n3", "boot", "n3:1")], 1.0, "a test")
    journal.close()


@pytest.mark.parametrize("unit", ["musterd", "muster-coordinator"])
def test_systemd_starts_a_daemon_again_whatever_ended_it(unit: str) -> None:
    """Also the kernel, at the limit of the unit."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(ROOT / "systemd" / f"{unit}.service")
    service = parser["Service"]
    assert service["Restart"] == "always"
    assert str(EXIT_MEMORY) not in service["RestartPreventExitStatus"].split()
    assert service["MemoryMax"]
