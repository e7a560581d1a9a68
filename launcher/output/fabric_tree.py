"""Draws a fabric as a tree, with the state of each node and the jobs on it. Pure: it returns text or JSON.

Nodes of one domain with the same state and the same jobs share a line, so that a site of 12,500 nodes fits a screen.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from muster.daemon.host.plain_text import plain
from muster.fabric.model.domain import Domain
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.link import Link
from muster.fabric.model.node import natural_order
from muster.launcher.output.screen import Screen
from muster.wording import counted

ABSENT = "ABSENT"
"""The state of a node that the topology has and Slurm has not."""
_BRANCH, _LAST, _PIPE, _BLANK = "├─ ", "└─ ", "│  ", "   "
_COLOURS = (
    ("red", ("DOWN", "ERROR", ABSENT, "FAIL", "NOT_RESPONDING", "INVALID", "INVALID_REG")),
    ("yellow", ("DRAIN", "MAINTENANCE", "RESERVED", "POWERED_DOWN", "POWERING_DOWN", "REBOOT_ISSUED", "UNKNOWN")),
    ("cyan", ("ALLOCATED", "MIXED", "COMPLETING")),
    ("green", ("IDLE",)),
)
"""Colour -> the words of states that have it; the first colour wins."""


@dataclass(frozen=True, slots=True)
class JobUse:
    """A job that holds a node."""

    id: int
    name: str
    user: str

    def __str__(self) -> str:
        """For the tree."""
        return f"{self.id} ({self.name}, {self.user})"


@dataclass(frozen=True, slots=True)
class NodeUse:
    """What Slurm says of one node."""

    states: tuple[str, ...] = (ABSENT,)
    """The base state, then the flags, in Slurm's words."""
    jobs: tuple[JobUse, ...] = ()
    """The jobs on it."""
    reason: str = ""
    """Why it is drained or down."""


@dataclass(frozen=True, slots=True)
class FabricPicture:
    """One topology with all that is shown of it."""

    fabric: Fabric
    uses: Mapping[str, NodeUse]
    """By node. A node that is missing here is absent."""
    kind: str = ""
    """The name of Slurm's plugin: "tree"."""
    name: str = ""
    partitions: tuple[str, ...] = ()
    """The partitions that name this topology."""
    default: bool = True
    """Whether partitions that name no topology use this one."""
    warnings: tuple[str, ...] = ()
    collapse: Callable[[Iterable[str]], str] = field(default=",".join)
    """Writes many names in a short form."""

    def use(self, node: str) -> NodeUse:
        """What is known of `node`."""
        return self.uses.get(node) or NodeUse()


def tree_lines(picture: FabricPicture, screen: Screen, *, verbose: bool = False) -> Iterator[str]:
    """The tree, the root first. `verbose`: a line for each node."""
    root = picture.fabric.root
    yield from screen.sentence(_title(picture))
    yield from screen.sentence(_domain_line(picture, root), "", _PIPE)
    yield from _below(picture, root, "", screen, verbose)


def _title(picture: FabricPicture) -> str:
    if not picture.name:
        return f"topology/{picture.kind}"
    words = [picture.kind, *(["the default"] if picture.default else [])]
    words += [f"partition {name}" for name in picture.partitions]
    return plain(f"topology {picture.name} ({', '.join(words)})")


def _below(picture: FabricPicture, domain: Domain, indent: str, screen: Screen, verbose: bool) -> Iterator[str]:
    rows = _node_rows(picture, domain, verbose)
    last = len(rows) + len(domain.children) - 1
    for at, (names, use, uplink) in enumerate(rows):
        lines = screen.sentence(_node_line(names, use, uplink), *_branches(indent, at == last))
        yield from _with_state(lines, use, screen)
    for at, child in enumerate(domain.children, len(rows)):
        first, rest = _branches(indent, at == last)
        yield from screen.sentence(_domain_line(picture, child), first, rest + _PIPE)
        yield from _below(picture, child, rest, screen, verbose)


def _branches(indent: str, is_last: bool) -> tuple[str, str]:
    """What stands before the first line of an entry, and before the others."""
    return indent + (_LAST if is_last else _BRANCH), indent + (_BLANK if is_last else _PIPE)


def _with_state(lines: Iterable[str], use: NodeUse, screen: Screen) -> Iterator[str]:
    """The lines of a node, with the colour of its state."""
    state = _state(use)
    colour = next((colour for colour, words in _COLOURS if set(words) & set(use.states)), "")
    is_painted = False
    for line in lines:
        found = None if is_painted else re.search(rf"(?<!\S){re.escape(state)}(?!\S)", line)
        is_painted |= found is not None
        yield line[: found.start()] + screen.paint(state, colour) + line[found.end() :] if found else line


