"""The unit tests keep gRPC's polling thread alive for the whole process.

grpc.aio ends this thread when the last channel or server is collected, and waits for its end. A test that fails leaves
its server open. Later the garbage collector, in any other test, would wait for this thread for ever.
"""

import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio
from hypothesis import settings

from muster.daemon.testing.scripted_world import ScriptedWorld
from muster.slurm.image import nvml_stand_in

grpc.aio.init_grpc_aio()

# Commits of a journal wait for a disk, and no unit test needs a real one. A container may have little shared memory.
MEMORY = "/dev/shm"
if os.path.isdir(MEMORY):
    found = os.statvfs(MEMORY)
    if found.f_bavail * found.f_frsize > 4 << 30 and not found.f_flag & os.ST_NOEXEC:
        os.environ.setdefault("TMPDIR", MEMORY)
        tempfile.tempdir = None  # so that it is looked up again

# Node checks measure for as long as they would on a node: with one thread, not with one on each core.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# An example takes as long as this machine is busy. Inputs that make a parser slow are the fuzzers' (`make fuzz`). Each
# run has other examples, so a quarter of hypothesis's own number is enough for a run. `make test-long` has more.
settings.register_profile("muster", deadline=None, max_examples=25)
settings.register_profile("long", deadline=None, max_examples=500)
settings.load_profile("muster")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The linters come first: mypy takes half a minute of one core, and would be the last test of all."""
    items.sort(key=lambda item: item.path.name != "test_linters.py")


@pytest.fixture(scope="session", autouse=True)
def _records_of_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a test submits leaves no record among those of whoever runs the tests."""
    os.environ["MUSTER_RUNS"] = str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for NVIDIA's management library. A test copies it, so that it has a control file of its own."""
    library = nvml_stand_in.library(tmp_path_factory.mktemp("nvml"))
    if library is None:
        pytest.skip("the stand-in is compiled with gcc")
    return library


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The test's folder, on a file system of 1 MiB: it holds half a checkpoint, and is full for the logs of ranks."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system, and not in every container")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ScriptedWorld]:
    """A job of three nodes runs in Slurm; a coordinator has just started."""
    made = ScriptedWorld.create(tmp_path)
    await made.start_coordinator()
    yield made
    await made.close()
