"""The picture of the job's nodes in the network: a block for each leaf, a cell for each node, faults as marks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle

from muster.launcher.report.picture import axes_of, colour, svg_of, words
from muster.launcher.report.report_data import Leaf, PlacedNode
from muster.wording import counted

_LOOKS: Final = {"ranks": ("start", ""), "spare": ("paper", ""), "out": ("queue", "xxxx")}
ROLES: Final = {"ranks": "carries ranks", "spare": "stands by", "out": "has left the job"}
"""What each kind of cell means."""
_MOST_COLUMNS: Final = 32
_NAMED_COLUMNS: Final = 12
"""Up to so many cells side by side, the name of each node and its ranks fit into its cell."""
_MOST_NAMED: Final = 64
"""Up to so many nodes, the picture is that wide and has names."""


def fabric_map(leaves: tuple[Leaf, ...]) -> str:
    """The picture as SVG."""
    placed, columns, rows = _laid_out(leaves)
    is_named = columns <= _NAMED_COLUMNS
    cell = 0.42 if is_named else 0.24
    axes = axes_of(0.5 + cell * (rows + 0.2), left=0.01, below=0.1, right=0.01, above=0.38)
    axes.set_xlim(0, max(columns, 6))
    axes.set_ylim(rows + 0.1, -0.1)
    axes.set_axis_off()
    _cells(axes, [node for _, nodes in placed for node in nodes])
    for (leaf, left, top), nodes in placed:
        axes.text(
            left + 0.03, top + 0.62, words(leaf, 24 if is_named else 12), size=8, va="center", color=colour("muted")
        )
        for node, x, y in nodes:
            _label(axes, node, x, y, is_named)
    _legend(axes)
    count = sum(len(leaf.nodes) for leaf in leaves)
    struck = sum(bool(node.faults) for leaf in leaves for node in leaf.nodes)
    said = f"{counted(count, 'node')} in {counted(len(leaves), 'leaf', 'leaves')}; faults on {struck} of them."
    return svg_of(axes, "fabric", "Ranks and faults on the network", said)


_Placed = tuple[tuple[str, float, float], list[tuple[PlacedNode, float, float]]]


def _laid_out(leaves: tuple[Leaf, ...]) -> tuple[list[_Placed], int, int]:
    """Each leaf with its place, each node with its cell; and how many columns and rows there are."""
    widest = max((len(leaf.nodes) for leaf in leaves), default=1)
    width = min(widest, 8)
    most = _NAMED_COLUMNS if sum(len(leaf.nodes) for leaf in leaves) <= _MOST_NAMED else _MOST_COLUMNS
    beside = max(1, min(len(leaves), (most + 1) // (width + 1)))
    found, top, tallest = list[_Placed](), 0, 0
    for number, leaf in enumerate(leaves):
        if number and number % beside == 0:
            top, tallest = top + tallest, 0
        left = number % beside * (width + 1)
        cells = [(node, left + at % width, top + 1 + at // width) for at, node in enumerate(leaf.nodes)]
        tallest = max(tallest, 1 + (len(leaf.nodes) + width - 1) // width)
        found.append(((leaf.name, left, top), [(node, float(x), float(y)) for node, x, y in cells]))
    return found, beside * (width + 1) - 1, top + tallest


def _cells(axes: Axes, nodes: list[tuple[PlacedNode, float, float]]) -> None:
    for role, (look, hatch) in _LOOKS.items():
        cells = [Rectangle((x + 0.03, y + 0.04), 0.94, 0.92) for node, x, y in nodes if node.role == role]
        if cells:
            axes.add_collection(
                PatchCollection(cells, facecolor=colour(look), edgecolor=colour("ink"), linewidth=0.6, hatch=hatch,
                                linestyle=":" if role == "spare" else "-")
            )  # fmt: skip


def _label(axes: Axes, node: PlacedNode, x: float, y: float, is_named: bool) -> None:
    behind = {"facecolor": colour("paper"), "edgecolor": "none", "pad": 0.8} if node.role == "out" else None
    if is_named:
        ranks = _range(node)
        axes.text(x + 0.5, y + 0.34, words(node.name, 12), size=8, ha="center", va="center", bbox=behind)
        axes.text(x + 0.5, y + 0.72, ranks or node.role, size=7.5, ha="center", va="center", bbox=behind)
    if node.faults:
        axes.plot(x + 0.88, y + 0.14, marker="v", markersize=7, color=colour("bad"), clip_on=False)
        most = 3 if is_named else 1
        numbers = ",".join(map(str, node.faults[:most])) + "…" * (len(node.faults) > most)
        axes.text(x + 0.8, y + 0.14, numbers, size=7.5, weight="bold", ha="right", va="center",
                  bbox={"facecolor": colour("paper"), "edgecolor": "none", "pad": 0.5})  # fmt: skip


def _range(node: PlacedNode) -> str:
    if node.ranks is None:
        return ""
    first, last = node.ranks
    return f"rank {first}" if first == last else f"{first} to {last}"


def _legend(axes: Axes) -> None:
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=colour(look), edgecolor=colour("ink"), linewidth=0.6, hatch=hatch,
                  linestyle=":" if role == "spare" else "-")
        for role, (look, hatch) in _LOOKS.items()
    ]  # fmt: skip
    marks = axes.plot([], [], linestyle="none", marker="v", markersize=7, color=colour("bad"))
    axes.legend([*handles, *marks], [*ROLES.values(), "fault, with its number"], loc="lower left",
                bbox_to_anchor=(0, 1.0), ncols=4, frameon=False, borderaxespad=0)  # fmt: skip


def rows(leaves: tuple[Leaf, ...]) -> Iterator[tuple[str, str, str, str, str]]:
    """Leaf, node, what it does, its ranks, its faults: the same for the table."""
    for leaf in leaves:
        for node in leaf.nodes:
            yield leaf.name, node.name, ROLES[node.role], _range(node), ", ".join(map(str, node.faults))
