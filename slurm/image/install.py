"""Runs inside the image: installs Muster's source, found beside this file, into the environment there.

Does what pip would do with a wheel (package, metadata, entry points, byte code), without building one:
the layer is made anew after every change of the source and has to take about a second.
"""

from __future__ import annotations

import compileall
import importlib.metadata
import shutil
import sysconfig
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPT = "#!{python}\nimport sys\n\nfrom {module} import {function}\n\nsys.exit({function}())\n"


def main() -> None:
    """Install, and fail loudly if the result cannot be seen as an installed distribution."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    site = Path(sysconfig.get_path("purelib"))
    shutil.rmtree(site / "muster", ignore_errors=True)
    shutil.copytree(HERE / "muster", site / "muster")
    write_metadata(site, project)
    for name, target in project["scripts"].items():
        write_script(Path(sysconfig.get_path("scripts")) / name, target)
    compileall.compile_dir(site / "muster", quiet=2)
    assert importlib.metadata.version(project["name"]) == project["version"]


def write_metadata(site: Path, project: dict[str, str]) -> None:
    folder = site / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (folder / "INSTALLER").write_text("muster-image\n")


def write_script(path: Path, target: str) -> None:
    module, function = target.split(":")
    python = Path(sysconfig.get_path("scripts")) / "python3"
    path.write_text(SCRIPT.format(python=python, module=module, function=function))
    path.chmod(0o755)


if __name__ == "__main__":
    main()
