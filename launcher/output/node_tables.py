"""Formats the roll call: every node of the site. Pure: it takes views and yields lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from muster.launcher.output.check_tables import CHECK_TITLES, check_cells
from muster.launcher.output.screen import Screen
from muster.launcher.output.table import Coloured, Row, table
from muster.node_health import OUT_OF_SERVICE, NodeHealth
from muster.v1.api_pb2 import NodeView
from muster.wording import counted

COLOURS: dict[str, str] = {
    **{health: "red" if health in OUT_OF_SERVICE else "yellow" for health in NodeHealth},
    NodeHealth.FIT: "green",
    NodeHealth.RETURNING: "cyan",
    "UNHEARD": "yellow",
    "RUNNING": "green",
    "DONE": "green",
    "RECOVERING": "yellow",
    "DRAINING": "yellow",
    "FAILED": "red",
    "CANCELLED": "red",
}
_PRESENCE = {"here": "green", "away": "red"}


def node_lines(nodes: Sequence[NodeView], screen: Screen, *, verbose: bool = False) -> Iterator[str]:
    """One record for each node of the site. `verbose`: show what the newest node check has found, too."""
    titles: tuple[str, ...] = ("node", "verdict", "job", "musterd", "heard", "leaf", "why")
    rows = list(map(_node_row, nodes))
    if verbose:
        titles = (*titles[:-1], CHECK_TITLES[0], screen.titled(CHECK_TITLES[1]), *CHECK_TITLES[2:], titles[-1])
        rows = [(*row[:-1], *check_cells(node, screen), row[-1]) for row, node in zip(rows, nodes, strict=True)]
    return table(screen, titles, rows)


def _node_row(node: NodeView) -> Row:
    never = "never" if node.verdict == "UNHEARD" else "before the restart"  # of the coordinator
    why = "; ".join(filter(None, (lemon_words(node), node.reason)))
    jobs = " ".join(map(str, node.slurm_job_ids))
    verdict = Coloured(node.verdict, COLOURS.get(node.verdict, ""))
    return node.node, verdict, jobs, attached(node.musterd_attached), heard(node, never), node.leaf, why


def lemon_words(node: NodeView) -> str:
    """How often the node has failed; empty: it is no lemon."""
    return f"a lemon: {counted(node.failures, 'failure')} within 30 days" if node.lemon else ""


def heard(node: NodeView, never: str) -> str:
    """When something of the node was heard. `never`: the word for nothing since the coordinator's start."""
    return f"{node.heard_s_ago:.1f} s ago" if node.heard_s_ago >= 0 else never


def attached(is_attached: bool) -> Coloured:
    """Whether a process of the node has its stream open."""
    word = "here" if is_attached else "away"
    return Coloured(word, _PRESENCE[word])
