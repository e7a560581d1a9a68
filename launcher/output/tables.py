"""All details of a gang, for `muster status --full` and for pipes. Pure: it takes views and yields lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from muster.daemon.host import rank_log_files
from muster.launcher.output.checkpoint_lines import checkpoint_lines, what_is_left
from muster.launcher.output.job_lines import job_ids, measured_lines, says_no_step
from muster.launcher.output.node_tables import COLOURS, attached, heard, lemon_words
from muster.launcher.output.screen import Screen
from muster.launcher.output.table import Cell, Coloured, Row, labelled, table
from muster.v1.api_pb2 import ExclusionView, GangView, NodeView, RankView, RecoveryView
from muster.wording import counted, duration

_MAX_RANK_ROWS = 64
"""A larger gang shows only the ranks that are not running."""

STRAGGLERS_SHOWN = 8
"""Nodes with stragglers that the summary of a gang names: those with the slowest ones."""


@dataclass(slots=True)
class Said:
    """The reasons that stand on a screen. A terminal shows each of them once; each record in a pipe is whole."""

    screen: Screen
    places: dict[str, str] = field(default_factory=dict)
    """By reason: where it stands."""

    def once(self, reason: str, place: str) -> str:
        """The reason, or where it stands already. `place`: where it is about to stand."""
        first = self.places.setdefault(reason, place)
        return reason if first == place or not reason or self.screen.width is None else f"see {first}"


def gang_details(view: GangView, screen: Screen, last_words: Iterable[str] = ()) -> Iterator[str]:
    """All details of one gang. `last_words`: of the rank that has ended it."""
    said = Said(screen)
    yield from labelled(screen, _summary(view, said, last_words))
    if view.nodes:
        yield ""
        yield from table(screen, *_members(view, said))
    if not view.final and (ranks := list(_rank_rows(view.ranks))):
        yield ""
        yield from table(screen, ("rank", "node", "state", "step"), ranks)
    if view.exclusions:
        yield ""
        yield from _exclusion_table(view.exclusions, said)
    if view.recoveries:
        yield ""
        yield from recovery_table(view.recoveries, screen, said)


def _summary(view: GangView, said: Said, last_words: Iterable[str]) -> Iterator[tuple[str, Cell]]:
    jobs = job_ids(view)
    yield "job", f"{view.name} (Slurm job {jobs}, gang {view.gang_id})"
    yield (
        "phase",
        Coloured(f"{view.phase}, exit code {view.exit_code}", colour(view.phase))
        if view.final
        else coloured(view.phase),
    )
    if view.final and view.ended_s:
        yield said.screen.titled("ended"), said.screen.time(view.ended_s)
    if view.reason:
        yield "reason", said.once(view.reason, "the reason above")
    yield from (("last words", line) for line in last_words)
    if view.waiting_for and not view.final:
        yield "waits for", said.once(view.waiting_for, "what it waits for")
    yield "generation", str(view.generation)
    yield "step", f"{'none is known' if says_no_step(view) else view.step}, committed {committed(view)}"
    if not view.final:
        yield from checkpoint_lines(view.checkpoint)
    elif left := what_is_left(view):
        yield "durable", left
    yield from conditions(view)
    yield "nodes", _role_counts(view)
    yield from measured_lines(view, said.screen)
    yield "logs", f"{rank_log_files.log_folder(view.run_dir, view.gang_id)}/g{view.generation}"


def conditions(view: GangView) -> Iterator[tuple[str, str]]:
    """What is unusual."""
    if view.unsupervised:
        yield "not supervised", view.unsupervised
    for declared, count in Counter(rank.declared_phase for rank in view.ranks if rank.declared_phase).items():
        yield "declared", f"{declared}, by {count} of {len(view.ranks)} ranks: hangs are not detected"
    for words in _stragglers(view.ranks)[:STRAGGLERS_SHOWN]:
        yield "straggler", words
    if view.replicas_disagree:
        yield "corruption", view.replicas_disagree
    if view.wider_groups and not view.final:
        yield "placement", f"wider than asked: {view.wider_groups}"
    if view.not_finite:
        yield "not finite", view.not_finite
    if view.last_loss:
        yield "loss", view.last_loss


def _stragglers(ranks: Iterable[RankView]) -> list[str]:
    """One line for each node with stragglers, the slowest first."""
    by_node: dict[str, list[RankView]] = {}
    for rank in ranks:
        by_node.setdefault(rank.node, []).append(rank)
    lines = []
    for node, own in by_node.items():
        slow = [rank for rank in own if rank.slower_by]
        by = max((rank.slower_by for rank in slow), default=0.0)
        pace = f"{by:.0%} longer than the median rank in each step, and the others wait for"
        listed = ", ".join(str(rank.rank) for rank in slow)
        if len(slow) == 1:
            lines.append((by, f"rank {listed} on {node} computes {pace} it"))
        elif slow:
            lines.append((by, f"{len(slow)} of {len(own)} ranks on {node} ({listed}) compute up to {pace} them"))
    return [words for _, words in sorted(lines, key=lambda line: -line[0])]


def _role_counts(view: GangView) -> str:
    roles = [node.role for node in view.nodes]
    if not view.generation:  # nobody has been given ranks, so nobody is a spare
        return f"{roles.count('spare')} attached, none had ranks so far"
    text = f"{roles.count('rank')} with ranks, {roles.count('spare')} spare"
    return text + (f", {roles.count('out')} out" if "out" in roles else "")


def committed(view: GangView) -> str:
    """The newest committed version, in words."""
    if not view.committed.generation:
        return "none"
    return f"step {view.committed.step} (generation {view.committed.generation})"


def _members(view: GangView, said: Said) -> tuple[Sequence[str], list[Row]]:
    """The titles and the rows of the gang's nodes, with their roles."""
    places: dict[str, list[int]] = {}
    for rank in view.ranks:
        places.setdefault(rank.node, []).append(rank.rank)
    titles = ("node", "verdict", "role", "ranks", "agent", "musterd", "heard", "ready to restart", "leaf", "why")
    rows = []
    for node in view.nodes:
        role = "" if node.role == "spare" and not view.generation else node.role
        rows.append(_member_row(node, role, places.get(node.node, []), said))
    return titles, rows


