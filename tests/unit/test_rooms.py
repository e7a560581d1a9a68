"""The plan of the house: which folder may import which, as the `__init__` of each folder says. Arrows point one way.

A room is a folder of modules. `__main__` modules are left out: a program may use all that is its own. Imports under
`TYPE_CHECKING` count, for a reader follows them too.
"""

import ast
import re
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("launcher", "fabric", "daemon", "checkpoint", "slurm", "simulator")

MOST_MODULES = 16
"""In a larger folder a newcomer loses the way. About ten is the aim."""
CATALOGUES = {"launcher/commands"}
"""Folders with one thing of a kind in each file, named after it. The way is not lost there, so they may grow."""


def _modules() -> dict[str, Path]:
    """Every module by its full name; a package is named like its folder."""
    found = {}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(("muster", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


def _plan() -> dict[str, set[str]]:
    """A room, and the rooms that it may import, as the last sentence of its docstring says."""
    rooms = {}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")):
        said = re.search(r"^May import: ([^:]*)\.$", ast.get_docstring(ast.parse(path.read_text())) or "", re.MULTILINE)
        assert said, f"{path.relative_to(ROOT)} does not end with `May import: ROOM, ROOM.` (or: nothing)"
        rooms[_room(path)] = {name.replace(".", "/") for name in re.findall(r"`([\w.]+)`", said[1])}
    return rooms


def _room(path: Path) -> str:
    return str(path.parent.relative_to(ROOT))


def imported(source: str, modules: dict[str, Path]) -> set[Path]:
    """The files of `modules` that `source` imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
        found |= {modules[full if full in modules else module] for full, module in names if {full, module} & {*modules}}
    return found


def _arrows() -> dict[str, dict[str, list[str]]]:
    """From room to room, with the files that draw the arrow."""
    modules = _modules()
    arrows: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in modules.values():
        if path.name == "__main__.py":
            continue
        for other in imported(path.read_text(), modules):
            if _room(other) != _room(path):
                arrows[_room(path)][_room(other)].append(path.name)
    return arrows


def test_every_folder_is_a_room() -> None:
    assert {_room(path) for path in _modules().values()} == _plan().keys()


def test_rooms_import_what_they_say_and_nothing_else() -> None:
    plan, arrows = _plan(), _arrows()
    strays = [
        f"{room} imports {other} in {', '.join(files)}: move the module, or add it to {room}/__init__.py"
        for room, others in arrows.items()
        for other, files in others.items()
        if other not in plan[room]
    ]
    unused = [
        f"{room} does not import {other} any more: take it out of {room}/__init__.py"
        for room, allowed in plan.items()
        for other in allowed - arrows[room].keys()
    ]
    assert strays + unused == []


def test_arrows_point_one_way() -> None:
    try:
        TopologicalSorter(_plan()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_rooms_are_small() -> None:
    modules = [_room(path) for path in _modules().values() if path.name not in ("__init__.py", "__main__.py")]
    assert {room: count for room, count in Counter(modules).items() if count > MOST_MODULES}.keys() <= CATALOGUES


@pytest.mark.parametrize(
    "source",
    [
        "import muster.daemon.host.clock",
        "from muster.daemon.host import clock",
        "from muster.daemon.host.clock import now",
        "def f():\n    from muster.daemon.host import clock",
        "if TYPE_CHECKING:\n    from muster.daemon.host import clock",
    ],
)
def test_an_arrow_is_seen_wherever_it_is_drawn(source: str) -> None:
    assert imported(source, _modules()) == {ROOT / "daemon/host/clock.py"}
