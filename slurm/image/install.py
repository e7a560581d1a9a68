"""Runs inside the image: installs Muster's source, which lies beside this file, into the Python environment.

It installs the stand-in for NVIDIA's management library, if it lies there too, where programs look for the real one.

It does what pip does with a wheel (package, metadata, entry points, byte code), without building a wheel. This layer is
built after every change of the source, so it must take only about a second.
"""

from __future__ import annotations

import compileall
import importlib.metadata
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import muster

HERE = Path(__file__).resolve().parent
NVML = HERE / "libnvidia-ml.so.1"
SCRIPT = "#!{python}\nimport sys\n\nfrom {module} import {function}\n\nsys.exit({function}())\n"


def main() -> None:
    """Installs Muster. Fails if Python does not see the installed distribution."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    site = Path(sysconfig.get_path("purelib"))
    shutil.rmtree(site / "muster", ignore_errors=True)
    shutil.copytree(HERE / "muster", site / "muster")
    write_metadata(site, project)
    for name, target in project["scripts"].items():
        write_script(Path(sysconfig.get_path("scripts")) / name, target)
    compileall.compile_dir(site / "muster", quiet=2)
    if NVML.exists():
        shutil.copy(NVML, "/usr/local/lib")
        subprocess.run(["/sbin/ldconfig"], check=True)
    assert importlib.metadata.version(project["name"]) == muster.__version__


def write_metadata(site: Path, project: dict[str, str]) -> None:
    """Writes the distribution's metadata."""
    folder = site / f"{project['name']}-{muster.__version__}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {muster.__version__}\n")
    (folder / "INSTALLER").write_text("muster-image\n")


def write_script(path: Path, target: str) -> None:
    """Writes the program of an entry point."""
    module, function = target.split(":")
    python = Path(sysconfig.get_path("scripts")) / "python3"
    path.write_text(SCRIPT.format(python=python, module=module, function=function))
    path.chmod(0o755)


if __name__ == "__main__":
    main()
