"""Keeps a finished step: captures the state, plans where it lies in a slot, and has it copied there."""

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from muster.checkpoint.training.agent_connection import AgentConnection, SnapshotCost
from muster.checkpoint.training.agreements.joint_planning import JointPlanning
from muster.checkpoint.training.agreements.process_group import rank_and_world_size, ranks_with_store
from muster.checkpoint.training.borrowed_pages import BorrowedPages
from muster.checkpoint.training.copies.late_copies import LateCopies
from muster.checkpoint.training.due_steps import DueSteps
from muster.checkpoint.training.planning import agreed_states
from muster.checkpoint.training.planning.publication import Publication, plan_publication
from muster.checkpoint.training.planning.shard_plan import ObjectOutgrown, ShardPlan, first_change, signature
from muster.checkpoint.training.snapshot import SnapshotWriter
from muster.checkpoint.training.states.replicas import find_replicas
from muster.checkpoint.training.states.training_state import STRUCTURE, CapturedState, StateLeaf, TrainingState
from muster.checkpoint.training.wait_budget import WaitBudget

log = logging.getLogger(__name__)

FINAL_SLOT_TIMEOUT_S = 30.0
"""Seconds that the last snapshot waits for a free slot."""

NEW_SLOT_TIMEOUT_S = 5.0
"""Seconds that a snapshot waits for the first of new slots. The agent grants it at once."""

ASK_AGAIN_S = 60.0
"""Seconds after which a rank that got no slots asks for them again: the node may have more memory then."""


