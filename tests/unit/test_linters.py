"""Lint, format and types are tests. So is the rule of boundaries: few, named places enter each outside world.

A boundary is a row of BOUNDARIES. Who needs another adds it there, with its reason.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PACKAGES = ("launcher", "fabric", "daemon", "checkpoint", "slurm", "simulator")


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "--output-format", "concise"], ["ruff", "format", "--check"], ["mypy"]],
    ids=["ruff", "format", "mypy"],
)
def test_nothing_to_complain_about(command: list[str]) -> None:
    tool, *arguments = command
    done = subprocess.run([BIN / tool, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass(frozen=True)
class Boundary:
    """An outside world: the names that enter it, and where that is done and why. A folder stands for all below it."""

    names: tuple[str, ...]
    allowed: dict[str, str]


BOUNDARIES = {
    "processes": Boundary(
        (
            "subprocess",
            "multiprocessing",
            "pty",
            "asyncio.create_subprocess_exec",
            "asyncio.create_subprocess_shell",
            "os.system",
            "os.popen",
            "os.fork",
            "os.forkpty",
            "os.posix_spawn",
            "os.posix_spawnp",
            *(f"os.exec{kind}" for kind in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
        ),
        {
            "slurm/client/backends/run_command.py": "Slurm's commands",
            "slurm/testcluster/": "the test cluster drives a container engine; no daemon imports it",
            "slurm/image/engine.py": "podman and docker, for the test image and the test cluster",
            "slurm/image/nvml_stand_in.py": "gcc, for the test image and for tests",
            "slurm/image/install.py": "ldconfig, inside the test image",
            "daemon/agent/launch/user_path/launcher_fork.py": "forks a launcher into zygotes",
            "daemon/agent/ranks/zygote_handle.py": "starts the zygote, whose children the ranks are",
            "daemon/agent/launch/task.py": "the command of a user, which starts a launcher",
            "daemon/agent/user_script/helper_call.py": "the srun that a user's script has called",
            "daemon/agent/ranks/stack_dumps.py": "py-spy, which reads the stacks of ranks that hang",
            "daemon/agent/ranks/zygote.py": "the zygote forks into the rank",
            "daemon/agent/ranks/rank_main.py": "a command that is not Python is executed in the rank's place",
            "daemon/node/nvml/nvml_process.py": "calls of NVML hang on a dying GPU: in a process of their own",
            "daemon/preflight/check_process.py": "the node check, which may hang in a driver",
            "daemon/coordinator/hooks/delivery.py": "the site's hooks, in threads of their own",
            "daemon/host/process/orphan_guard.py": "the agent's parent forks the agent",
            "checkpoint/testing/rank_processes.py": "the ranks of a test as forks of one process that has torch",
            "checkpoint/testing/gang_of_processes.py": "agents as processes, for tests and measurements",
            "checkpoint/testing/worker.py": "how such a process is called",
            "daemon/testing/scripted_gang.py": "plays a gang of agents as processes, for tests and measurements",
            "launcher/runs/origins.py": "git, and the job's Python, each with a deadline",
            "launcher/scripts/command_words.py": "sbatch --help: which options the site has, before the loop begins",
            "launcher/scripts/in_allocation.py": "muster run launches for all tasks of an srun, which wait for it",
            "launcher/local/processes.py": "muster run --local: coordinator and agents as processes of one workstation",
            "daemon/agent/training/live_numbers.py": "the library of TensorBoard or MLflow may hang",
            "daemon/agent/batch/run_hooks.py": "the user's hooks, beside the batch script",
            "daemon/agent/batch/srun.py": "the batch script's srun, which it outlives",
            "simulator/parallel.py": "seeds run in processes; no daemon imports it",
            "simulator/planted_bugs/known_seeds.py": "several bugs are looked for at once",
        },
    ),
    "wall clock": Boundary(
        ("time.time", "time.time_ns", "datetime.datetime.now", "datetime.datetime.utcnow", "datetime.date.today"),
        {
            "daemon/host/clock.py": "the clock of all daemons",
            "slurm/testcluster/": "the test cluster says when a fault took effect; no daemon imports it",
        },
    ),
    "database": Boundary(
        ("sqlite3", "sqlite_utils"),
        {
            "daemon/coordinator/journal/journal.py": "the journal",
            "launcher/runs/store.py": "the user's records of runs",
            "daemon/coordinator/diagnosis/past_generations.py": "a history that no decision needs",
            "daemon/coordinator/accounting/account_store.py": "a projection of the journal",
            "daemon/coordinator/diagnosis/side_database.py": "how such a file is opened",
            "daemon/coordinator/journal/history.py": "pages of the journal",
            "daemon/coordinator/journal/reading.py": "one job's records, without a coordinator",
        },
    ),
    "gRPC transport": Boundary(
        (
            "grpc.insecure_channel",
            "grpc.secure_channel",
            "grpc.server",
            "grpc.aio.insecure_channel",
            "grpc.aio.secure_channel",
            "grpc.aio.server",
        ),
        {
            "daemon/transport/channel.py": "channels and servers with credentials; TLS goes there",
            "checkpoint/testing/gang_in_one_process.py": "a gang in one process on loopback, for tests and benchmarks",
        },
    ),
    "pyslurm": Boundary(
        ("pyslurm",),
        {"slurm/client/backends/pyslurm_worker.py": "a process of its own: pyslurm holds the GIL through every call"},
    ),
}

# The core decides: it sees the world through events and a `now` that it is given.
CORE = "daemon/coordinator/core"
CORE_MAY_IMPORT = {
    *("__future__", "bisect", "collections", "dataclasses", "enum", "functools", "heapq", "itertools", "math"),
    *("operator", "pydantic", "re", "statistics", "typing"),
}
SHARED_WITH_AGENTS = (
    "src/muster/wording.py",
    "src/muster/exit_codes.py",
    "src/muster/node_health.py",
    "src/muster/recovery_phases.py",
    "daemon/transport/fencing_timeouts.py",
    "checkpoint/format/folder_names.py",
    "checkpoint/format/replica_agreement.py",
)
"""Numbers, names, words and a rule that the core and the agents must hold alike."""
PLACEMENT = (
    "fabric/groups",
    "fabric/model",
    "fabric/placement",
    "fabric/sources/nesting.py",
    "fabric/sources/node_reports.py",
    "fabric/sources/tiers.py",
    "fabric/cost/reliability.py",
    "fabric/estimate/failures.py",
    "checkpoint/redundancy/scheme.py",
    "checkpoint/redundancy/schemes.py",
    "checkpoint/redundancy/copies.py",
    "checkpoint/redundancy/parity.py",
)
"""Where the core's seats come from, who holds their shards, and how long the intervals of checkpoints are."""
CORE_MAY_SHARE = (
    "muster.daemon.coordinator.core",
    *(f"muster.{path.removesuffix('.py').replace('/', '.')}" for path in PLACEMENT),
    *(f"muster.{path.removesuffix('.py').replace('/', '.')}".replace(".src.muster", "") for path in SHARED_WITH_AGENTS),
)


