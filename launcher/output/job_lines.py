"""What `muster status JOB` says first: state, time left, pace, checkpoints, nodes, the newest recovery, goodput, what
happens next. One line each, in the order in which people look for it. What nobody knows has no line. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from muster.launcher.output.checkpoint_lines import size
from muster.launcher.output.screen import Screen
from muster.recovery_phases import RecoveryPhase, phase_seconds
from muster.slurm.client.parsing.hostlist import collapse
from muster.v1.api_pb2 import (
    CheckpointView,
    GangView,
    NodeSpread,
    NodeView,
    RecoveryView,
    TrainingView,
)
from muster.v1.common_pb2 import RankNumber
from muster.wording import counted, duration

FIRST_VALUES = ("loss", "gradient_norm", "lr")
"""Numbers of the script that stand before its own ones."""
_VALUES_SHOWN = 5
_LOSSES_SHOWN = 3
_LEAST_SHARE = 0.001
"""Lost time below this share of the allocated time is not named."""
_NODES_EXPLAINED = 3
_ROLES = (("rank", "with ranks"), ("spare", "spare"), ("out", "out"), ("absent", "absent"))


def job_ids(view: GangView) -> str:
    """The job as Slurm shows it, a task of an array as "42_1", and the jobs of nodes of a shared pool."""
    ids = [*map(str, view.slurm_job_ids)]
    return " ".join([view.array_task, *ids[1:]] if view.array_task else ids)


@dataclass(frozen=True, slots=True)
class Moment:
    """Now, on the screen on which times are shown."""

    now: float
    screen: Screen

    def ago(self, at_s: float) -> str:
        """How long ago that was."""
        return f"{duration(max(0.0, self.now - at_s))} ago"

    def coming(self, at_s: float) -> str:
        """When that will be, and in how long."""
        return f"{self.screen.time(at_s, 'minutes')}, in {duration(max(0.0, at_s - self.now))}"


def by_number(view: GangView) -> tuple[bool, int, int, str]:
    """The order of a list: jobs that go on, by number; then those that have ended. Tasks of an array by theirs."""
    numbers = [int(word) for word in view.array_task.split("_") if word.isdecimal()]
    job, task, *_ = *(numbers or [min(view.slurm_job_ids, default=0)]), 0, 0
    return view.final, job, task, view.gang_id


def state_words(view: GangView, moment: Moment) -> str:
    """The phase, since when, and how much time the run has left."""
    since = f" for {duration(max(0.0, moment.now - view.phase_since_s))}" if view.phase_since_s else ""
    if view.final:
        return f"{view.phase}, exit code {view.exit_code}" + (f", {moment.ago(view.ended_s)}" if view.ended_s else "")
    return f"{view.phase}{since}"


def time_lines(view: GangView, moment: Moment) -> Iterator[tuple[str, str]]:
    """When the run started and ends; while it waits, when Slurm expects it to start."""
    if view.expected_start_s:
        yield "starts", f"{moment.coming(view.expected_start_s)}, as Slurm expects"
    if view.run_started_s and not view.final:
        words = f"{duration(max(0.0, moment.now - view.run_started_s))} elapsed"
        if view.run_ends_s:
            words += f", {duration(max(0.0, view.run_ends_s - moment.now))} left"
        yield "time", words


def pace_lines(view: GangView, moment: Moment) -> Iterator[tuple[str, str]]:
    """Step, pace, the end of the training, and the numbers that ranks report."""
    training = view.training
    if not view.generation:
        return
    if says_no_step(view):
        yield "progress", "no step is known: its script says none"
        return
    words = [f"step {view.step:,}" + (f" of {training.last_step:,}" if training.last_step else "")]
    if training.steps_per_s and not view.final:
        words.append(pace(training))
    if training.done_s > moment.now and not view.final:
        late = view.run_ends_s and training.done_s > (view.stop_s or view.run_ends_s)
        words.append(f"done {moment.coming(training.done_s)}" + ", after this run ends" * bool(late))
    yield "progress", "; ".join(words)
    if values := list(_values(training)):
        yield "values", ", ".join(values)
    if training.step_s and not view.final:
        yield "step time", ", ".join(_step_parts(training))


def use_lines(view: GangView) -> Iterator[tuple[str, str]]:
    """How much of its nodes the job uses: memory, GPUs."""
    use = view.use
    if view.final:
        return
    if use.memory.nodes:
        yield "host RAM", f"{_of_nodes(use.memory, size)} of {size(use.memory.limit)}"
    if use.gpu_memory.nodes:
        busy = _of_nodes(use.gpu_busy, "{:.0%}".format)
        yield "GPUs", f"{busy} busy; memory {_of_nodes(use.gpu_memory, size)} of {size(use.gpu_memory.limit)}"


def _of_nodes(spread: NodeSpread, words: Callable[[float], str]) -> str:
    """The median, and which nodes have the least and the greatest value, if these differ."""
    least, median, greatest = (words(value) for value in (spread.least, spread.median, spread.greatest))
    if least == greatest:
        return median
    return f"{median} ({least} on {spread.least_node} to {greatest} on {spread.greatest_node})"


def pace(training: TrainingView) -> str:
    """Steps a second, or seconds a step where that is more than one; empty: not known."""
    rate = training.steps_per_s
    if not rate:
        return ""
    return f"{rate:.3g} steps/s" if rate >= 1 else f"{duration(1 / rate)} a step"


def _values(training: TrainingView) -> Iterator[str]:
    order = {name: at for at, name in enumerate(FIRST_VALUES)}
    for metric in sorted(training.metrics, key=lambda one: order.get(one.name, len(order)))[:_VALUES_SHOWN]:
        yield _value(metric)
    if training.mfu:
        yield f"MFU {training.mfu:.1%}"
    if training.tokens_per_gpu_s:
        yield f"{training.tokens_per_gpu_s:,.0f} tokens/s a GPU"


def _value(metric: RankNumber) -> str:
    spread = f" ({metric.least:.4g} to {metric.greatest:.4g})" if metric.least != metric.greatest else ""
    return f"{metric.name} {metric.median:.5g}{spread}"


def _step_parts(training: TrainingView) -> Iterator[str]:
    yield duration(training.step_s)
    data = training.fetch_s
    parts = (("compute", training.compute_s - data), ("wait for other ranks", training.wait_s), ("data", data))
    yield from (f"{name} {spent / training.step_s:.0%}" for name, spent in parts if spent > 0)


def measured_lines(view: GangView, screen: Screen) -> Iterator[tuple[str, str]]:
    """The same as records, with times instead of ages: what `--full` and pipes have beside their other lines."""
    training = view.training
    times = (
        ("started", view.run_started_s),
        ("time limit", view.run_ends_s),
        ("expected start", view.expected_start_s),
        ("done", training.done_s),
    )
    if not view.final:
        yield from ((screen.titled(title), screen.time(at_s)) for title, at_s in times if at_s)
        if words := pace(training):
            yield "pace", words
        if training.step_s:
            yield "step time", ", ".join(_step_parts(training))
    yield from use_lines(view)
    if values := list(_values(training)):
        yield "values", ", ".join(values)
    if words := goodput_words(view):
        yield "goodput", words
    if view.if_node_fails:
        yield "if a node fails", view.if_node_fails


def checkpoint_ages(view: GangView, moment: Moment) -> Iterator[tuple[str, str]]:
    """The newest checkpoint in memory and the newest one on disk: step, age, place."""
    found = view.checkpoint
    if not view.final and view.generation:
        yield "memory", _memory_words(view, found, moment)
    step = f"step {view.step - found.durable_loses_steps:,}" if found.HasField("durable_loses_steps") else ""
    if found.durable_path:
        age = moment.ago(found.durable_s) if found.durable_s else ""
        yield "disk", "; ".join(filter(None, (", ".join(filter(None, (step, age))), found.durable_path)))
    elif not view.final and view.generation:
        yield "disk", "nothing: the job has no durable_dir" if found.memory_only else "nothing yet"


def _memory_words(view: GangView, found: CheckpointView, moment: Moment) -> str:
    if not view.committed.generation:
        return found.no_slots or "nothing yet"
    words = f"step {view.committed.step:,}"
    words += f", {moment.ago(found.committed_s)}" if found.committed_s else ""
    if found.copies:
        words += f"; each rank's state is on {counted(found.copies, 'node')}"
    return words + ("; parity of groups of nodes" if found.parity_groups else "")


def node_lines(view: GangView) -> Iterator[tuple[str, str]]:
    """The nodes by role, in Slurm's short form, and those that are not well."""
    by_role: dict[str, list[str]] = {}
    for node in view.nodes:
        role = "spare" if node.role == "spare" and view.generation else node.role
        by_role.setdefault(role, []).append(node.node)
    known = [(words, by_role[role]) for role, words in _ROLES if role in by_role]
    if not view.generation:
        known = [("attached" if words == "spare" else words, names) for words, names in known]
    if known:
        yield "nodes", "; ".join(f"{len(names)} {words}: {short(names)}" for words, names in known)


