"""Virtual environments inside the development's own, made by pip the first time that they are used."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".venv" / "benchmarks"
_TIMEOUT_S = 900.0


class NotInstalled(Exception):
    """An environment can't be made. The message says why, in pip's own words."""


def python_of(name: str, requirements: list[str]) -> Path:
    """The Python of an environment that has the requirements, and the torch of constraints.txt.

    Raises:
        NotInstalled: pip refuses.
    """
    folder = FOLDER / name
    python, done = folder / "bin" / "python", folder / "installed.txt"
    wanted = [_pinned("torch"), _pinned("numpy"), *requirements]
    if done.exists() and done.read_text().split("\n") == wanted:
        return python
    folder.parent.mkdir(parents=True, exist_ok=True)
    venv.create(folder, clear=True, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    try:
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=ROOT)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"pip did not end within {_TIMEOUT_S:.0f} s") from None
    if outcome.returncode:
        raise NotInstalled(next((line for line in outcome.stderr.splitlines() if "ERROR" in line), "pip failed"))
    done.write_text("\n".join(wanted))
    return python


def with_muster() -> Path:
    """The Python of an environment with what Muster needs and torch. Muster itself comes from the checkout.

    Raises:
        NotInstalled: pip refuses.
    """
    return python_of("muster", ["-c", "constraints.txt", "-e", "."])


def _pinned(package: str) -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}=="))
