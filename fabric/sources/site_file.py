"""A site's /etc/muster/fabric.toml: what neither Slurm nor the nodes know of the network.

Nodes are lists as Slurm writes them. The caller reads the file and gives the function that expands such a list.

    nvlink_blocks = true                       # each Slurm block is one NVLink domain
    [tiers.leaf]                               # also node, nvlink, pod, any
    gbit_per_s = 400                           # of one node's adapter, in one direction
    latency_us = 5
    oversubscription = 1
    [racks]
    r1 = "n[0-7]"
    [power_feeds]
    a = "n[0-15]"
    [nvlink]                                   # NVLink domains of several nodes
    d1 = "n[0-3]"
    [switches.s1]                              # switches that Slurm does not know
    nodes = "n[0-3]"
    gbit_per_s = 200                           # to the tier above, if it differs from that tier's
    [switches.spine]
    switches = ["s1", "s2"]
    [[nodes]]
    nodes = "n[0-7]"
    gpus = 8
    sockets = [0, 0, 0, 0, 1, 1, 1, 1]         # of each GPU
    nics = [{ name = "mlx5_0", gpus = [0, 1] }]
    gbit_per_s = 100                           # to its switch, if it differs from the tier's
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from muster.fabric.model.errors import FabricError
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.fabric.model.node import GPU_LINK, Nic, Node
from muster.fabric.sources.nesting import NodeSet
from muster.fabric.sources.slurm_topology import Kind, SlurmTopology
from muster.fabric.sources.tiers import Tiers
from muster.wording import counted, listed

Expand = Callable[[str], Sequence[str]]
"""Makes the names of a node list in Slurm's short form. Raises ValueError for one that is malformed."""

_Gbit = Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)]
_Microseconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
_Ratio = Annotated[float, Field(ge=1, le=1e4, allow_inf_nan=False)]
_Text = Annotated[str, Field(min_length=1, max_length=1_000_000)]
_Name = Annotated[str, Field(min_length=1, max_length=128, pattern="^[A-Za-z0-9_.:-]+$")]
_Index = Annotated[int, Field(ge=0, le=1023)]
_BITS_OF_BYTE = 8


class FabricFileError(FabricError):
    """The site's file is wrong. The message names the key."""


class _Part(BaseModel):
    # Most sites have no such file: then no validator is built.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class _Tier(_Part):
    gbit_per_s: _Gbit | None = None
    latency_us: _Microseconds | None = None
    oversubscription: _Ratio = 1.0


class _Switch(_Part):
    nodes: _Text | None = None
    switches: tuple[_Name, ...] = ()
    gbit_per_s: _Gbit | None = None


class _NicKeys(_Part):
    name: _Name
    gpus: tuple[_Index, ...] = ()


class _Nodes(_Part):
    nodes: _Text
    gpus: Annotated[int, Field(ge=0, le=1024)] = 0
    sockets: tuple[_Index, ...] = ()
    nics: tuple[_NicKeys, ...] = ()
    gbit_per_s: _Gbit | None = None


class _FabricFile(_Part):
    """The keys of fabric.toml."""

    nvlink_blocks: bool = False
    tiers: dict[str, _Tier] = {}
    racks: dict[_Name, _Text] = {}
    power_feeds: dict[_Name, _Text] = {}
    nvlink: dict[_Name, _Text] = {}
    switches: dict[_Name, _Switch] = {}
    nodes: tuple[_Nodes, ...] = ()


@dataclass(frozen=True)
class SiteFabric:
    """What the file says."""

    tiers: Tiers = field(default_factory=Tiers)
    details: tuple[Node, ...] = ()
    domains: tuple[NodeSet, ...] = ()
    """Switches and NVLink domains that Slurm does not know."""
    nvlink_blocks: bool = False

    def extra(self, topology: SlurmTopology) -> tuple[NodeSet, ...]:
        """The domains to add to `topology`."""
        if not (self.nvlink_blocks and topology.kind is Kind.BLOCK):
            return self.domains
        blocks = (unit for unit in topology.units if not unit.aggregated)
        return (*self.domains, *(NodeSet(frozenset(block.nodes), block.name, nvlink=True) for block in blocks))