def _files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from [ROOT / folder] if folder.endswith(".py") else sorted((ROOT / folder).rglob("*.py"))


def _imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """(local name, full name) of everything that is imported."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
                yield "", alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
                yield "", node.module or ""


def _imports_of(path: Path) -> Iterator[tuple[str, str]]:
    return _imports(ast.walk(ast.parse(path.read_text())))


def _dotted(node: ast.expr) -> list[str]:
    """["grpc", "aio", "server"] for `grpc.aio.server`; empty for what does not begin with a name."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return [*before, node.attr]
    return []


def names_used(source: str) -> set[str]:
    """The full names of all that a module imports, or reaches through what it imports."""
    nodes = list(ast.walk(ast.parse(source)))
    imported = list(_imports(nodes))
    known = {local: full for local, full in imported if local}
    used = {full for _, full in imported}
    for node in nodes:
        if isinstance(node, ast.Attribute) and (parts := _dotted(node)) and parts[0] in known:
            used.add(".".join([known[parts[0]], *parts[1:]]))
    return used


@functools.cache
def _names_of_files() -> dict[str, set[str]]:
    return {str(path.relative_to(ROOT)): names_used(path.read_text()) for path in _files(*PACKAGES)}


def _uses(boundary: Boundary) -> dict[str, set[str]]:
    """The boundary's names that each file of the packages uses."""
    return {path: found for path, names in _names_of_files().items() if (found := names & set(boundary.names))}


