"""The network topologies that a test cluster can have, as Slurm's configuration files. Pure: no I/O.

===========  =============================================================================================
``tree``     leaf switches s0, s1, ... under one spine (``topology/tree``)
``block``    the same groups of nodes as blocks b0, b1, ..., and aggregated blocks of two (``topology/block``)
``ring``     rings r0, r1, ... of 16 nodes at most (``topology/ring``, Slurm 26.05)
``torus``    one torus t0 of three dimensions (``topology/torus3d``, Slurm 26.05)
``several``  tree (the default), block and flat at the same time, each for a partition (Slurm 25.05)
``flat``     none (``topology/flat``)
===========  =============================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

TOPOLOGIES = ("tree", "block", "ring", "torus", "several", "flat")
OLD_TOPOLOGIES = ("tree", "block", "flat")
"""Those of Slurm 24.11."""
MOST_IN_RING = 16
"""Nodes of a ring; Slurm accepts no more."""
_PLUGINS = {"tree": "tree", "block": "block", "ring": "ring", "torus": "torus3d", "several": "tree", "flat": "flat"}
_PLACEMENTS = ((1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2), (4, 2, 1), (4, 2, 2))
"""Shapes that jobs in a torus may have, beside the whole. Slurm refuses jobs of another number of nodes."""


def settings(topology: str) -> Mapping[str, str]:
    """The lines of slurm.conf."""
    return {"TopologyPlugin": f"topology/{_PLUGINS[topology]}"}


def partitions(topology: str) -> tuple[str, ...]:
    """Partitions beside ``main`` and ``shared``, each named like the topology that it uses."""
    return ("block", "flat") if topology == "several" else ()


def files(topology: str, groups: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The files of /etc/slurm by name. `groups`: the nodes of each leaf switch, by its name."""
    nodes = [node for group in groups.values() for node in group]
    match topology:
        case "tree":
            return {"topology.conf": _lines(_switches(groups))}
        case "block":
            blocks = [f"BlockName=b{at} Nodes={','.join(group)}" for at, group in enumerate(groups.values())]
            return {"topology.conf": _lines([*blocks, f"BlockSizes={','.join(map(str, _block_sizes(groups)))}"])}
        case "ring":
            return {"topology.conf": _lines(_rings(nodes))}
        case "torus":
            return {"topology.yaml": _lines(_torus(nodes))}
        case "several":
            return {"topology.yaml": _lines(_several(groups))}
    return {}


def torus_of(count: int) -> tuple[int, int, int]:
    """The dimensions of a torus of `count` nodes: x >= y >= z, as near to a cube as possible."""
    sides = [side for side in range(1, count + 1) if count % side == 0]
    return min((x, y, count // (x * y)) for x in sides for y in sides if y <= x and 1 <= count // (x * y) <= y
               and count % (x * y) == 0)  # fmt: skip


def _switches(groups: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for switch, nodes in groups.items():
        yield f"SwitchName={switch} Nodes={','.join(nodes)}"
    yield f"SwitchName=spine Switches={','.join(groups)}"


def _block_sizes(groups: Mapping[str, Sequence[str]]) -> list[int]:
    """The smallest block, and two of them. Slurm refuses a block that is smaller than the first size."""
    smallest = min(map(len, groups.values()))
    return [smallest, 2 * smallest] if len(groups) > 1 else [smallest]


def _rings(nodes: Sequence[str]) -> Iterator[str]:
    for at, start in enumerate(range(0, len(nodes), MOST_IN_RING)):
        yield f"RingName=r{at} Nodes={','.join(nodes[start : start + MOST_IN_RING])}"


def _torus(nodes: Sequence[str]) -> Iterator[str]:
    whole = torus_of(len(nodes))
    fitting = [shape for shape in _PLACEMENTS if all(whole[axis] % shape[axis] == 0 for axis in range(3))]
    yield "- topology: torus"
    yield "  cluster_default: true"
    yield "  torus3d:"
    yield "    toruses:"
    yield "    - name: t0"
    yield f"      dims: {_dimensions(whole)}"
    yield f"      nodes: {','.join(nodes)}"
    yield "      placements:"
    for shape in dict.fromkeys([*fitting, whole]):
        yield f"      - dims: {_dimensions(shape)}"


def _dimensions(shape: Sequence[int]) -> str:
    return "{ " + ", ".join(f"{axis}: {size}" for axis, size in zip("xyz", shape, strict=True)) + " }"


def _several(groups: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield "- topology: tree"
    yield "  cluster_default: true"
    yield "  tree:"
    yield "    switches:"
    for switch, nodes in groups.items():
        yield f"    - switch: {switch}"
        yield f"      nodes: {','.join(nodes)}"
    yield "    - switch: spine"
    yield f"      children: {','.join(groups)}"
    yield "- topology: block"
    yield "  cluster_default: false"
    yield "  block:"
    yield "    block_sizes:"
    for size in _block_sizes(groups):
        yield f"    - {size}"
    yield "    blocks:"
    for at, nodes in enumerate(groups.values()):
        yield f"    - block: b{at}"
        yield f"      nodes: {','.join(nodes)}"
    yield "- topology: flat"
    yield "  cluster_default: false"
    yield "  flat: true"


def _lines(lines: Iterator[str] | Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