def unwell(nodes: Iterable[NodeView]) -> Iterator[tuple[NodeView, str]]:
    """The nodes that are not FIT, those with ranks first, each in words; then how many more there are."""
    bad = sorted((node for node in nodes if node.verdict != "FIT"), key=lambda node: node.role != "rank")
    for node in bad[:_NODES_EXPLAINED]:
        yield node, f"{node.node} {node.verdict}"
    if len(bad) > _NODES_EXPLAINED:
        yield NodeView(), f"{counted(len(bad) - _NODES_EXPLAINED, 'further node is', 'further nodes are')} not FIT"


def short(names: Iterable[str]) -> str:
    """Names of nodes in Slurm's short form."""
    return collapse(sorted(names, key=lambda name: (len(name), name)))


def recovery_words(view: GangView, moment: Moment) -> str:
    """The newest recovery: what was done, when, and how long each phase took; empty: there was none."""
    if not view.recoveries:
        return ""
    newest = view.recoveries[-1]
    since, count = newest.suspected_s or newest.detected_s, view.recovery_count or len(view.recoveries)
    words = [newest.action or "under way", f"generation {newest.generation}" * bool(newest.generation)]
    words += [moment.ago(since)] if since else []
    words += [f"{count} in all"] if count > 1 else []
    moved = [
        f"{short(names)} {where}" for names, where in ((newest.nodes_out, "out"), (newest.nodes_in, "in")) if names
    ]
    phases = recovery_phases(newest)
    if newest.first_step_s:
        phases = f"back after {duration(newest.first_step_s - since)}: {phases}"
    elif newest.running_s and says_no_step(view):
        phases = f"ranks ran again after {duration(newest.running_s - since)}: {phases}"
    repeated = newest.step_before - newest.step_restored if newest.started_s else 0
    again = f"{counted(repeated, 'step')} repeated" if repeated > 0 else ""
    return "; ".join(filter(None, (", ".join(filter(None, words)), ", ".join(moved), phases, again)))