@contextmanager
def _paused_collection() -> Iterator[None]:
    """Python's collector of cycles does not run in the `with` block, or in the function that this decorates. What a
    function made and has dropped is not counted.

    A snapshot makes some tuples for each tensor, and drops them all at its end. So many new objects make the collector
    look through all objects of the process. With torch imported that takes 0.2 s, and training waits for it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class StepKeeper:
    """Takes the snapshots of one rank.

    Args:
        states: the user's objects.
        connection: to the agent, which gives the slots.
        due: which steps are kept.
        wait_budget: how long training may wait for commits.
        overlap: what only optimizers change is copied after `take` has returned.
    """

    def __init__(
        self, states: TrainingState, connection: AgentConnection, due: DueSteps, wait_budget: WaitBudget, overlap: bool
    ) -> None:
        self._states = states
        self._connection = connection
        self._due = due
        self._wait_budget = wait_budget
        self._late_copies = LateCopies(states.optimizers().values()) if overlap else None
        self._writer: SnapshotWriter | None = None
        self._plan: ShardPlan | None = None
        self._structure: Any = None
        self._joint_planning = JointPlanning(partial(ranks_with_store, "planning"))
        self._min_object_bytes: dict[str, int] = {}
        self.borrowed_pages = BorrowedPages()
        """Pages that the restore has mapped from a slot. They are copied before a slot is written again."""
        self.ask_again_s = ASK_AGAIN_S
        self._refused, self._asked_at = "", 0.0
        self.publication: Publication | None = None
        """What the ranks agreed on last, in this run or before the restore."""
        self.are_replicas_equal = False
        """Whether the replicas were compared in this run, or were restored from memory, which holds compared ones."""

    def wait(self) -> None:
        """Return when the copies that were left for later are complete."""
        if self._late_copies is not None:
            self._late_copies.wait()

    def close(self) -> None:
        """Wait for the copies, and let the slots be."""
        if self._late_copies is not None:
            self._late_copies.close()
        self._close_writer()

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    @_paused_collection()
    def take(self, n: int, *, last: bool) -> bool:
        """Copy the present state into a free slot; report the snapshot as skipped if no slot is free in time, or if the
        state has changed and the ranks have yet to plan. Returns whether it was taken.

        `last`: no snapshot follows. Wait for any slot. Otherwise the step is kept only if it is the one that all ranks
        keep next.
        """
        began = time.monotonic()
        captured = self._states.capture(rank_and_world_size()[0], n)
        capture_s = time.monotonic() - began
        wait_s = FINAL_SLOT_TIMEOUT_S if last else 0.0
        change = self._change(captured)
        # The ranks plan together, so nothing before this depends on the rank's own slots.
        if self._plan is None or self._joint_planning.is_due(change, last=last):
            captured = self._plan_together(n, captured)
            wait_s, change = max(wait_s, NEW_SLOT_TIMEOUT_S), ""
        elif self._writer is None and not change and time.monotonic() - self._asked_at >= self.ask_again_s:
            self._request_slots(self._plan)
        filled = not change and self._fill_slot(n, captured, wait_s, capture_s, may_be_late=not last)
        if not filled:
            self._connection.report_progress(n, skipped=True)
        return filled

    def _change(self, captured: CapturedState) -> str:
        """The first leaf that the plan does not fit any more; empty: none."""
        found = signature(captured)
        if self._plan is None or self._plan.signature == found:
            return ""
        return self._states.described(first_change(self._plan.signature, found), captured.shared)

    def _plan_together(self, n: int, captured: CapturedState) -> CapturedState:
        """Plan this rank's shard. A collective call. Returns the state to keep: with other names if ranks now optimize
        different parameters.

        All ranks get new slots: a rank whose state has changed has skipped steps, for which others would wait.
        """
        before = self._states.by_name
        agreed_states.agree_on_optimizers(self._states)
        if self._states.by_name != before:
            captured = self._states.capture(rank_and_world_size()[0], n)
        self._compare_replicas(n, captured)
        leaves = [*captured.leaves, StateLeaf(tuple(STRUCTURE.split(".")), None)]
        self.publication = plan_publication(leaves, self.publication)
        self._structure = agreed_states.published_structure(self._states, captured)
        if self._plan is None:
            self._joint_planning.begin()
        self._make_plan(captured, self.publication)
        return captured

    def _compare_replicas(self, n: int, captured: CapturedState) -> None:
        """Compare replicas once in a run: later they are compared by all their bytes."""
        if not self.are_replicas_equal:
            agreed_states.refuse_unequal_replicas(self._states, captured.leaves, n)
        self.are_replicas_equal = True

    def _fill_slot(
        self, n: int, captured: CapturedState, wait_s: float, capture_s: float, *, may_be_late: bool
    ) -> bool:
        """Write the captured state into a slot; returns False if no slot is free.

        `capture_s`: seconds that it took to capture the state. With the copy, and with the wait for an earlier late
        copy, they are what the snapshot costs. `may_be_late`: what only optimizers change may be copied after this.
        """
        while self._writer is not None:
            slot = self._connection.slot_for_any_step(n, wait_s) if wait_s else self._scheduled_slot(n)
            if slot is None:
                return False
            began = time.monotonic()
            self.borrowed_pages.wait()
            late = self._late_copies if may_be_late and self._late_copies and self._late_copies.usable else None
            try:
                rest = self._writer.write(slot, captured, late.leaves if late else frozenset())
            except ObjectOutgrown as outgrown:
                name, size = outgrown.args
                self._min_object_bytes[name] = 2 * size
                # The publication stays the same, so no other rank has to plan again.
                self._make_plan(captured, self._writer.plan.publication)
                wait_s = max(wait_s, NEW_SLOT_TIMEOUT_S)
                continue
            waited_s = self._late_copies.take_waited_s() if self._late_copies else 0.0
            stall_s = capture_s + waited_s + time.monotonic() - began
            report = partial(self._report_copied, slot, n, SnapshotCost(stall_s, self._due.every, self._due.is_auto))
            if late and rest:
                late.start(rest, captured.leaves, self._writer.copy, report)
            else:
                report(True)
            return True
        return False

    def _report_copied(self, slot: int, n: int, cost: SnapshotCost, is_intact: bool) -> None:
        """Tell the agent that a slot is filled, or that its copy came to nothing."""
        if is_intact:
            self._connection.report_filled(slot, n, cost)
        else:
            self._connection.report_progress(n, skipped=True)

    def _scheduled_slot(self, n: int) -> int | None:
        """The slot for step `n`. Waits for a commit decision as long as the wait budget allows."""
        started = time.monotonic()
        wait_s = self._wait_budget.remaining_s(started)
        slot = self._connection.slot_for_scheduled_step(n, wait_s)
        self._wait_budget.spend(time.monotonic() - started)
        return slot

    def _make_plan(self, captured: CapturedState, publication: Publication) -> None:
        """Plan the shard, and request slots for it."""
        replicas = find_replicas(self._states, captured.leaves, publication.world_size)
        self._plan = ShardPlan(captured, publication, self._min_object_bytes, replicas, self._structure)
        if self._late_copies is not None:
            self._late_copies.begin_plan(captured.leaves)
        self._request_slots(self._plan)

    def _request_slots(self, plan: ShardPlan) -> None:
        """Request slots for a plan."""
        self._close_writer()
        shared_bytes = plan.compared_bytes if plan.replica_group else 0
        refused = self._connection.request_slots(plan.bytes, plan.header_offset, shared_bytes)
        if refused and not self._refused:
            log.error("no snapshots: %s", refused)
        self._refused, self._asked_at = refused, time.monotonic()
        self._writer = None if refused else SnapshotWriter(plan, self._connection.slots)
