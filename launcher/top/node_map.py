"""Nodes as a map on the topology: a letter for each node, by leaf and pod; or, of a large site, a number for each leaf:
how many of its nodes are in trouble, a digit or + for more. Pure.

    r  has ranks of a job        S  SUSPECT, it is probed      H  HUNG
    s  is a spare of a job       D  DEGRADED, it works on      L  LOST
    u  is used by another job    U  UNFIT, out of service      R  RETURNING, drained
    .  is free                   ?  UNHEARD, without musterd

A capital letter is the health of a node that is not FIT, a small one the role of a node that is. So each letter can be
read without a colour. 512 nodes fit a terminal of 80 columns and 24 lines as letters, 12,500 nodes as leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from muster.launcher.output.node_tables import COLOURS
from muster.launcher.output.table import Coloured
from muster.launcher.top.cells import BOLD, MARKED, Line, fit, line
from muster.launcher.top.job_page import node_words
from muster.v1.api_pb2 import NodeView
from muster.wording import counted

_TROUBLE: Final = {
    "SUSPECT": "S", "DEGRADED": "D", "UNFIT": "U", "HUNG": "H", "LOST": "L", "RETURNING": "R", "UNHEARD": "?",
}  # fmt: skip
_ROLES: Final = {"rank": "r", "spare": "s"}
_LETTERS_MOST = 1024
"""Nodes of the largest map with a letter for each. A larger one shows leaves."""
_NO_LEAF = "no leaf"
_LEAF_CHARS = 10
"""Of the name of a leaf on a map of letters."""
_DIGIT_MOST = 9
"""Nodes in trouble that a leaf shows as a digit."""


@dataclass(frozen=True)
class Tile:
    """What the cursor can be on: a node, or a leaf."""

    key: str
    text: str
    colour: str
    words: str
    before: str = ""
    """What stands before it: the leaf's name before its first node."""


