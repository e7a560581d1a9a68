"""Reads `scontrol show topoconf`: the topologies of topology.yaml (Slurm 25.05 and later).

`scontrol show topology` shows one topology, and no positions in a torus. So this text says which topologies there are,
and where the nodes of a torus stand. The units of the other kinds are in `scontrol show topology NAME`.

Where a site has topology.conf, Slurm prints one topology "default" of no kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

from muster.fabric.model.grid import MOST_POSITIONS
from muster.fabric.sources.slurm_topology import Kind, SlurmTopology, Unit
from muster.slurm.client.parsing.hostlist import expand
from muster.slurm.client.parsing.records import UnknownForm
from muster.wording import counted

_MOST_CHARS: Final = 32_000_000
"""Characters of the text. A site of 65,536 nodes needs a tenth of them."""
_KINDS: Final = (Kind.TORUS, Kind.RING, Kind.BLOCK, Kind.TREE)
"""The keys of one topology. Slurm prints those of the other kinds too, with nothing in them."""


def read(text: str) -> tuple[SlurmTopology, ...]:
    """The topologies in `text`, the default first. Those of a tree, of blocks and of rings have no units. Empty if the
    text says nothing of their kinds.

    Raises:
        UnknownForm: `text` is no list of topologies.
    """
    document = _load(text)
    if not document:
        return ()
    parts = [_mapping(part, "a topology") for part in _list(document, "the whole text")]
    kinds = [_kind(part) for part in parts]
    if kinds == [None]:
        return ()
    # Slurm takes the first one with cluster_default, and the first one of all if there is none.
    default = next((at for at, part in enumerate(parts) if part.get("cluster_default") == "true"), 0)
    order = sorted(range(len(parts)), key=lambda at: at != default)
    return tuple(_topology(parts[at], kinds[at], default=at == default) for at in order)


def _load(text: str) -> Any:
    import yaml  # few processes need it, and it takes 15 ms

    if len(text) > _MOST_CHARS:
        raise UnknownForm(f"`scontrol show topoconf` prints {len(text)} characters")
    try:
        # All values are texts: a name such as 1e3 or "on" stays one.
        return yaml.load(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        words = " ".join(str(error).split())
        raise UnknownForm(f"`scontrol show topoconf` prints no YAML: {words[:200]}") from None


def _kind(part: Mapping[str, Any]) -> Kind | None:
    kind = next((kind for kind in _KINDS if part.get(kind.value)), None)
    return kind or (Kind.FLAT if part.get("flat") == "true" else None)


def _topology(part: Mapping[str, Any], kind: Kind | None, *, default: bool) -> SlurmTopology:
    name = _text(part.get("topology"), "topology")
    if kind is None:
        return SlurmTopology(Kind.FLAT, (), name, default, problem="`scontrol show topoconf` does not say its kind")
    if kind is not Kind.TORUS:
        return SlurmTopology(kind, (), name, default)
    try:
        toruses = _list(_mapping(part[kind.value], "torus3d").get("toruses"), "toruses")
        return SlurmTopology(kind, tuple(_torus(_mapping(torus, "a torus")) for torus in toruses), name, default)
    except ValueError as error:
        return SlurmTopology(Kind.FLAT, (), name, default, problem=str(error))


def _torus(torus: Mapping[str, Any]) -> Unit:
    name = _text(torus.get("name"), "name")
    whole = _dimensions(torus.get("dims"), "dims")
    if prod(whole) > MOST_POSITIONS:
        raise UnknownForm(f"torus {name[:80]} has more than {MOST_POSITIONS} positions")
    if torus.get("nodes"):
        places: Sequence[str] = expand(_text(torus["nodes"], "nodes"))
    else:
        places = _regions(_list(torus.get("regions"), "regions"), whole)
    shapes = [_dimensions(_mapping(one, "a placement").get("dims"), "dims") for one in torus.get("placements") or ()]
    return Unit(name, tuple(places), whole, shapes=tuple(shapes))


def _regions(regions: Sequence[Any], whole: tuple[int, int, int]) -> list[str]:
    """The node of each position, x fastest; "" where no region is."""
    places = [""] * prod(whole)
    for part in regions:
        region = _mapping(part, "a region")
        x0, y0, z0 = _dimensions(region.get("anchor"), "anchor", least=0)
        x1, y1, z1 = _dimensions(region.get("dims"), "dims")
        nodes = expand(_text(region.get("nodes"), "nodes"))
        if len(nodes) != x1 * y1 * z1 or x0 + x1 > whole[0] or y0 + y1 > whole[1] or z0 + z1 > whole[2]:
            raise UnknownForm(f"a region of {x1}x{y1}x{z1} at {x0},{y0},{z0} has {counted(len(nodes), 'node')}")
        for index, node in enumerate(nodes):
            x, y, z = x0 + index % x1, y0 + index // x1 % y1, z0 + index // (x1 * y1)
            places[x + whole[0] * (y + whole[1] * z)] = node
    return places


def _dimensions(value: Any, what: str, least: int = 1) -> tuple[int, int, int]:
    found = []
    for axis in "xyz":
        text = _mapping(value, what).get(axis)
        if not (isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= 9 and int(text) >= least):
            raise UnknownForm(f"{what} has {axis} = {text!r:.80}")
        found.append(int(text))
    return found[0], found[1], found[2]


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UnknownForm(f"`scontrol show topoconf`: {what} is {value!r:.80}")
    return value


def _list(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise UnknownForm(f"`scontrol show topoconf`: {what} is {value!r:.80}")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise UnknownForm(f"`scontrol show topoconf`: {what} is {value!r:.80}")
    return value
