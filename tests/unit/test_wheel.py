"""What is installed is the product, and not what its tests need. The simulator is a command, so it is a part of it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_LIST = """
import sys
from setuptools import Distribution
distribution = Distribution({"script_name": "setup.py"})
distribution.parse_config_files()
distribution.get_command_obj("egg_info").egg_base = sys.argv[1]
command = distribution.get_command_obj("build_py")
command.build_lib = sys.argv[1]
command.ensure_finalized()
print("FILES", *command.get_outputs(include_bytecode=False), sep="\\n")
"""
_OF_TESTS = r"muster/(.+/)?testing/|muster/slurm/(testcluster|image)/"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of the wheel, by their names in it, as setuptools lists them when it builds the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-Ic", _LIST, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    _, _, listed = done.stdout.partition("FILES\n")
    names = [os.path.relpath(name, folder) for name in listed.split()]
    return {name: ROOT / "src" / name for name in names}


def test_the_wheel_has_no_test_cluster_no_scripted_agents_and_nobody_of_any_uid(wheel: dict[str, Path]) -> None:
    assert [name for name in wheel if re.match(_OF_TESTS, name)] == []


def test_the_wheel_has_every_other_file_of_the_product(wheel: dict[str, Path]) -> None:
    modules = {
        str(path.relative_to(ROOT / "src")) for room in (ROOT / "src/muster").iterdir() for path in room.rglob("*.py")
    }
    assert {name for name in modules if not re.match(_OF_TESTS, name)} <= wheel.keys()
    assert {
        "muster/simulator/__main__.py",
        "muster/daemon/coordinator/policy/policy.toml",
        "muster/launcher/report/page.css",
        "muster/py.typed",
    } <= wheel.keys()


def test_no_module_of_the_wheel_imports_what_is_not_in_it(wheel: dict[str, Path]) -> None:
    strays = []
    for name, path in wheel.items():
        for node in ast.walk(ast.parse(path.read_text())) if name.endswith(".py") else ():
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                named = [f"{node.module}.{alias.name}" for alias in node.names]
            strays += [f"{name}: {one}" for one in named if re.match(_OF_TESTS, one.replace(".", "/") + "/")]
    assert strays == []