def _node_rows(picture: FabricPicture, domain: Domain, verbose: bool) -> list[tuple[str, NodeUse, Link | None]]:
    """Short lists of the nodes attached to `domain`, each with what Slurm says of all of them and the link that they
    have if it is not the tier's, in natural order."""
    nodes = sorted(domain.own_nodes, key=natural_order)
    fabric = picture.fabric
    if verbose:
        return [(_in_full(picture, domain, node), picture.use(node), fabric.node(node).uplink) for node in nodes]
    alike: dict[tuple[NodeUse, Link | None], list[str]] = {}
    for node in nodes:
        alike.setdefault((picture.use(node), fabric.node(node).uplink), []).append(node)
    return [(picture.collapse(names), use, uplink) for (use, uplink), names in alike.items()]


def _in_full(picture: FabricPicture, domain: Domain, name: str) -> str:
    """The node with its place: in a ring or torus, in a rack, at a power feed."""
    node = picture.fabric.node(name)
    rack = f"  rack {node.rack}" if node.rack else ""
    return f"{name}{_position(domain, name)}{rack}" + (f"  power feed {node.power_feed}" if node.power_feed else "")


def _position(domain: Domain, node: str) -> str:
    return f" at {','.join(map(str, domain.grid.coordinates(node)))}" if domain.grid else ""


def _domain_line(picture: FabricPicture, domain: Domain) -> str:
    words = [word for word in (domain.name, domain.level.word) if word]
    if domain.grid:
        shape = "x".join(map(str, domain.grid.dimensions))
        words.append(f"ring of {shape}" if len(domain.grid.dimensions) == 1 else f"torus of {shape}")
    count = Counter(_summary(picture.use(node)) for node in domain.nodes)
    words.append(
        f"{counted(len(domain.nodes), 'node')}: " + ", ".join(f"{n} {word}" for word, n in sorted(count.items()))
    )
    words.append(_link_words(domain.link))
    if domain.oversubscription > 1:
        words.append(f"{domain.oversubscription:g}:1")
    if domain.uplink:
        words.append(f"its uplink {_link_words(domain.uplink)}")
    return plain("  ".join(words))


def _summary(use: NodeUse) -> str:
    """One word for a count: what an operator asks first."""
    for word, states in (
        ("absent", {ABSENT}),
        ("down", {"DOWN", "ERROR", "NOT_RESPONDING", "FAIL", "INVALID_REG"}),
        ("drained", {"DRAIN"}),
        ("in use", {"ALLOCATED", "MIXED", "COMPLETING"}),
    ):
        if states & set(use.states):
            return word
    return "idle" if use.states == ("IDLE",) else "other"


def _node_line(names: str, use: NodeUse, uplink: Link | None) -> str:
    words = [names, _state(use)]
    if use.jobs:
        words.append("job " + ", ".join(map(str, use.jobs)))
    if use.reason:
        words.append(use.reason)
    if uplink:
        words.append(f"its link {_link_words(uplink)}")
    return plain("  ".join(words))


def _state(use: NodeUse) -> str:
    return plain("+".join(use.states))


def _link_words(link: Link) -> str:
    return f"{link.bandwidth / 1e9:g} GB/s, {link.latency * 1e6:g} µs"


def to_dict(picture: FabricPicture) -> dict[str, object]:
    """The same for scripts. `nodes` of a domain are attached to it; `all_nodes` is the short form of all below."""
    return {
        "name": picture.name,
        "kind": picture.kind,
        "default": picture.default,
        "partitions": list(picture.partitions),
        "warnings": list(picture.warnings),
        "root": _domain_dict(picture, picture.fabric.root),
    }


def _domain_dict(picture: FabricPicture, domain: Domain) -> dict[str, object]:
    found: dict[str, object] = {
        "level": domain.level.word,
        "name": domain.name,
        "node_count": len(domain.nodes),
        "all_nodes": picture.collapse(domain.nodes),
        "link": _link_dict(domain.link),
        "oversubscription": domain.oversubscription,
        "uplink": _link_dict(domain.uplink) if domain.uplink else None,
        "dimensions": list(domain.grid.dimensions) if domain.grid else None,
        "nodes": [_node_dict(picture, domain, node) for node in sorted(domain.own_nodes, key=natural_order)],
        "domains": [_domain_dict(picture, child) for child in domain.children],
    }
    return found


def _node_dict(picture: FabricPicture, domain: Domain, name: str) -> dict[str, object]:
    node, use = picture.fabric.node(name), picture.use(name)
    return {
        "node": name,
        "states": list(use.states),
        "jobs": [asdict(job) for job in use.jobs],
        "reason": use.reason,
        "gpus": node.gpus,
        "nics": [nic.name for nic in node.nics],
        "rack": node.rack,
        "power_feed": node.power_feed,
        "uplink": _link_dict(node.uplink) if node.uplink else None,
        "coordinates": list(domain.grid.coordinates(name)) if domain.grid else None,
    }


def _link_dict(link: Link) -> dict[str, float]:
    return {"latency_s": link.latency, "bandwidth_bytes_per_s": link.bandwidth}
