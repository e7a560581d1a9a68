"""Planted bugs, as changes of a module's text: the simulator is worth what it finds of them.

A mutant is planted when its module is imported, so each needs a process of its own:
`python -m muster.simulator.planted_bugs.mutants NAME [SEEDS]`.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.simulator.seeds import Result

_CORE = "muster.daemon.coordinator.core"


@dataclass(frozen=True, slots=True)
class Mutant:
    """`after` in place of `before`, which stands once in `module`. `what`: the bug in words."""

    what: str
    module: str
    before: str
    after: str


_JOURNAL = "muster.daemon.coordinator.journal.journal"

MUTANTS: dict[str, Mutant] = {
    "skip-the-fence": Mutant(
        "a generation starts though not all have fenced the one before",
        f"{_CORE}.recovery.transitions",
        "    if not all(failure_detector.ranks_ended("
        "gang_turn, gang.members[node]) for node in gang_turn.index.unfenced):",
        "    if gang_turn.index.present and gang_turn.index.unfenced >= gang_turn.index.present:",
    ),
    "start-in-the-silence": Mutant(
        "a generation starts before silent ranks have killed themselves",
        f"{_CORE}.detection.time_fencing",
        "quiet_at = last_contact_at + SELF_FENCE_AFTER_S + KILL_MARGIN_S",
        "quiet_at = last_contact_at",
    ),
    "live-on-in-silence": Mutant(
        "an agent that hears nobody lets its ranks run on",
        "muster.daemon.agent.failure_detector.silence_rules",
        "    if now - max(last_contacts.coordinator, suspicion_since) < SELF_FENCE_AFTER_S:",
        "    if now - max(last_contacts.coordinator, suspicion_since) < 1000 * SELF_FENCE_AFTER_S:",
    ),
    "accept-a-stale-generation": Mutant(
        "a rank of a generation that is over counts for the one that runs",
        f"{_CORE}.state.gang_index",
        "    return [rank for rank in ranks if rank.generation == generation]",
        "    return list(ranks)",
    ),
    "act-before-journaling": Mutant(
        "orders go out before the journal has what they follow from",
        "muster.daemon.coordinator.shell.event_processing",
        "        records = journal.append(outcome.facts, now, cause(event))\n",
        "        executor.send_orders(outcome.facts)\n"
        "        records = journal.append(outcome.facts, now, cause(event))\n",
    ),
    "forget-who-is-out": Mutant(
        "a restarted coordinator takes nodes that are out for spares",
        _JOURNAL,
        "                _replay_record(state, Record(*row), position, crc)",
        "                _replay_record(state, Record(*row), position, crc) if row[4] != 'MemberOut' else None",
    ),
    "never-come-to-an-end": Mutant(
        "a planned stop is planned again in every round of the rules",
        f"{_CORE}.recovery.planned_stop",
        "    if gang.stop is not None or gang.phase not in ACTIVE",
        "    if gang.phase not in ACTIVE",
    ),
    "snapshot-too-far": Mutant(
        "a snapshot claims a fact that it does not hold",
        _JOURNAL,
        "        row = (self.position, text, _crc(self.position, text))",
        "        row = (self.position + 1, text, _crc(self.position + 1, text))",
    ),
    "trust-one-witness": Mutant(
        "nobody's answer counts but the one to the coordinator's own probe",
        f"{_CORE}.detection.probe_result",
        "    about_agent = [s for w, s in probe.silence_by_witness.items() if w != MUSTERD]",
        '    about_agent = [s for w, s in probe.silence_by_witness.items() if w == "agent"]',
    ),
    "ignore-an-answer": Mutant(
        "a node that answers one witness is lost because another hears nothing",
        f"{_CORE}.detection.probe_result",
        "    if any(s is None for s in about_agent):",
        "    if probe.complete and all(s is None for s in about_agent):",
    ),
    "ignore-progress": Mutant(
        "a node is called lost while its gang moves on",
        f"{_CORE}.detection.probe_result",
        "    if moved_at > probe.asked_at:",
        "    if moved_at > probe.asked_at + 1000.0:",
    ),
    "hung-at-once": Mutant(
        "a node whose processes stand still for a moment is called hung",
        f"{_CORE}.detection.failure_detector",
        "\nHUNG_AFTER_S = 4.0\n",
        "\nHUNG_AFTER_S = 0.0\n",
    ),
    "judge-between-two-steps": Mutant(
        "a node whose ranks train on is called hung, or is replaced, in the middle of a step",
        f"{_CORE}.detection.progress_timeouts",
        "    return gang_turn.now - moved_at < 2 * step_s + REPORT_DELAY_S and",
        "    return gang_turn.now - moved_at < 0.0 and",
    ),
    "forget-a-phase": Mutant(
        "a node that the coordinator does not reach is replaced while its gang is in a declared phase",
        f"{_CORE}.detection.progress_timeouts",
        "        return inf  # others",
        "        return OUT_OF_TOUCH_S  # others",
    ),
    "blame-an-echo": Mutant(
        "a node is unfit for the echo of a peer's loss that takes long to be found",
        f"{_CORE}.detection.correlated_faults",
        "    over = [(node, reason) for node, reason in over if not _may_show(turn, node)]\n",
        "",
    ),
    "blame-for-the-storage": Mutant(
        "nodes are unfit because ranks can't be killed anywhere",
        f"{_CORE}.detection.outage",
        "    return len(found) > chance_limit(gang_turn)",
        "    return len(found) > 100 * chance_limit(gang_turn)",
    ),
    "evict-many": Mutant(
        "many silent nodes are taken at once",
        f"{_CORE}.detection.outage",
        "    return max(2, max(",
        "    return max(200, max(",
    ),
    "count-one-gang": Mutant(
        "many silent nodes are taken at once where no gang has many of them",
        f"{_CORE}.detection.outage",
        "    return len(found) > most or _others_silent(gang_turn, found, most)",
        "    return len(found) > most",
    ),
    "blame-a-late-order": Mutant(
        "a node is unfit because it had no order to obey",
        f"{_CORE}.detection.failure_detector",
        "    return gang_turn.now - max(since, agent.attached_at, reached_at) > KILL_TIMEOUT_S",
        "    return gang_turn.now - since > KILL_TIMEOUT_S",
    ),
    "commit-without-a-shard": Mutant(
        "a version is committed though a node has not stored it",
        "muster.checkpoint.store.commit.commit_tracker",
        "        if storing_nodes != self.nodes:",
        "        if len(storing_nodes) < max(1, len(self.nodes) - 1):",
    ),
    "restore-without-a-shard": Mutant(
        "a version is restored of which a rank's shard is lost",
        f"{_CORE}.recovery.restore_plan",
        "have.issuperset(range(ranks_of(v)))]",
        "have.issuperset(range(ranks_of(v) - 1))]",
    ),
    "forget-the-buddy": Mutant(
        "a lost node's state counts as lost, though its buddy holds it",
        f"{_CORE}.recovery.restore_plan",
        "        for shard in shards:\n            ranks.setdefault(",
        "        for shard in (s for s in shards if s.primary):\n            ranks.setdefault(",
    ),
    "mix-versions": Mutant(
        "ranks take their state from different steps",
        f"{_CORE}.recovery.restore_plan",
        "            if shard.version != version or",
        "            if shard.version > version or",
    ),
    "stop-without-saving": Mutant(
        "a gang that was stopped by plan leaves its last steps behind",
        f"{_CORE}.recovery.completion",
        "    kept = gang.phase in (Phase.RUNNING, Phase.RECOVERING)",
        "    kept = False",
    ),
    "know-no-limit": Mutant(
        "node after node is taken out of service",
        f"{_CORE}.detection.circuit_breaker",
        "    if taken >= limits.nodes_per_hour:",
        "    if taken >= 100 + limits.nodes_per_hour:",
    ),
    "act-as-observer": Mutant(
        "in observe mode nodes are drained",
        f"{_CORE}.detection.circuit_breaker",
        "    if limits.observe:",
        "    if limits.observe and turn.changed_node:",
    ),
    "blame-a-doubted-node": Mutant(
        "a node is to blame as soon as one rank has crashed on it",
        f"{_CORE}.detection.attribution",
        "    if last.hardware or before.hardware or not node or before.crashed_on != node:\n        return\n"
        "    if gang.failures_in_a_row < CRASHES_UNTIL_SWAP:",
        "    if last.hardware or not node:",
    ),
    "blame-the-first-to-tell": Mutant(
        "whose exit was reported first is to blame, though he died of a peer's reset",
        f"{_CORE}.detection.attribution",
        "    if last.hung or not last.crashed_on:",
        "    if last.generation:",
    ),
    "ignore-a-phase": Mutant(
        "ranks hang that are in a declared phase",
        f"{_CORE}.detection.hang_detector",
        "    return known and not index.unattached and not index.in_declared_phase\n",
        "    return known and not index.unattached\n",
    ),
    "judge-without-an-answer": Mutant(
        "a generation hangs though an agent has not answered",
        f"{_CORE}.detection.hang_detector",
        "    if stall.unanswered or asked_after:",
        "    if stall.unanswered and not stall.asked_at:",
    ),
    "hang-too-soon": Mutant(
        "a generation hangs as soon as it makes no step for two seconds",
        f"{_CORE}.detection.hang_detector",
        "    if gang_turn.now < due:",
        "    if gang_turn.now < min(due, progress_timeouts.last_progress_at(gang_turn) + 2.0):",
    ),
    "wait-for-a-hung-rank": Mutant(
        "a generation that hangs is left alone after its first step",
        f"{_CORE}.detection.hang_detector",
        "    return known and not index.unattached",
        "    return known and not progress_timeouts.has_finished_step(gang_turn) and not index.unattached",
    ),
    "leave-a-spare-waiting": Mutant(
        "an elastic job shrinks though a spare is there",
        f"{_CORE}.state.placement",
        '_take_spare(free, leaves.get(node, ""))',
        '_take_spare(free[:0], leaves.get(node, ""))',
    ),
    "empty-the-pool": Mutant(
        "a gang takes more nodes of the shared pool than it may",
        f"{_CORE}.recovery.shared_pool",
        "    room = gang.spec.pool_nodes - len(_joined(gang))",
        "    room = missing",
    ),
    "flush-half": Mutant(
        "a durable checkpoint counts as soon as one node has written its part",
        f"{_CORE}.recovery.flushing",
        "    elif not index.flush_pending:",
        "    elif index.flush_pending < index.flush_writers:",
    ),
    "take-absence-for-an-end": Mutant(
        "ranks count as ended when their agent is out of touch",
        f"{_CORE}.state.gang_index",
        "expected and not (attached and status.fenced_generation >= gang.fenced_generation))",
        "expected and attached and status.fenced_generation < gang.fenced_generation)",
    ),
    "keep-memory-for-nobody": Mutant(
        "a gang that is over leaves its memory on its nodes",
        "muster.daemon.coordinator.shell.orders",
        "            _set_exit(order, gang.exit_code, gang.reason)",
        "            _set_exit(order, gang.exit_code, gang.reason)\n            order.requeued = True",
    ),
    "keep-memory-beside-a-job": Mutant(
        "a job starts on a node that keeps another one's memory",
        "muster.daemon.node.kept_memory.retention",
        "self.kept.owner != owner else None",
        "self.kept.owner.job > owner.job else None",
    ),
    "wait-for-who-starts-agents": Mutant(
        "a gang gathers though nobody is left who would start its agents",
        f"{_CORE}.recovery.gathering",
        "    return gang_turn.now >= lost_at\n",
        "    return False\n",
    ),
    "leave-before-the-requeue": Mutant(
        "a batch process ends, and its job with it, before Slurm has the job back in its queue",
        f"{_CORE}.core",
        "seen.job_restarts > restarts and",
        "seen.job_restarts >= restarts and",
    ),
    "leave-with-the-flag-on": Mutant(
        "a job that has failed for good ends before its requeue flag is off",
        f"{_CORE}.core",
        "        return gang.final and not any(",
        "        return gang.final or any(",
    ),
    "give-up-on-who-starts-agents": Mutant(
        "a batch script that has been silent for a moment is given up",
        f"{_CORE}.recovery.gathering",
        "    lost_at = max(batch_lost_at, last_attach_at + SPARE_WAIT_S)\n",
        "    lost_at = max(heard_at or 0.0, since) + 1.0\n",
    ),
    "forget-what-is-owed": Mutant(
        "a snapshot lacks the calls that Slurm is owed",
        f"{_CORE}.state.durable_state",
        "        return _STORED_STATE.dump_json(self, by_alias=True).decode()",
        '        return _STORED_STATE.dump_json(self, by_alias=True, exclude={"owed"}).decode()',
    ),
}


class Planted(importlib.machinery.SourceFileLoader):
    """Loads a module with a mutant in it; never from compiled files."""

    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        """The changed source, compiled."""
        code: CodeType = compile(mutate(self._mutant, Path(self.path).read_text()), self.path, "exec")
        return code


class _Finder:
    """Stands before all other finders for one module."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The planted module's, no other's."""
        if fullname != self._mutant.module:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        if found is None or found.origin is None:
            return None
        return importlib.util.spec_from_loader(fullname, Planted(fullname, found.origin, self._mutant))


def mutate(mutant: Mutant, source: str) -> str:
    """`source` with the bug.

    Raises:
        ValueError: the text to be changed does not stand there exactly once: the mutant is out of date.
    """
    if source.count(mutant.before) != 1:
        raise ValueError(f"{mutant.module} has {source.count(mutant.before)} times: {mutant.before}")
    return source.replace(mutant.before, mutant.after)


def hunt(name: str, count: int) -> Result | None:
    """The first of `count` seeds that finds the mutant; None: none does.

    Raises:
        RuntimeError: its module was imported before.
    """
    mutant = MUTANTS[name]
    if mutant.module in sys.modules:
        raise RuntimeError(f"{mutant.module} is imported already: plant the bug in a fresh process")
    sys.meta_path.insert(0, _Finder(mutant))
    logging.disable(logging.CRITICAL)
    seeds = importlib.import_module("muster.simulator.seeds")
    found: Result | None = next((result for seed in range(count) if (result := seeds.run(seed)).violation), None)
    return found


def main() -> int:
    """Exit code 1 where the bug was not found."""
    name, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200
    found = hunt(name, count)
    print(f"{name}: " + (f"found by seed {found.seed}: {found.violation}" if found else f"not found by {count} seeds"))
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
