"""The library in an environment that has no Muster: an agent's package `muster` is there, what Muster needs is not."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import muster


def test_missing_packages_are_named_with_the_environment_that_lacks_them(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False)
    python = tmp_path / "bin" / "python"
    root = Path(muster.__file__).parent.parent
    for line in ("from muster.checkpoint import Checkpoint", "import muster.checkpoint.training.loop"):
        script = f"import sys; sys.path.append({str(root)!r}); {line}"
        done = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.startswith("ModuleNotFoundError: muster.checkpoint needs the Python package google.protobuf"), last
        assert f"which {tmp_path} lacks" in last
        assert f"{python} -m pip install PATH" in last


def test_a_complete_environment_is_not_held_up() -> None:
    script = "import muster.checkpoint.training, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)