def read_site(table: Mapping[str, Any], expand: Expand, known: Iterable[str]) -> SiteFabric:
    """What the file with the keys `table` says. `known` are all nodes that Slurm has.

    Raises:
        FabricFileError: a key or value is wrong, a node is unknown or is in two racks, switches form a loop.
    """
    try:
        file = _FabricFile.model_validate(_lists_as_tuples(table))
    except ValidationError as error:
        raise FabricFileError(_words(error)) from None
    lists = _NodeLists(expand, frozenset(known))
    tiers = _tiers(file)
    domains = [
        *(NodeSet(lists.expand(f"nvlink.{name}", text), name, nvlink=True) for name, text in file.nvlink.items()),
        *_switches(file.switches, lists, tiers),
    ]
    return SiteFabric(tiers, tuple(_details(file, lists, tiers)), tuple(domains), file.nvlink_blocks)


@dataclass(frozen=True)
class _NodeLists:
    expand_text: Expand
    known: frozenset[str]

    def expand(self, key: str, text: str) -> frozenset[str]:
        """The nodes of the list `text`, which is the value of `key`."""
        try:
            names = frozenset(self.expand_text(text))
        except ValueError as error:
            raise FabricFileError(f"{key}: {error}") from None
        if strange := sorted(names - self.known):
            raise FabricFileError(f"{key}: Slurm has no node {listed(strange, ', ')}")
        if not names:
            raise FabricFileError(f"{key}: no node is named")
        return names


def _tiers(file: _FabricFile) -> Tiers:
    links, ratios = dict(Tiers().links), {}
    for word, tier in file.tiers.items():
        allowed = [level for level in Level if level is not Level.ACCELERATOR]
        if word not in [level.word for level in allowed]:
            words = ", ".join(level.word for level in allowed)
            raise FabricFileError(f"tiers.{word[:80]}: no such tier; the tiers are {words}")
        level = Level.of(word)
        usual = links[level]
        links[level] = Link(
            usual.latency if tier.latency_us is None else tier.latency_us * 1e-6,
            usual.bandwidth if tier.gbit_per_s is None else _bytes_per_s(tier.gbit_per_s),
        )
        ratios[level] = tier.oversubscription
    return Tiers(links, ratios)


def _switches(switches: Mapping[str, _Switch], lists: _NodeLists, tiers: Tiers) -> Iterable[NodeSet]:
    """Each switch with all nodes below it."""
    below: dict[str, frozenset[str]] = {}
    for name, switch in switches.items():
        if switch.nodes is None and not switch.switches:
            raise FabricFileError(f"switches.{name}: it has neither nodes nor switches; give it one of them")
        for other in switch.switches:
            if other not in switches:
                raise FabricFileError(f"switches.{name}: there is no switch {other!r} in this file")
        own = frozenset() if switch.nodes is None else lists.expand(f"switches.{name}.nodes", switch.nodes)
        below[name] = own
    for name in _children_first(switches):
        below[name] = below[name].union(*(below[other] for other in switches[name].switches))
    for name, switch in switches.items():
        uplink = None
        if switch.gbit_per_s is not None:
            uplink = Link(tiers.link(Level.LEAF).latency, _bytes_per_s(switch.gbit_per_s))
        yield NodeSet(below[name], name, uplink=uplink)


def _children_first(switches: Mapping[str, _Switch]) -> list[str]:
    """The names, each after all switches below it.

    Raises:
        FabricFileError: a switch is below itself.
    """
    try:
        return list(TopologicalSorter({name: switch.switches for name, switch in switches.items()}).static_order())
    except CycleError as error:
        loop = " → ".join(error.args[1][:8])
        raise FabricFileError(f"switches form a loop: {loop}; a switch can't be below itself") from None


