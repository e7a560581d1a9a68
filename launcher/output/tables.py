"""Formats gangs, nodes and recoveries as tables for the user. Pure: it takes views and returns text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster.daemon.host import rank_log_files
from muster.daemon.host.plain_text import plain
from muster.launcher.output.check_tables import CHECK_TITLES, check_cells
from muster.launcher.output.checkpoint_lines import checkpoint_lines
from muster.v1.api_pb2 import ExclusionView, GangView, NodeView, RankView, RecoveryView

_COLOURS = {
    "FIT": "green",
    "SUSPECT": "yellow",
    "UNHEARD": "yellow",
    "DEGRADED": "yellow",
    "RETURNING": "cyan",
    "UNFIT": "red",
    "HUNG": "red",
    "LOST": "red",
    "RUNNING": "green",
    "DONE": "green",
    "RECOVERING": "yellow",
    "DRAINING": "yellow",
    "FAILED": "red",
    "CANCELLED": "red",
}
_PRESENCE = {"here": "green", "away": "red"}
_MAX_RANK_ROWS = 64
"""A larger gang shows only the ranks that are not running."""

STRAGGLERS_SHOWN = 8
"""The slowest stragglers that the summary of a gang names."""


def gang_details(view: GangView) -> RenderableType:
    """All details of one gang."""
    parts: list[RenderableType] = [_summary_table(view)]
    if view.nodes:
        parts.append(node_table(view.nodes, view.ranks))
    if not view.final:
        parts.extend(_rank_lines(view.ranks))
    if view.exclusions:
        parts.append(exclusion_table(view.exclusions))
    if view.recoveries:
        parts.append(recovery_table(view.recoveries))
    return Group(*parts)


def gang_list(views: Iterable[GangView]) -> Table:
    """One line for each gang."""
    table = _table("job", "name", "phase", "generation", "step", "committed", "recoveries", "")
    for view in views:
        jobs = " ".join(map(str, view.slurm_job_ids))
        _add_row(
            table,
            jobs,
            view.name,
            _coloured(view.phase),
            str(view.generation),
            str(view.step),
            _committed(view),
            str(len(view.recoveries)),
            view.reason if view.final else view.waiting_for,
        )
    return table


def _summary_table(view: GangView) -> Table:
    table = Table.grid(padding=(0, 2))
    jobs = " ".join(map(str, view.slurm_job_ids))
    _add_row(table, "job", f"{view.name} (Slurm job {jobs}, gang {view.gang_id})")
    phase = _coloured(view.phase)
    if view.final:
        phase.append(f", exit code {view.exit_code}")
    _add_row(table, "phase", phase)
    if view.reason:
        _add_row(table, "reason", view.reason)
    if view.waiting_for and not view.final:
        _add_row(table, "waits for", view.waiting_for)
    _add_row(table, "generation", str(view.generation))
    _add_row(table, "step", f"{view.step}, committed {_committed(view)}")
    for title, words in checkpoint_lines(view.checkpoint) if not view.final else ():
        _add_row(table, title, words)
    for declared, count in Counter(rank.declared_phase for rank in view.ranks if rank.declared_phase).items():
        _add_row(table, "declared", f"{declared}, by {count} of {len(view.ranks)} ranks: hangs are not detected")
    for rank in sorted(view.ranks, key=lambda rank: -rank.slower_by)[:STRAGGLERS_SHOWN]:
        if rank.slower_by:
            pace = f"computes {rank.slower_by:.0%} longer than the median rank in each step"
            _add_row(table, "straggler", f"rank {rank.rank} on {rank.node} {pace}, and the others wait for it")
    if view.replicas_disagree:
        _add_row(table, "corruption", view.replicas_disagree)
    if view.wider_groups and not view.final:
        _add_row(table, "placement", f"wider than asked: {view.wider_groups}")
    if view.not_finite:
        _add_row(table, "not finite", view.not_finite)
    _add_row(table, "nodes", _role_counts(view))
    _add_row(table, "logs", f"{rank_log_files.log_folder(view.run_dir, view.gang_id)}/g{view.generation}")
    return table


def _role_counts(view: GangView) -> str:
    roles = [node.role for node in view.nodes]
    text = f"{roles.count('rank')} with ranks, {roles.count('spare')} spare"
    return text + (f", {roles.count('out')} out" if "out" in roles else "")


def _committed(view: GangView) -> str:
    if not view.committed.generation:
        return "none"
    return f"step {view.committed.step} (generation {view.committed.generation})"


def node_table(nodes: Iterable[NodeView], ranks: Iterable[RankView]) -> Table:
    """One line for each node of a gang, with its role."""
    places: dict[str, list[str]] = {}
    for rank in ranks:
        places.setdefault(rank.node, []).append(str(rank.rank))
    table = _table("node", "verdict", "role", "ranks", "agent", "warm", "musterd", "heard", "leaf", "why")
    for node in nodes:
        _add_row(
            table,
            node.node,
            _coloured(node.verdict),
            node.role,
            _rank_range(places.get(node.node, ())),
            _attached(node.agent_attached),
            str(node.warm),
            _attached(node.musterd_attached),
            f"{node.heard_s_ago:.1f} s ago" if node.heard_s_ago >= 0 else "never",
            node.leaf,
            node.reason,
        )
    return table


def node_lines(nodes: Sequence[NodeView], paint: Callable[[Text], str], *, verbose: bool = False) -> Iterator[str]:
    """One line for each node of the site, below a title line. `paint` converts a coloured word to terminal output.
    `verbose`: show what the newest node check has found, too.

    This is not a rich table: rich takes 15 s for 12,500 nodes, these lines take less than a second.
    """
    titles = ("node", "verdict", "job", "musterd", "heard", "leaf", "why")
    rows = [titles, *map(_node_row, nodes)]
    if verbose:
        checks = [CHECK_TITLES, *map(check_cells, nodes)]
        rows = [row[:-1] + cells + row[-1:] for row, cells in zip(rows, checks, strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    colours = {word: _COLOURS.get(word) or _PRESENCE.get(word, "") for row in rows[1:] for word in (row[1], row[3])}
    painted = {word: paint(Text(word, colour)) for word, colour in colours.items()}
    for row in rows:
        cells = (painted.get(cell, cell) + " " * (width - len(cell)) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _node_row(node: NodeView) -> tuple[str, ...]:
    heard = "never" if node.verdict == "UNHEARD" else "before the restart"  # of the coordinator
    if node.heard_s_ago >= 0:
        heard = f"{node.heard_s_ago:.1f} s ago"
    jobs = " ".join(map(str, node.slurm_job_ids))
    presence = _attached(node.musterd_attached).plain
    lemon = f"a lemon: {node.failures} failures within 30 days" if node.lemon else ""
    why = "; ".join(filter(None, (lemon, node.reason)))
    return tuple(map(plain, (node.node, node.verdict, jobs, presence, heard, node.leaf, why)))


def exclusion_table(exclusions: Iterable[ExclusionView]) -> Table:
    """One line for each node on which the job does not start again."""
    table = _table("excluded node", "since", "until", "why")
    for one in exclusions:
        until = _clock_time(one.until_s) if one.until_s else "its repair"
        _add_row(table, one.node, _clock_time(one.at_s), until, one.reason)
    return table


def _clock_time(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _rank_range(ranks: Iterable[str]) -> str:
    numbers = sorted(map(int, ranks))
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return " ".join(map(str, numbers))


def _attached(attached: bool) -> Text:
    word = "here" if attached else "away"
    return Text(word, _PRESENCE[word])


def _rank_lines(ranks: Iterable[RankView]) -> list[RenderableType]:
    every = list(ranks)
    odd = [rank for rank in every if rank.state != "running"]
    shown = every if len(every) <= _MAX_RANK_ROWS else odd
    if not shown:
        return []
    table = _table("rank", "node", "state", "step")
    for rank in shown:
        state = f"exited with {rank.exit_code}" if rank.state == "exited" else rank.state
        _add_row(table, str(rank.rank), rank.node, state, str(rank.step))
    return [table]


def recovery_table(recoveries: Iterable[RecoveryView]) -> Table:
    """One line for each recovery. The times are seconds since the fault was suspected."""
    table = _table("generation", "action", "cause", "out", "in", "when", "detected", "fenced", "started", "first step",
                   "steps")  # fmt: skip
    for recovery in recoveries:
        since = recovery.suspected_s or recovery.detected_s
        phases = (recovery.detected_s, recovery.fenced_s, recovery.started_s, recovery.first_step_s)
        _add_row(
            table,
            str(recovery.generation),
            recovery.action,
            recovery.cause,
            " ".join(recovery.nodes_out),
            " ".join(recovery.nodes_in),
            time.strftime("%H:%M:%S", time.localtime(since)) if since else "",
            *(f"{at - since:.2f} s" if at else "" for at in phases),
            f"{recovery.step_before} to {recovery.step_restored}",
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _add_row(table: Table, *cells: str | Text) -> None:
    """Adds a row. A text reaches a table in no other way: rich passes escapes on to the terminal."""
    table.add_row(*(plain(cell) if isinstance(cell, str) else cell for cell in cells))


def _coloured(word: str) -> Text:
    return Text(plain(word), _COLOURS.get(word.upper(), ""))