@dataclass(frozen=True)
class NodeMap:
    """The map: rows of tiles. Each row has the name of its pod, empty if it goes on with the pod of the row above."""

    rows: Sequence[tuple[str, Sequence[Tile]]]
    by_leaf: bool

    def draw(self, cursor: str | None, width: int, height: int) -> list[Line]:
        """As many rows as fit on `height` lines; with the one under the cursor."""
        if not self.rows:
            return [line("no nodes to show")]
        row, _ = self._at(cursor or "")
        first = max(0, min(row - height // 2, len(self.rows) - height))
        labels = max(len(label) for label, _ in self.rows)
        return [fit(self._row(at, cursor, labels), width) for at in range(first, min(first + height, len(self.rows)))]

    def _row(self, at: int, cursor: str | None, labels: int) -> Line:
        label, tiles = self.rows[at]
        here = any(tile.key == cursor for tile in tiles)
        cells = [Coloured(f"{'>' if here else ' '}{label:{labels}} ", BOLD)]
        for tile in tiles:
            style = f"{tile.colour} {MARKED}".strip() if tile.key == cursor else tile.colour
            cells += [Coloured(tile.before, BOLD), Coloured(tile.text, style)]
        return tuple(cell for cell in cells if cell.text)

    def move(self, cursor: str, across: int, down: int) -> str:
        """Where the cursor is after so many steps."""
        if not self.rows:
            return cursor
        row, column = self._at(cursor)
        if across:  # along the rows, as one reads
            keys = [tile.key for _, tiles in self.rows for tile in tiles]
            return keys[min(max(keys.index(self.rows[row][1][column].key) + across, 0), len(keys) - 1)]
        tiles = self.rows[min(max(row + down, 0), len(self.rows) - 1)][1]
        return tiles[min(column, len(tiles) - 1)].key

    def words(self, cursor: str) -> str:
        """All that is to be said of what is under the cursor."""
        if not self.rows:
            return ""
        row, column = self._at(cursor)
        return self.rows[row][1][column].words

    def _at(self, cursor: str) -> tuple[int, int]:
        places = (
            (row, at) for row, (_, tiles) in enumerate(self.rows) for at, tile in enumerate(tiles) if tile.key == cursor
        )
        return next(places, (0, 0))


def letter(node: NodeView) -> str:
    """The letter of a node. `role` is that in the job which the reader sees."""
    if found := _TROUBLE.get(node.verdict):
        return found
    return _ROLES.get(node.role) or ("u" if node.slurm_job_ids else ".")


def leaf_of(node: NodeView) -> str:
    """The name of its leaf, for people and for the cursor."""
    return node.leaf or _NO_LEAF


def legend(nodes: Iterable[NodeView]) -> str:
    """The letters that occur, with their counts."""
    words = {
        "r": "rank", "s": "spare", "u": "used", ".": "free", **{letter: word for word, letter in _TROUBLE.items()},
    }  # fmt: skip
    counts = Counter(map(letter, nodes))
    return "  ".join(f"{sign} {words[sign]} {counts[sign]:,}" for sign in words if counts[sign])


def node_map(nodes: Sequence[NodeView], jobs: Callable[[NodeView], str], width: int) -> NodeMap:
    """The map of `nodes`. `jobs`: what has each node, in a few words."""
    return (_letters if len(nodes) <= _LETTERS_MOST else _leaves)(nodes, jobs, width)


def _by_leaf(nodes: Iterable[NodeView]) -> dict[tuple[str, str], list[NodeView]]:
    """By pod and leaf. The pods, and the leaves of each pod, come in the order of their first nodes."""
    pods: dict[str, dict[str, list[NodeView]]] = {}
    for node in nodes:
        pods.setdefault(node.pod, {}).setdefault(leaf_of(node), []).append(node)
    return {(pod, leaf): own for pod, leaves in pods.items() for leaf, own in leaves.items()}


def _letters(nodes: Sequence[NodeView], jobs: Callable[[NodeView], str], width: int) -> NodeMap:
    """Leaves beside each other, as many as fit on a row."""
    groups = _by_leaf(nodes)
    label = max((len(_short(leaf)) for _, leaf in groups), default=0)
    free = width - max((len(pod) for pod, _ in groups), default=0) - 2
    room = max(8, free - label - 3)
    size = min(room, max(map(len, groups.values()), default=0))
    beside = max(1, free // (label + size + 3))
    pods: dict[str, list[list[Tile]]] = {}
    for (pod, leaf), own in groups.items():
        for at in range(0, len(own), size):
            name = f"  {'' if at else _short(leaf):>{label}} "
            tiles = [_node_tile(node, jobs) for node in own[at : at + size]]
            tiles[0] = replace(tiles[0], before=name)
            pods.setdefault(pod, []).append(tiles)
    rows = [
        (pod * (not at), _beside(blocks[at : at + beside], size))
        for pod, blocks in pods.items()
        for at in range(0, len(blocks), beside)
    ]
    return NodeMap(rows, False)


def _beside(blocks: Sequence[Sequence[Tile]], size: int) -> list[Tile]:
    """The tiles of blocks on one row, those of the second at the same column on each row."""
    tiles: list[Tile] = []
    missing = 0
    for first, *others in blocks:
        tiles += [replace(first, before=" " * missing + first.before), *others]
        missing = size - 1 - len(others)
    return tiles


def _short(leaf: str) -> str:
    """The end of a long name: switches of one tier differ there."""
    return leaf if len(leaf) <= _LEAF_CHARS else f"…{leaf[1 - _LEAF_CHARS :]}"


def _node_tile(node: NodeView, jobs: Callable[[NodeView], str]) -> Tile:
    return Tile(node.node, letter(node), _colour(node), node_words(node, jobs(node)))


def _colour(node: NodeView) -> str:
    if node.verdict != "FIT":
        return COLOURS.get(node.verdict, "")
    return {"rank": "green", "spare": "cyan"}.get(node.role, "")


def _leaves(nodes: Sequence[NodeView], jobs: Callable[[NodeView], str], width: int) -> NodeMap:
    """One leaf after the other, each pod's name before its first leaf."""
    rows: list[list[Tile]] = [[]]
    named, used = "", 1
    for (pod, leaf), own in _by_leaf(nodes).items():
        tile = _leaf_tile(pod, leaf, own, f" {pod} " if pod != named else " ")
        named, columns = pod, len(tile.before) + len(tile.text)
        if rows[-1] and used + columns > width - 1:
            rows.append([])
            used = 1
        rows[-1].append(tile)
        used += columns
    return NodeMap([("", row) for row in rows], True)


def _leaf_tile(pod: str, leaf: str, own: Sequence[NodeView], before: str) -> Tile:
    """The number of nodes in trouble: · for none, + for more than 9."""
    troubled = [node for node in own if node.verdict in _TROUBLE]
    worst = min((_colour(node) for node in troubled), key=("red", "yellow", "cyan", "").index, default="")
    count = len(troubled)
    text = "·" if not count else str(count) if count <= _DIGIT_MOST else "+"
    place = f"{leaf} in {pod}" if pod else leaf
    return Tile(leaf, text, worst, f"{place}: {counted(len(own), 'node')}: {legend(own)}", before)
