"""What commands import. Each import makes every call slower: `make bench-cli` measures by how much."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from muster.launcher.main import main

LARGE = {"grpc", "google", "pydantic", "asyncio", "rich", "yaml", "cryptography", "torch"}
IMPORTED = "print(*sorted(sys.modules))"
JOB = """
name = "tiny"
nodes = 1
command = ["true"]
run_dir = "/shared/run"
"""


def imported(code: str) -> set[str]:
    """The modules that a new Python has after `code`, which prints nothing."""
    environ = {**os.environ, "MUSTER_COORDINATOR": "127.0.0.1:1"}
    argv = [sys.executable, "-c", f"import sys\n{code}\n{IMPORTED}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True, env=environ)
    return set(done.stdout.splitlines()[-1].split())


def test_help_and_version_import_the_table_of_commands_alone() -> None:
    code = "from muster.launcher.main import parser\nparser(['--help']).format_help()"
    found = imported(code)
    assert not (LARGE | {"shutil"}) & found
    own = {name.removeprefix("muster.launcher.") for name in found if name.startswith("muster.launcher.")}
    assert own == {"main", "command_line", "command_table", "errors", "output", "output.terminal_width"}


def test_submit_asks_the_coordinator_before_pydantic_is_imported() -> None:
    found = imported("import muster.launcher.commands.submit")
    assert LARGE & found == {"grpc", "google", "asyncio"}


def test_submit_imports_nothing_that_a_job_of_one_node_does_not_need(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    words = ["submit", "--dry-run", str(tmp_path / "job.toml")]
    found = imported(f"from muster.launcher.main import main\nassert main({words}) == 0")
    assert LARGE & found == {"grpc", "google", "asyncio", "pydantic"}
    needless = {
        "muster.checkpoint.durable.trusted_folder",
        "muster.checkpoint.redundancy.scheme",
        "muster.daemon.transport.authorization",
        "muster.daemon.transport.credential_check",
        "muster.fabric.model.fabric",
        "muster.fabric.sources",
        "muster.launcher.allocation",
        "muster.launcher.plan",
        "muster.slurm.client.backends.commands",
        "muster.slurm.client.types",
    }
    assert not needless & found


def test_only_the_validator_of_the_whole_job_is_built(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(f"{JOB}\n[model]\nlayers = 2\n")
    words = ["submit", "--dry-run", str(tmp_path / "job.toml")]
    code = f"""
from muster.launcher.main import main
assert main({words}) == 0
from muster.launcher.spec.table import Table
built = [table.__name__ for table in Table.__subclasses__() if table.__pydantic_complete__]
assert built == ["Job"], built
"""
    assert imported(code)


def test_a_wrong_job_is_named_also_where_nothing_answers(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB.replace("nodes = 1", "nodes = 0"))
    assert main(["submit", "--coordinator", "127.0.0.1:1", str(tmp_path / "job.toml")]) == 64
