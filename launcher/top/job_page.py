"""One job: what it does, what it loses, what happens next; its ranks, recoveries, events and nodes as lists. Pure.

The lines about the whole job are those of `muster status`, cut to one line each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import islice

from muster.launcher.output import job_lines
from muster.launcher.output.checkpoint_lines import checkpoint_lines, newest_flush
from muster.launcher.output.job_lines import Moment
from muster.launcher.output.node_tables import COLOURS, heard, lemon_words
from muster.launcher.output.table import Cell, Coloured, Row
from muster.launcher.output.tables import colour
from muster.launcher.top.cells import Line, Listing, line, wrapped
from muster.launcher.top.known import Job
from muster.recovery_phases import RecoveryPhase
from muster.v1.api_pb2 import EventRecord, GangView, NodeView, RankView, RecoveryView
from muster.wording import duration

_STATE_COLOURS = {"running": "green", "starting": "yellow", "absent": "red", "exited": "red"}
_DAY_S = 86_400.0
_LABEL = 12
"""Columns of the label of a line about the whole job."""
_LONGER = frozenset({"reason", "waits for", "next", "values"})
"""Lines about the whole job that may take two."""
_UNUSUAL_SHOWN = 4
_RUNNING_NOW = frozenset({"restore", "no snapshots"})
"""Lines about checkpoints that say what goes on now."""


def clock_words(at_s: float, moment: Moment) -> str:
    """The time of the day, with the date if that is a day away; empty: `at_s` is 0."""
    if not at_s:
        return ""
    near = abs(moment.now - at_s) < _DAY_S
    return datetime.fromtimestamp(at_s, moment.screen.zone).strftime("%H:%M:%S" if near else "%m-%d %H:%M")


def title(view: GangView, moment: Moment) -> Line:
    """Which job this is, its generation, and its phase."""
    jobs = job_lines.job_ids(view)
    state = Coloured(job_lines.state_words(view, moment), colour(view.phase))
    return line(f"{view.name or view.gang_id} ({jobs})  generation {view.generation}  ", state)


def summary(job: Job, moment: Moment, width: int) -> list[Line]:
    """The lines above the lists. What is not known has no line."""
    lines = []
    for label, cell in _rows(job, moment):
        words, style = (cell.text, cell.colour) if isinstance(cell, Coloured) else (cell, "")
        most = 2 if label in _LONGER else 1
        for at, part in enumerate(wrapped(words, width - _LABEL, most)):
            lines.append(line(f"{'' if at else label:{_LABEL}}", *(Coloured(one.text, style) for one in part)))
    return lines


def _rows(job: Job, moment: Moment) -> Iterator[tuple[str, Cell]]:
    view = job.view
    if view.reason:
        yield "reason", view.reason
    if view.waiting_for and not view.final:
        yield "waits for", view.waiting_for
    yield from job_lines.time_lines(view, moment)
    if words := job_lines.next_words(view, moment):
        yield "next", words
    yield from job_lines.pace_lines(view, moment)
    yield from job_lines.use_lines(view)
    # The first clause: step and age.
    if ages := [f"{place}: {words.partition(';')[0]}" for place, words in job_lines.checkpoint_ages(view, moment)]:
        yield "checkpoint", "  ".join(ages)
    if words := job_lines.goodput_words(view):
        yield "goodput", words
    yield from islice(_unusual(job), _UNUSUAL_SHOWN)


def _unusual(job: Job) -> Iterator[tuple[str, Cell]]:
    view = job.view
    if not view.final:
        yield from ((label, words) for label, words in checkpoint_lines(view.checkpoint) if label in _RUNNING_NOW)
        yield from (("flush", words) for words in newest_flush(view.checkpoint))
    for node, words in job_lines.unwell(view.nodes):
        yield "not well", Coloured(f"{words}: {node.reason}" if node.reason else words, colour(node.verdict))
    yield from ((label, Coloured(words, "yellow")) for label, words in job.conditions)


def ranks_title(job: Job) -> str:
    """How many ranks are in which state."""
    counts = job.rank_states
    order = ("running", "starting", "absent", "exited", "slow")
    return ", ".join(f"{counts[word]:,} {word}" for word in order if counts[word]) or "none"


def ranks(job: Job) -> Listing[RankView]:
    """The ranks, the troubled first."""
    titles = ("rank", "state", "step", "slower by", "node", "gpu", "leaf", "declared")
    return Listing(titles, job.ranks, lambda rank: str(rank.rank), _rank_row, _rank_words, "no ranks so far")


def _rank_row(rank: RankView) -> Row:
    state = f"exited with {rank.exit_code}" if rank.state == "exited" else rank.state
    return (
        str(rank.rank),
        Coloured(state, "" if state == "exited with 0" else _STATE_COLOURS.get(rank.state, "")),
        str(rank.step),
        Coloured(f"{rank.slower_by:.0%}", "yellow") if rank.slower_by else "",
        rank.node,
        str(rank.gpu) if rank.HasField("gpu") else "",
        rank.leaf,
        rank.declared_phase,
    )


def _rank_words(rank: RankView) -> str:
    places = " ".join(f"{axis} {place}" for axis, place in sorted(rank.coordinates.items()))
    slow = f"it computes {rank.slower_by:.0%} longer than the median rank" if rank.slower_by else ""
    return "; ".join(filter(None, (f"rank {rank.rank} on {rank.node} (local rank {rank.local_rank})", places, slow)))


def recoveries(view: GangView, moment: Moment) -> Listing[RecoveryView]:
    """The recoveries, the newest first, with the time of each phase."""
    titles = ("gen", "at", "out", "in", "all", *(phase.words for phase in RecoveryPhase), "again", "action", "cause")

    def row(one: RecoveryView) -> Row:
        spent = job_lines.phases_of(one)
        again = one.step_before - one.step_restored if one.started_s else 0
        return (
            str(one.generation),
            clock_words(one.suspected_s or one.detected_s, moment),
            job_lines.short(one.nodes_out),
            job_lines.short(one.nodes_in),
            _all_phases(view, one),
            *(duration(spent[phase]) if phase in spent else "" for phase in RecoveryPhase),
            str(again) if again > 0 else "",
            one.action,
            one.cause,
        )

    newest_first = list(reversed(view.recoveries))
    return Listing(titles, newest_first, lambda one: str(one.generation), row, _recovery_words, "no recovery so far")


def _all_phases(view: GangView, one: RecoveryView) -> str:
    """How long a recovery took. Of a job that tells no steps, nobody knows the first one after it."""
    spent = job_lines.phases_of(one)
    if RecoveryPhase.FIRST_STEP in spent:
        return duration(sum(spent.values()))
    return "" if view.final or view.phase == "RUNNING" or one != view.recoveries[-1] else "under way"


def _recovery_words(one: RecoveryView) -> str:
    nodes = "".join(
        f", {word} {' '.join(names)}" for word, names in (("out", one.nodes_out), ("in", one.nodes_in)) if names
    )
    phases = "; ".join(filter(None, (one.cause, job_lines.recovery_phases(one))))
    return f"generation {one.generation}, {one.action}{nodes}: {phases}"


def newest_recovery(view: GangView, moment: Moment) -> str:
    """When the newest recovery was, and how long it took; empty: there was none."""
    if not view.recoveries:
        return ""
    one = view.recoveries[-1]
    return f"{clock_words(one.suspected_s or one.detected_s, moment)[:5]} {_all_phases(view, one)}".rstrip()


def events(records: Sequence[EventRecord], moment: Moment) -> Listing[EventRecord]:
    """The events, the newest first."""
    return Listing(
        ("time", "event"),
        records,
        lambda record: str(record.position),
        lambda record: (clock_words(record.at_s, moment), record.text),
        lambda record: record.text,
        "no events so far",
    )


def nodes(found: Sequence[NodeView], jobs: Callable[[NodeView], str]) -> Listing[NodeView]:
    """Nodes, the troubled first. `jobs`: what has each node, in a few words."""
    titles = ("node", "health", "role", "heard", "leaf", "job", "why")

    def row(node: NodeView) -> Row:
        why = "; ".join(filter(None, (lemon_words(node), node.reason)))
        health = Coloured(node.verdict, COLOURS.get(node.verdict, ""))
        return node.node, health, node.role, heard(node, "never"), node.leaf, jobs(node), why

    ordered = sorted(found, key=lambda node: node.verdict == "FIT")
    return Listing(titles, ordered, lambda node: node.node, row, lambda node: node_words(node, jobs(node)),
                   "no nodes so far")  # fmt: skip


def node_words(node: NodeView, jobs: str) -> str:
    """All of a node on a few lines."""
    parts = (
        node.node,
        node.verdict,
        node.role,
        " in ".join(filter(None, (node.leaf, node.pod))),
        jobs,
        f"musterd {'here' if node.musterd_attached else 'away'}, heard {heard(node, 'never')}",
        lemon_words(node),
        node.reason,
    )
    return "  ".join(filter(None, parts))
