"""Reads `scontrol show topology`: a line of `Key=value` words for each switch, block, ring or torus.

Lines of Slurm 24.11 to 26.05:

    SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[0-2]
    SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[0-9] Switches=s[0-3]
    BlockName=b1 BlockIndex=0 Nodes=n[0-3] BlockSize=4
    AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[0-7] BlockSize=8
    RingName=r1 Nodes=n[0-7] RingSize=8
    TorusName=t1 Dims=4x2x2 Nodes=n[0-15]

A text of another form is no topology of which we know anything: it is read as a flat one, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from muster.fabric.sources.slurm_topology import Kind, SlurmTopology, Unit
from muster.slurm.client.parsing.hostlist import MAX_NAMES, expand

_KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "SwitchName": Kind.TREE,
        "BlockName": Kind.BLOCK,
        "AggregatedBlock": Kind.BLOCK,
        "RingName": Kind.RING,
        "TorusName": Kind.TORUS,
    }
)
"""The first key of a line."""
NONE: Final = "No topology information available"
"""Slurm's words for a flat network, in some versions. The others print nothing."""
_MOST_NAMES: Final = 16 * MAX_NAMES
"""Names of nodes in all lines. A network of the most nodes has four tiers or so."""
TORUS_WITHOUT_POSITIONS: Final = "`scontrol show topology` does not print the positions in a torus"


def read(text: str) -> SlurmTopology:
    """The topology that `text` describes. A text that is not understood is a FLAT one with a `problem`."""
    units: list[Unit] = []
    kinds: set[Kind] = set()
    base_block = names = 0
    try:
        for line in text.splitlines():
            if not line.strip() or NONE in line:
                continue
            kind, unit = _read_line(line)
            names += len(unit.nodes)
            if names > _MOST_NAMES:
                raise ValueError(f"`scontrol show topology` names more than {_MOST_NAMES} nodes, tier by tier")
            kinds.add(kind)
            base_block = base_block or (0 if unit.aggregated else unit.size)
            if unit.nodes:  # a cloud names blocks whose nodes are yet to come
                units.append(unit)
    except ValueError as error:
        return SlurmTopology(Kind.FLAT, problem=str(error))
    if not kinds:
        return SlurmTopology(Kind.FLAT)
    if len(kinds) > 1:
        return SlurmTopology(Kind.FLAT, problem="`scontrol show topology` prints several kinds of topology at once")
    if kinds == {Kind.TORUS}:
        return SlurmTopology(Kind.FLAT, problem=TORUS_WITHOUT_POSITIONS)
    return SlurmTopology(kinds.pop(), tuple(units), base_block=base_block)


def _read_line(line: str) -> tuple[Kind, Unit]:
    """The kind of one line, and its unit.

    Raises:
        ValueError: the line has another form.
    """
    words = dict(word.split("=", 1) for word in line.split() if "=" in word)
    key = line.split("=", 1)[0].strip()
    if key not in _KINDS or key not in words:
        raise ValueError(f"`scontrol show topology` prints a line of an unknown form: {line[:80]!r}")
    text, is_aggregated = words.get("BlockSize", ""), key == "AggregatedBlock"
    size = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    return _KINDS[key], Unit(words[key], expand(words.get("Nodes", "")), aggregated=is_aggregated, size=size)