@pytest.mark.parametrize("world", BOUNDARIES)
def test_each_outside_world_is_entered_through_its_doors(world: str) -> None:
    boundary = BOUNDARIES[world]
    strays = {path: names for path, names in _uses(boundary).items() if not path.startswith(tuple(boundary.allowed))}
    assert strays == {}, f"{world}: use {', '.join(boundary.allowed)}, or add a boundary with its reason"


@pytest.mark.parametrize("world", BOUNDARIES)
def test_no_door_is_left_open_for_nobody(world: str) -> None:
    boundary = BOUNDARIES[world]
    unused = [allowed for allowed in boundary.allowed if not any(path.startswith(allowed) for path in _uses(boundary))]
    assert unused == [], f"{world}: nothing enters here any more"


def test_the_core_knows_no_outside_world() -> None:
    files = list(_files(CORE))
    assert files
    for path in files:
        roots = {full.partition(".")[0] for local, full in _imports_of(path) if full and not local}
        muster = {full for full in names_used(path.read_text()) if full.startswith("muster.")}
        assert roots - CORE_MAY_IMPORT - {"muster"} == set(), path
        assert all(full.startswith(CORE_MAY_SHARE) for full in muster), path


@pytest.mark.parametrize(
    "path", [str(path.relative_to(ROOT)) for path in _files(*PLACEMENT) if path.name != "__init__.py"]
)
def test_what_the_core_places_with_knows_no_more_than_the_core(path: str) -> None:
    roots = {full.partition(".")[0] for local, full in _imports_of(ROOT / path) if full and not local}
    assert roots <= CORE_MAY_IMPORT | {"muster", "random", "types"}, roots  # random numbers of a fixed seed


@pytest.mark.parametrize("path", SHARED_WITH_AGENTS)
def test_what_the_core_shares_with_the_agents_knows_no_more_than_the_core(path: str) -> None:
    roots = {full.partition(".")[0] for _, full in _imports_of(ROOT / path)}
    assert roots <= CORE_MAY_IMPORT


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import subprocess", "subprocess"),
        ("import subprocess as sp\nsp.run", "subprocess.run"),
        ("from time import time as now", "time.time"),
        ("import time\ntime.time()", "time.time"),
        ("import grpc.aio\ngrpc.aio.server()", "grpc.aio.server"),
        ("from grpc import aio\naio.insecure_channel('x')", "grpc.aio.insecure_channel"),
        ("def f():\n    import os\n    os.fork()", "os.fork"),
        ("from datetime import datetime\ndatetime.now()", "datetime.datetime.now"),
        ("import asyncio as a\nspawn = a.create_subprocess_exec", "asyncio.create_subprocess_exec"),
    ],
)
def test_a_door_is_seen_under_any_name(source: str, name: str) -> None:
    assert name in names_used(source)


@pytest.mark.parametrize("source", ["import time\ntime.monotonic()", "now = object()\nnow.time", "# subprocess"])
def test_what_is_no_door_is_not_seen(source: str) -> None:
    assert not names_used(source) & {name for boundary in BOUNDARIES.values() for name in boundary.names}