def recovery_phases(recovery: RecoveryView) -> str:
    """How long each phase took, as far as they are over."""
    return ", ".join(f"{phase.words} {duration(spent)}" for phase, spent in phases_of(recovery).items())


def phases_of(recovery: RecoveryView) -> dict[RecoveryPhase, float]:
    """The phases that are over, and their seconds."""
    ends = (
        recovery.detected_s, recovery.fenced_s, recovery.started_s,
        recovery.running_s, recovery.restored_s, recovery.first_step_s,
    )  # fmt: skip
    return dict(phase_seconds(recovery.suspected_s or recovery.detected_s, ends))


def says_no_step(view: GangView) -> bool:
    """Whether no step of a job is known, although its ranks have run: its script has none of the library, or none yet.
    What it has trained, and what a fault has undone, is known to the script alone."""
    known = view.step or view.committed.generation or view.HasField("training")
    return bool(view.generation) and not known and not any(one.first_step_s for one in view.recoveries)


def goodput_share(view: GangView) -> str:
    """The share of the allocated time that trained something new; empty: not known."""
    goodput = view.goodput
    if says_no_step(view):
        return ""
    return f"{goodput.useful_node_s / goodput.allocated_node_s:.1%}" if goodput.allocated_node_s else ""


def goodput_words(view: GangView) -> str:
    """Goodput with its largest losses; without steps, for how much of the time ranks ran. Empty: neither is known."""
    goodput = view.goodput
    if not goodput.allocated_node_s:
        return ""
    share, ran = goodput_share(view), goodput.useful_node_s
    lost = sorted(goodput.lost, key=lambda one: -one.node_s)
    if not share:
        if not goodput.steps_unknown_node_s:  # an older coordinator has it in this category
            ran += sum(one.node_s for one in lost if one.category == "first_step")
            lost = [one for one in lost if one.category != "first_step"]
        share = f"not known without steps; its ranks ran for {ran / goodput.allocated_node_s:.1%}"
    parts = [(one.category.replace("_", " "), one.node_s / goodput.allocated_node_s) for one in lost]
    named = [f"{name} {part:.1%}" for name, part in parts[:_LOSSES_SHOWN] if part >= _LEAST_SHARE]
    words = f"{share} of {duration(goodput.until_s - goodput.since_s)}"
    return words + (f"; lost: {', '.join(named)}" if named else "")


def next_words(view: GangView, moment: Moment) -> str:
    """What happens next, as far as it is known; empty: nothing is."""
    words = []
    if view.stop_s and not view.final:
        then = "and the job is requeued" if view.after_stop == "REQUEUED" else "and the job ends"
        words.append(f"{moment.coming(view.stop_s)}, the ranks stop for the time limit, {then}")
    if view.if_node_fails:
        words.append(f"if a node fails, {view.if_node_fails}")
    return "; ".join(words)