def _member_row(node: NodeView, role: str, ranks: Sequence[int], said: Said) -> Row:
    why = [said.once(node.reason, f"node {node.node}")]
    if node.lemon:
        refused = role == "out" and node.verdict == "FIT"
        why.insert(0, f"{'the job does not ask for it back: ' * refused}{lemon_words(node)}")
    return (
        node.node,
        coloured(node.verdict),
        role,
        _rank_range(ranks),
        attached(node.agent_attached),
        attached(node.musterd_attached),
        heard(node, "never"),
        counted(node.warm, "rank"),
        node.leaf,
        "; ".join(filter(None, why)),
    )


def _exclusion_table(exclusions: Iterable[ExclusionView], said: Said) -> Iterator[str]:
    """One record for each node on which the job does not start again."""
    titles = ("excluded node", said.screen.titled("since"), "until", "why")
    rows = [
        (
            one.node,
            said.screen.time(one.at_s),
            said.screen.time(one.until_s) or "its repair",
            said.once(one.reason, f"excluded node {one.node}"),
        )
        for one in exclusions
    ]
    return table(said.screen, titles, rows)


def _rank_range(ranks: Sequence[int]) -> str:
    numbers = sorted(ranks)
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return " ".join(map(str, numbers))


def _rank_rows(ranks: Iterable[RankView]) -> Iterator[Row]:
    every = list(ranks)
    for rank in every:
        if len(every) <= _MAX_RANK_ROWS or rank.state != "running":
            state = f"exited with {rank.exit_code}" if rank.state == "exited" else rank.state
            yield str(rank.rank), rank.node, state, str(rank.step)


def recovery_table(recoveries: Iterable[RecoveryView], screen: Screen, said: Said | None = None) -> Iterator[str]:
    """One record for each recovery. The durations are counted from the suspicion of the fault."""
    said = said or Said(screen)
    titles = (
        "generation", "action", "out", "in", screen.titled("fault at"), "goes on from", "detected", "fenced", "started",
        "first step", "cause",
    )  # fmt: skip
    return table(screen, titles, [_recovery_row(recovery, said) for recovery in recoveries])


def _recovery_row(recovery: RecoveryView, said: Said) -> Row:
    since = recovery.suspected_s or recovery.detected_s
    phases = (recovery.detected_s, recovery.fenced_s, recovery.started_s, recovery.first_step_s)
    return (
        str(recovery.generation),
        recovery.action,
        " ".join(recovery.nodes_out),
        " ".join(recovery.nodes_in),
        said.screen.time(since),
        _goes_on_from(recovery),
        *(f"after {duration(at - since)}" if at else "" for at in phases),
        said.once(recovery.cause, f"generation {recovery.generation}"),
    )


def _goes_on_from(recovery: RecoveryView) -> str:
    """The restored step, and how many of the steps that ranks had finished are repeated."""
    if not recovery.started_s:
        return ""
    repeated = recovery.step_before - recovery.step_restored
    return f"step {recovery.step_restored}" + (f", {repeated} repeated" if repeated > 0 else "")


def colour(word: str) -> str:
    """The colour of a phase or a health; empty: none."""
    return COLOURS.get(word.upper(), "")


def coloured(word: str) -> Coloured:
    """A phase or a health with its colour."""
    return Coloured(word, colour(word))
