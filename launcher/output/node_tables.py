"""Formats the roll call, every node of the site, and the history of one node. Pure: it takes views and yields lines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from muster.launcher.output.check_tables import CHECK_TITLES, check_cells
from muster.launcher.output.screen import Screen
from muster.launcher.output.table import Coloured, Row, table
from muster.node_health import OUT_OF_SERVICE, NodeHealth
from muster.v1.api_pb2 import NodeHistoryReply, NodeView
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
_SERIOUS = ("LOST", "HUNG", "UNFIT", "RETURNING", "DEGRADED", "SUSPECT", "UNHEARD", "FIT")


def _by_name(node: NodeView) -> tuple[int, str]:
    return len(node.node), node.node


SORTS: dict[str, Callable[[NodeView], Any]] = {
    "node": _by_name,
    "state": lambda node: (_SERIOUS.index(node.verdict) if node.verdict in _SERIOUS else -1, _by_name(node)),
    "since": lambda node: (-node.verdict_since_s, _by_name(node)),
    "leaf": lambda node: (node.leaf, _by_name(node)),
    "job": lambda node: (not node.slurm_job_ids, list(node.slurm_job_ids), _by_name(node)),
    "heard": lambda node: (-node.heard_s_ago if node.heard_s_ago >= 0 else -float("inf"), _by_name(node)),
    "failures": lambda node: (-node.failures, _by_name(node)),
}
"""The orders in which nodes are listed: what needs a look stands first."""


@dataclass(frozen=True, slots=True)
class NodeFilter:
    """Which nodes are listed; what is empty excludes none. `signal`: words of a signal that holds, or of the
    reason. `jobs`: they hold the node."""

    states: Sequence[str] = ()
    signal: str = ""
    leaf: str = ""
    jobs: Collection[int] = ()

    def includes(self, node: NodeView) -> bool:
        """The node is listed."""
        words = " ".join((*node.signals, node.reason)).lower()
        return (
            (not self.states or node.verdict in self.states)
            and self.signal.lower() in words
            and self.leaf in ("", node.leaf)
            and (not self.jobs or any(job in self.jobs for job in node.slurm_job_ids))
        )


def node_lines(nodes: Sequence[NodeView], screen: Screen, *, verbose: bool = False) -> Iterator[str]:
    """One record for each node of the site. `verbose`: show what the newest node check has found, and what drivers said
    that was not understood, too."""
    titles: tuple[str, ...] = (
        "node", "verdict", "job", "role", screen.titled("since"), "musterd", "heard", "leaf", "why",
    )  # fmt: skip
    rows = [_node_row(node, screen, _driver_words(node) if verbose else "") for node in nodes]
    if verbose:
        titles = (*titles[:-1], CHECK_TITLES[0], screen.titled(CHECK_TITLES[1]), *CHECK_TITLES[2:], titles[-1])
        rows = [(*row[:-1], *check_cells(node, screen), row[-1]) for row, node in zip(rows, nodes, strict=True)]
    return table(screen, titles, rows)


def history_lines(reply: NodeHistoryReply, screen: Screen) -> Iterator[str]:
    """What is to be said of the node now, then its records, the newest first."""
    yield from node_lines([reply.node], screen)
    yield from filter(None, [_driver_words(reply.node)])
    yield ""
    rows = [(screen.time(record.at_s), record.gang_id, record.text) for record in reply.records]
    yield from table(screen, (screen.titled("time"), "gang", "what"), rows)


def _node_row(node: NodeView, screen: Screen, driver_words: str) -> Row:
    never = "never" if node.verdict == "UNHEARD" else "before the restart"  # of the coordinator
    why = "; ".join(filter(None, (lemon_words(node), node.reason, driver_words)))
    jobs = " ".join(map(str, node.slurm_job_ids))
    verdict = Coloured(node.verdict, COLOURS.get(node.verdict, ""))
    role = "" if node.role == "absent" else node.role
    since = screen.time(node.verdict_since_s)
    return node.node, verdict, jobs, role, since, attached(node.musterd_attached), heard(node, never), node.leaf, why


def _driver_words(node: NodeView) -> str:
    """How many lines of drivers were not understood; empty: none."""
    if not node.driver_lines:
        return ""
    lines = counted(node.driver_lines, "line of a driver in trouble is", "lines of drivers in trouble are")
    return f"{lines} not understood" + (f", the newest: {node.newest_driver_line}" if node.newest_driver_line else "")


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
