"""What PYTHONPATH names is for ranks: it ends neither `muster` nor an agent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.daemon.host.process.own_packages import without_python_path


@pytest.mark.parametrize(
    ("program", "status", "says"),
    [
        (("muster.launcher", "status", "--coordinator", "localhost:1"), 69, "does not answer"),
        (("muster.daemon.agent", "run", "--gang", "g"), 64, "--spec (or MUSTER_SPEC) must be the job's spec"),
    ],
)
def test_packages_for_another_interpreter_are_not_imported(
    program: tuple[str, ...], status: int, says: str, tmp_path: Path
) -> None:
    for name in ("google", "grpc", "pydantic", "tenacity"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('for Python 3.6')")
    (tmp_path / "argparse.py").write_text("raise ImportError('a backport')")
    (tmp_path / "secret").write_text("s" * 40)
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "muster.toml").write_text(
        f'connections = "plain text, the network is trusted"\nauth = "secret:{tmp_path}/secret"\n'
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:", "PYTHONOPTIMIZE": "2", "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-m", *program, "--config", str(tmp_path / "muster.toml")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert says in done.stderr, done.stderr
    assert done.returncode == status


def test_what_muster_itself_needs_stays() -> None:
    path = ["/opt/muster/bin", "/apps/lib", "/opt/muster/lib/site-packages", "/here", "/opt/mustered"]
    named = "/apps/lib/:/opt/muster/lib/site-packages:/opt/mustered:/here"
    kept = without_python_path(path, named, ("/opt/muster",))
    assert kept == ["/opt/muster/bin", "/opt/muster/lib/site-packages"]
