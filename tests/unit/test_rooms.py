"""The plan of the house: which folder may import which. Arrows point upwards in the table, never down or around.

A room is a folder of modules. `__main__` modules are left out: a program may use all that is its own. Imports under
`TYPE_CHECKING` count, for a reader follows them too.
"""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("launcher", "fabric", "daemon", "checkpoint", "slurm", "simulator")

ROOMS: dict[str, set[str]] = {
    "fabric": set(),
    "fabric/model": set(),
    "fabric/sources": {"fabric/model"},
    "fabric/groups": set(),
    "fabric/cost": {"fabric/model"},
    "fabric/placement": {"fabric/model", "fabric/groups"},
    "fabric/placement/maps": {"fabric/model", "fabric/groups", "fabric/placement"},
    "fabric/estimate": {"fabric/model", "fabric/groups", "fabric/cost", "fabric/placement"},
    "fabric/testing": {"fabric/sources", "fabric/model", "fabric/groups", "fabric/placement", "fabric/placement/maps"},
    "daemon": set(),
    "daemon/host": set(),
    "daemon/host/process": {"daemon/host"},
    "daemon/hardware": {"fabric/model", "fabric/sources", "daemon/host"},
    "daemon/preflight": {"daemon/host"},
    "daemon/transport/calls": {"daemon/host"},
    "daemon/transport": {"daemon/host", "daemon/transport/calls"},
    "daemon/transport/testing": {"daemon/transport"},
    "checkpoint/format": set(),
    "checkpoint/durable": {"daemon/host", "checkpoint/format"},
    "daemon/agent/start_checks": {"checkpoint/durable", "checkpoint/format"},
    "checkpoint/store/memory": {"checkpoint/format"},
    "checkpoint/store/streams": {"daemon/host", "checkpoint/format", "checkpoint/store/memory"},
    "checkpoint/store/replication": {
        "daemon/host",
        "checkpoint/format",
        "checkpoint/store/memory",
        "checkpoint/store/streams",
    },
    "checkpoint/store/flush": {
        "daemon/host",
        "checkpoint/format",
        "checkpoint/durable",
        "checkpoint/store/memory",
    },
    "checkpoint/store/restore": {
        "daemon/host",
        "checkpoint/format",
        "checkpoint/store/memory",
        "checkpoint/store/streams",
        "checkpoint/store/replication",
    },
    "checkpoint/store/parity": {
        "daemon/host",
        "checkpoint/format",
        "checkpoint/store/memory",
        "checkpoint/store/streams",
        "checkpoint/store/replication",
        "checkpoint/store/flush",
        "checkpoint/store/restore",
    },
    "checkpoint/store/commit": {
        "checkpoint/format",
        "checkpoint/store/memory",
        "checkpoint/store/streams",
        "checkpoint/store/replication",
        "checkpoint/store/parity",
        "fabric/cost",
    },
    "checkpoint/store": {
        "daemon/host",
        "checkpoint/format",
        "checkpoint/durable",
        "checkpoint/store/memory",
        "checkpoint/store/streams",
        "checkpoint/store/replication",
        "checkpoint/store/commit",
        "checkpoint/store/parity",
        "checkpoint/store/flush",
        "checkpoint/store/restore",
    },
    "checkpoint/training/rank_signals": set(),
    "checkpoint/training/resharding": {"checkpoint/format"},
    "checkpoint/training/states": {"checkpoint/format"},
    "checkpoint/training/copies": {"checkpoint/training/states"},
    "checkpoint/training/agreements": {"checkpoint/format"},
    "checkpoint/training/planning": {
        "checkpoint/format",
        "checkpoint/training/agreements",
        "checkpoint/training/states",
    },
    "checkpoint/training/durable_loading": {
        "checkpoint/durable",
        "checkpoint/format",
        "checkpoint/training/agreements",
    },
    "checkpoint/training": {
        "checkpoint/format",
        "checkpoint/durable",
        "checkpoint/training/agreements",
        "checkpoint/training/copies",
        "checkpoint/training/durable_loading",
        "checkpoint/training/planning",
        "checkpoint/training/rank_signals",
        "checkpoint/training/resharding",
        "checkpoint/training/states",
    },
    "checkpoint/data": {"checkpoint/format", "checkpoint/training/agreements"},
    "checkpoint/adapters": {"checkpoint/data", "checkpoint/format", "checkpoint/training"},
    "checkpoint": {"checkpoint/format", "checkpoint/training", "checkpoint/data"},
    "checkpoint/testing": {
        "checkpoint/format",
        "checkpoint/durable",
        "checkpoint/store",
        "checkpoint/store/flush",
        "checkpoint/store/memory",
        "checkpoint/store/streams",
        "checkpoint/store/replication",
        "checkpoint/training",
        "daemon/host",
    },
    "slurm": set(),
    "slurm/client": {"fabric/sources"},
    "slurm/client/parsing": {"fabric/model", "fabric/sources", "slurm/client"},
    "slurm/client/backends": {"fabric/sources", "slurm/client", "slurm/client/parsing"},
    "slurm/client/fake": {"fabric/sources", "slurm/client", "slurm/client/parsing"},
    "slurm/site": {"fabric/model", "fabric/sources", "slurm/client", "slurm/client/parsing"},
    "slurm/hooks": {"daemon/host"},
    "slurm/image": set(),
    "slurm/cluster/sysfs": {"slurm/image"},
    "slurm/cluster": {"slurm/image", "slurm/cluster/sysfs"},
    "slurm/cluster/systemd": {"slurm/image", "slurm/cluster"},
    "slurm/cluster/virtual": {"slurm/client/parsing", "slurm/cluster"},
    "launcher/output": {"fabric/model", "daemon/host", "daemon/preflight"},
    "slurm/cluster/versions": {"slurm/image", "slurm/cluster"},
    "launcher": {
        "fabric/sources",
        "daemon/host",
        "daemon/transport",
        "slurm/client",
        "slurm/site",
        "launcher/output",
    },
    "launcher/spec": {"daemon/transport", "slurm/client", "fabric/model", "fabric/groups", "launcher"},
    "launcher/allocation": {
        "daemon/host",
        "fabric/groups",
        "fabric/model",
        "fabric/sources",
        "slurm/client",
        "slurm/client/parsing",
        "launcher",
        "launcher/output",
        "launcher/spec",
    },
    "launcher/plan": {
        "fabric/model",
        "fabric/sources",
        "fabric/groups",
        "fabric/cost",
        "fabric/estimate",
        "fabric/placement",
        "fabric/placement/maps",
        "daemon/host",
        "daemon/transport",
        "slurm/client",
        "slurm/client/backends",
        "slurm/client/parsing",
        "launcher",
        "launcher/output",
        "launcher/spec",
        "launcher/allocation",
    },
    "launcher/submission": {
        "checkpoint/format",
        "checkpoint/durable",
        "daemon/agent/start_checks",
        "daemon/host",
        "daemon/transport",
        "fabric/groups",
        "fabric/placement",
        "slurm/client",
        "launcher",
        "launcher/spec",
        "launcher/plan",
        "launcher/output",
    },
    "launcher/diagnosis": {
        "fabric/cost",
        "fabric/estimate",
        "fabric/groups",
        "fabric/model",
        "fabric/placement",
        "fabric/sources",
        "daemon/host",
        "slurm/client",
        "slurm/client/backends",
        "slurm/client/parsing",
        "launcher",
        "launcher/output",
        "launcher/spec",
        "launcher/plan",
    },
    "launcher/certificates": {"daemon/host", "daemon/transport", "launcher"},
    "launcher/local": {"daemon/host", "daemon/transport", "launcher", "launcher/output"},
    "daemon/node/nvml": {"daemon/host"},
    "daemon/node/kernel": {"daemon/host"},
    "daemon/node/sysfs": set(),
    "daemon/node/sensors": {
        "daemon/host",
        "slurm/client/parsing",
        "daemon/node/kernel",
        "daemon/node/nvml",
        "daemon/node/sysfs",
    },
    "daemon/node/kept_memory": {"daemon/host", "checkpoint/store/memory"},
    "daemon/node": {
        "daemon/host",
        "daemon/transport",
        "daemon/node/nvml",
        "daemon/node/sensors",
        "daemon/node/sysfs",
        "daemon/node/kept_memory",
        "daemon/preflight",
    },
    "daemon/node/testing": {"daemon/node/sensors", "daemon/node"},
    "daemon/agent/ranks/place": {"fabric/groups", "fabric/model", "fabric/placement"},
    "daemon/agent/ranks": {
        "fabric/model",
        "daemon/hardware",
        "daemon/host",
        "daemon/host/process",
        "checkpoint/format",
        "daemon/agent/ranks/place",
    },
    "daemon/agent/failure_detector": {"checkpoint/store", "daemon/host", "daemon/transport", "daemon/transport/calls"},
    "daemon/agent/batch": {"daemon/host/process", "daemon/transport"},
    "daemon/agent": {
        "daemon/hardware",
        "daemon/host",
        "daemon/transport",
        "checkpoint/format",
        "checkpoint/durable",
        "checkpoint/store",
        "checkpoint/store/memory",
        "checkpoint/store/streams",
        "checkpoint/store/replication",
        "slurm/client",
        "slurm/client/backends",
        "daemon/agent/ranks",
        "daemon/agent/ranks/place",
        "daemon/agent/failure_detector",
        "daemon/agent/batch",
        "daemon/agent/start_checks",
        "daemon/preflight",
    },
    "daemon/agent/testing": {"daemon/host", "daemon/transport"},
    "daemon/coordinator/core/state": {
        "checkpoint/format",
        "daemon/transport",
        "fabric/groups",
        "fabric/model",
        "fabric/placement",
        "fabric/placement/maps",
        "fabric/sources",
    },
    "daemon/coordinator/core/detection/stragglers": {"daemon/coordinator/core/state"},
    "daemon/coordinator/core/detection": {
        "daemon/transport",
        "fabric/cost",
        "fabric/estimate",
        "daemon/coordinator/core/state",
    },
    "daemon/coordinator/core/recovery/growth": {"daemon/coordinator/core/state", "daemon/coordinator/core/detection"},
    "daemon/coordinator/core/recovery/parity": {"daemon/coordinator/core/state"},
    "daemon/coordinator/core/recovery": {
        "fabric/cost",
        "fabric/placement/maps",
        "checkpoint/format",
        "daemon/coordinator/core/state",
        "daemon/coordinator/core/detection",
        "daemon/coordinator/core/detection/stragglers",
        "daemon/coordinator/core/recovery/growth",
        "daemon/coordinator/core/recovery/parity",
    },
    "daemon/coordinator/core/recovery/requests": {
        "daemon/coordinator/core/state",
        "daemon/coordinator/core/detection",
        "daemon/coordinator/core/recovery",
    },
    "daemon/coordinator/core": {
        "daemon/coordinator/core/state",
        "daemon/coordinator/core/detection",
        "daemon/coordinator/core/recovery",
        "daemon/coordinator/core/recovery/requests",
    },
    "daemon/coordinator/policy": {"daemon/transport", "daemon/coordinator/core/state"},
    "launcher/policy": {
        "daemon/host",
        "daemon/node/kernel",
        "daemon/node/sensors",
        "daemon/node",
        "daemon/coordinator/policy",
        "launcher",
        "launcher/output",
    },
    "launcher/commands": {
        "fabric/sources",
        "checkpoint/durable",
        "daemon/agent/start_checks",
        "daemon/host",
        "daemon/transport",
        "slurm/client",
        "slurm/client/backends",
        "launcher",
        "launcher/spec",
        "launcher/submission",
        "launcher/allocation",
        "launcher/certificates",
        "launcher/output",
        "launcher/local",
        "launcher/policy",
        "launcher/plan",
        "launcher/diagnosis",
        "daemon/preflight",
        "slurm/client/parsing",
    },
    "daemon/coordinator/journal": {"daemon/host", "daemon/coordinator/core/state"},
    "daemon/coordinator/leadership": {"daemon/host", "daemon/transport", "daemon/coordinator/journal"},
    "daemon/coordinator/slurm": {
        "fabric/sources",
        "daemon/host",
        "daemon/transport",
        "slurm/client",
        "slurm/site",
        "slurm/client/fake",
        "daemon/coordinator/core/state",
        "daemon/coordinator/core/detection",
    },
    "daemon/coordinator/shell": {
        "daemon/host",
        "daemon/transport",
        "slurm/client",
        "daemon/coordinator/core/state",
        "daemon/coordinator/core",
        "daemon/coordinator/journal",
        "daemon/coordinator/leadership",
        "daemon/coordinator/slurm",
    },
    "daemon/coordinator/services": {
        "fabric/groups",
        "fabric/model",
        "fabric/placement",
        "fabric/sources",
        "daemon/hardware",
        "daemon/host",
        "daemon/transport",
        "daemon/transport/calls",
        "slurm/client",
        "daemon/coordinator/core/state",
        "daemon/coordinator/core/detection",
        "daemon/coordinator/core/recovery",
        "daemon/coordinator/core/recovery/requests",
        "daemon/coordinator/policy",
        "daemon/coordinator/journal",
        "daemon/coordinator/slurm",
        "daemon/coordinator/shell",
    },
    "daemon/coordinator/diagnosis": {
        "daemon/host",
        "daemon/coordinator/core/state",
        "daemon/coordinator/journal",
        "daemon/coordinator/shell",
        "daemon/coordinator/services",
    },
    "daemon/coordinator": {
        "daemon/coordinator/diagnosis",
        "daemon/host",
        "daemon/transport",
        "daemon/transport/calls",
        "slurm/client",
        "daemon/coordinator/core/state",
        "daemon/coordinator/policy",
        "daemon/coordinator/journal",
        "daemon/coordinator/slurm",
        "daemon/coordinator/shell",
        "daemon/coordinator/services",
    },
    "daemon/coordinator/testing": {
        "daemon/host",
        "daemon/transport",
        "slurm/client/parsing",
        "slurm/client/fake",
        "daemon/coordinator/core/state",
        "daemon/coordinator/journal",
        "daemon/coordinator",
    },
    "simulator/coverage": {"daemon/coordinator/core/state"},
    "simulator/environment": {
        "daemon/coordinator/core/state",
        "fabric/model",
        "fabric/sources",
        "slurm/client",
        "slurm/client/fake",
    },
    "simulator/world": {
        "daemon/coordinator/core/detection/stragglers",
        "daemon/transport",
        "checkpoint/format",
        "checkpoint/store",
        "checkpoint/store/commit",
        "checkpoint/store/parity",
        "slurm/client",
        "slurm/client/parsing",
        "slurm/client/fake",
        "daemon/node/kept_memory",
        "daemon/agent/ranks",
        "daemon/agent/failure_detector",
        "daemon/coordinator/core/state",
        "daemon/coordinator/core/recovery",
        "daemon/coordinator/core",
        "daemon/coordinator/journal",
        "daemon/coordinator/slurm",
        "daemon/coordinator/shell",
        "simulator/coverage",
        "simulator/environment",
    },
    "simulator/faults": {"daemon/coordinator/core/state", "simulator/environment", "simulator/world"},
    "simulator/ground_truth": {"daemon/coordinator/core/state", "simulator/environment", "simulator/world"},
    "simulator/invariants": {
        "checkpoint/store/parity",
        "fabric/model",
        "slurm/client",
        "daemon/node/kept_memory",
        "daemon/coordinator/core/state",
        "daemon/coordinator/core/detection",
        "daemon/coordinator/core/recovery",
        "daemon/coordinator/core",
        "daemon/coordinator/journal",
        "daemon/coordinator/services",
        "simulator/coverage",
        "simulator/environment",
        "simulator/world",
        "simulator/ground_truth",
    },
    "simulator/scenarios": {
        "daemon/coordinator/core/state",
        "daemon/coordinator/core",
        "simulator/environment",
        "simulator/world",
        "simulator/invariants",
    },
    "simulator": {
        "daemon/host",
        "slurm/client",
        "daemon/coordinator/core/state",
        "simulator/coverage",
        "simulator/environment",
        "simulator/world",
        "simulator/faults",
        "simulator/invariants",
    },
    "simulator/planted_bugs": {"simulator", "simulator/invariants"},
}
"""A room, and the rooms that it may import. Each of those stands above it."""

MOST_MODULES = 17
"""In a larger folder a newcomer loses the way. About ten is the aim."""


def _modules() -> dict[str, Path]:
    """Every module by its full name; a package is named like its folder."""
    found = {}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(("muster", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


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


def test_every_folder_is_a_room_of_the_plan() -> None:
    assert {_room(path) for path in _modules().values()} == ROOMS.keys()


def test_no_arrow_leaves_the_plan() -> None:
    strays = {
        f"{room} -> {other}": files
        for room, others in _arrows().items()
        for other, files in others.items()
        if other not in ROOMS[room]
    }
    assert strays == {}, "move the module, or add the arrow to ROOMS if it points upwards there"


def test_no_arrow_of_the_plan_is_unused() -> None:
    arrows = _arrows()
    assert {
        room: allowed - arrows[room].keys() for room, allowed in ROOMS.items() if allowed - arrows[room].keys()
    } == {}


def test_arrows_point_upwards_only() -> None:
    above: set[str] = set()
    for room, allowed in ROOMS.items():
        assert allowed <= above, room
        above.add(room)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_small_and_says_what_it_is_for(room: str) -> None:
    modules = [path for path in (ROOT / room).glob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    assert len(modules) <= MOST_MODULES
    assert ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))


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