def _details(file: _FabricFile, lists: _NodeLists, tiers: Tiers) -> Iterable[Node]:
    rack = _name_of_node("racks", file.racks, lists)
    power_feed = _name_of_node("power_feeds", file.power_feeds, lists)
    keys: dict[str, _Nodes] = {}
    for index, part in enumerate(file.nodes):
        key = f"nodes[{index}]"
        _check_gpus(key, part)
        names = lists.expand(f"{key}.nodes", part.nodes)
        if twice := names & keys.keys():
            raise FabricFileError(f"{key}: node {min(twice)} is described twice")
        keys |= dict.fromkeys(names, part)
    gpu_link = tiers.link(Level.NODE)
    everybody = lists.known if gpu_link != GPU_LINK else {*rack, *power_feed, *keys}
    for name in sorted(everybody):
        part = keys.get(name) or _Nodes(nodes=name)
        uplink = None
        if part.gbit_per_s is not None:
            uplink = Link(tiers.link(Level.LEAF).latency, _bytes_per_s(part.gbit_per_s))
        yield Node(
            name,
            gpus=part.gpus,
            sockets=part.sockets,
            nics=tuple(Nic(nic.name, nic.gpus) for nic in part.nics),
            gpu_link=gpu_link,
            uplink=uplink,
            rack=rack.get(name, ""),
            power_feed=power_feed.get(name, ""),
        )


def _check_gpus(key: str, part: _Nodes) -> None:
    if part.sockets and len(part.sockets) != part.gpus:
        raise FabricFileError(
            f"{key}: {counted(len(part.sockets), 'socket')} for {counted(part.gpus, 'GPU')}: give one for each GPU"
        )
    for nic in part.nics:
        if strange := [gpu for gpu in nic.gpus if gpu >= part.gpus]:
            raise FabricFileError(
                f"{key}: {nic.name} is near GPU {strange[0]}, and the node has {counted(part.gpus, 'GPU')}"
            )


def _name_of_node(table: str, groups: Mapping[str, str], lists: _NodeLists) -> dict[str, str]:
    """The rack (or power feed) of each node."""
    found: dict[str, str] = {}
    for name, text in groups.items():
        nodes = lists.expand(f"{table}.{name}", text)
        if twice := nodes & found.keys():
            node = min(twice)
            raise FabricFileError(f"{table}: node {node} is in {found[node]} and in {name}; it can be in one only")
        found |= dict.fromkeys(nodes, name)
    return found


def _bytes_per_s(gbit_per_s: float) -> float:
    return gbit_per_s * 1e9 / _BITS_OF_BYTE


def _lists_as_tuples(value: Any) -> Any:
    """TOML has lists where the model has tuples, and strict models tell them apart."""
    if isinstance(value, list):
        return tuple(map(_lists_as_tuples, value))
    if isinstance(value, Mapping):
        return {key: _lists_as_tuples(part) for key, part in value.items()}
    return value


def _words(error: ValidationError) -> str:
    """The first fault in words, and how many others there are."""
    faults = error.errors(include_input=False, include_url=False)
    where = "".join(_key(part) for part in faults[0]["loc"] if part != "[key]").removeprefix(".")
    others = f" ({len(faults) - 1} other keys are wrong, too)" if len(faults) > 1 else ""
    if faults[0]["type"] == "extra_forbidden":
        near = get_close_matches(where, _FabricFile.model_fields, 1)
        return f"{where}: there is no such key{'; did you mean ' + near[0] + '?' if near else ''}{others}"
    limits = faults[0].get("ctx", {})
    right = _RIGHT.get(faults[0]["type"], "").format_map({name: limits[name] for name in limits})
    return f"{where}: {right or faults[0]['msg']}{others}"


_RIGHT = {
    "greater_than": "must be more than {gt:.15g}",
    "greater_than_equal": "must be {ge:.15g} or more",
    "less_than_equal": "must be {le:.15g} or less",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "string_type": "must be a text",
    "string_pattern_mismatch": "must be letters, digits and _ . : -",
    "string_too_short": "must not be empty",
    "bool_type": "must be true or false",
}
"""What would be right, by pydantic's name of the fault."""


def _key(part: str | int) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part[:80]}" if part.isprintable() else f".{part[:80]!r}"
