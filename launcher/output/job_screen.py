"""`muster status JOB` on one screen of a terminal. Pure.

Tables of nodes, ranks and recoveries are not on it: `tables.gang_details` has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from muster.daemon.host import rank_log_files
from muster.launcher.output import job_lines
from muster.launcher.output.checkpoint_lines import checkpoint_lines, newest_flush, what_is_left
from muster.launcher.output.job_lines import Moment
from muster.launcher.output.screen import Screen, time_with_zone
from muster.launcher.output.table import Cell, Coloured, labelled
from muster.launcher.output.tables import Said, colour, conditions
from muster.v1.api_pb2 import GangView

_RUNNING_NOW = frozenset({"restore", "no snapshots", "copies wait"})
"""Lines about checkpoints that say what goes on now. The others say what is set."""


def one_screen(view: GangView, screen: Screen, now: float, last_words: Iterable[str] = ()) -> Iterator[str]:
    """The job on one screen, what people look for first at the top. `now`: seconds since the epoch. `last_words`: of
    the rank that has ended it."""
    return labelled(screen, _lines(view, Said(screen), Moment(now, screen), last_words))


def _lines(view: GangView, said: Said, moment: Moment, last_words: Iterable[str]) -> Iterator[tuple[str, Cell]]:
    jobs = job_lines.job_ids(view)
    generation = f", generation {view.generation}" if view.generation else ""
    yield "job", f"{view.name} ({jobs}){generation}; {time_with_zone(moment.now, moment.screen.zone)}"
    yield "state", Coloured(job_lines.state_words(view, moment), colour(view.phase))
    if view.reason:
        yield "reason", said.once(view.reason, "the reason above")
    yield from (("last words", line) for line in last_words)
    if view.waiting_for and not view.final:
        yield "waits for", said.once(view.waiting_for, "what it waits for")
    yield from job_lines.time_lines(view, moment)
    yield from job_lines.pace_lines(view, moment)
    yield from job_lines.use_lines(view)
    yield from job_lines.checkpoint_ages(view, moment)
    if view.final:
        if left := what_is_left(view):
            yield "go on", left.partition("; ")[2]
    else:
        yield from (("flush", words) for words in newest_flush(view.checkpoint))
        yield from (line for line in checkpoint_lines(view.checkpoint) if line[0] in _RUNNING_NOW)
    yield from job_lines.node_lines(view)
    for node, words in job_lines.unwell(view.nodes):
        why = said.once(node.reason, f"node {node.node}") if node.reason else ""
        yield "not well", Coloured(f"{words}: {why}" if why else words, colour(node.verdict))
    yield from conditions(view)
    if words := job_lines.recovery_words(view, moment):
        yield "recovery", words
        yield "cause", said.once(view.recoveries[-1].cause, "the cause above")
    if words := job_lines.goodput_words(view):
        yield "goodput", words
    if words := job_lines.next_words(view, moment):
        yield "next", words
    if view.run_dir:
        yield "logs", f"{rank_log_files.log_folder(view.run_dir, view.gang_id)}/g{view.generation}"
