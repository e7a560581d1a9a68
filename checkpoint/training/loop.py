"""The three lines in a user's training loop.

    checkpoint = Checkpoint(model=ddp, optimizer=optimizer, sampler=sampler)
    done = checkpoint.restore(warmup=lambda: loss_of(first_batch).backward())
    ...
    if not checkpoint.step(done): break

Outside Muster the same lines run: no snapshot is taken, and `restore` starts from step 0 or from a durable folder.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from muster.checkpoint.durable import locations
from muster.checkpoint.durable.newest import newest_checkpoint
from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training import agreed_states, resume
from muster.checkpoint.training.agent_connection import AgentConnection, SnapshotCost, StartPoint
from muster.checkpoint.training.borrowed_pages import BorrowedPages
from muster.checkpoint.training.copies.late_copies import LateCopies
from muster.checkpoint.training.due_steps import AUTO, DueSteps, RankInGroup
from muster.checkpoint.training.durable_loading.load_progress import LoadProgress
from muster.checkpoint.training.durable_loading.newest_intact import load_newest_intact
from muster.checkpoint.training.finite_values import not_finite
from muster.checkpoint.training.joint_planning import JointPlanning, RanksWithStore
from muster.checkpoint.training.planned_stop import PlannedStop
from muster.checkpoint.training.publication import Publication, plan_publication, rank_and_world_size
from muster.checkpoint.training.rank_signals.step_timer import HostClock, StepTimer
from muster.checkpoint.training.resharding.agent_shards import AgentShards
from muster.checkpoint.training.shard_plan import ObjectOutgrown, ShardPlan, first_change, signature
from muster.checkpoint.training.snapshot import SnapshotWriter
from muster.checkpoint.training.states.replicas import find_replicas
from muster.checkpoint.training.states.training_state import STRUCTURE, CapturedState, StateLeaf, TrainingState
from muster.checkpoint.training.wait_budget import WaitBudget

log = logging.getLogger(__name__)

FINAL_SLOT_TIMEOUT_S = 30.0
"""Seconds that the last snapshot waits for a free slot."""

AFTER_LAST_STEP, RESTORING = "after the last step", "restoring its state"
"""Phases that this module declares. In these phases no rank waits for another one."""

NEW_SLOT_TIMEOUT_S = 5.0
"""Seconds that a snapshot waits for the first of new slots. The agent grants it at once."""


class Checkpoint:
    """Keeps the state of a training loop in memory, step by step, and restores it.

    Args:
        every: steps between snapshots; "auto": as many as their measured cost and the rate of failures make best, 1 at
            least.
        per_rank: names of the states that differ from rank to rank. None: all states but models, optimizers,
            schedulers, gradient scalers and samplers that count steps.
        differs_in: names under which ranks hold different tensors, such as experts, each with the group of ranks in
            which they differ: {"model.layers.*.experts": expert_group}. None in place of a group: all ranks. The
            optimizer's states follow their parameters.
        wait_share: the share of the training time that may be spent waiting for commits, at most 1 s at a time. When
            it is used up, a step that is due before the last kept step is decided is not kept.
        overlap: parameters and the states of optimizers are copied beside the next forward and backward pass, and no
            later than the optimizer's next step, which waits for it. For scripts in which nothing else changes them.
            The last step and a planned stop are copied at once.
        link: the connection to the agent. Default: the connection that the environment names, if any.
        host_time: the present moment in seconds, by which the steps of models on CPUs are measured.
        states: objects with state_dict() and load_state_dict(), by name. The random generators are kept without a name.

    Raises:
        CheckpointError: a state has no state_dict, or a name or a number is not allowed.
    """

    def __init__(
        self,
        *,
        every: int | Literal["auto"] = 1,
        per_rank: Collection[str] | None = None,
        differs_in: Mapping[str, Any] | None = None,
        wait_share: float = 0.05,
        overlap: bool = False,
        link: AgentConnection | None = None,
        host_time: Callable[[], float] = time.monotonic,
        **states: Any,
    ) -> None:
        if every != AUTO and (not isinstance(every, int) or every < 1):
            raise CheckpointError(f'every={every!r}: a number of steps, 1 or more, or "{AUTO}"')
        if not 0 <= wait_share <= 1:
            raise CheckpointError(f"wait_share={wait_share}: a share of the time, 0 (never wait) to 1")
        self._due = DueSteps(None if every == AUTO else int(every), _join_group)
        self._wait_budget = WaitBudget(wait_share)
        self._states = TrainingState(states, per_rank, differs_in)
        self._connection = link or AgentConnection.from_environment()
        if self._connection is not None:
            self._connection.first_due = self._due.first_due
        self._snapshot_writer: SnapshotWriter | None = None
        self._late_copies = LateCopies(self._states.optimizers().values()) if overlap and self._connection else None
        self._borrowed_pages = BorrowedPages()
        self._plan: ShardPlan | None = None
        self._structure: Any = None
        self._joint_planning = JointPlanning(_ranks_that_plan)
        self._has_compared_replicas = False
        self._min_object_bytes: dict[str, int] = {}
        self._planned_stop: PlannedStop | None = None
        self._phases: list[str] = []
        self._host_clock = HostClock(host_time)
        self._timer: StepTimer | None = None
        self._has_timer = False
        self._reported_not_finite = False
        self._finished_steps = 0
        self._trusts_store = False

    def restore(
        self,
        warmup: Callable[[], Any] | None = None,
        durable: str | Path | None = None,
        *,
        trust_durable_store: bool = False,
    ) -> int:
        """Load the state that this generation starts from.

        Args:
            warmup: one forward and backward pass. It runs before a state is loaded, and its gradients are discarded.
                DistributedDataParallel rebuilds its buckets after its first backward pass. Without the warmup, the
                resumed run would sum gradients in another order than an unbroken run.
            durable: a checkpoint folder, or a folder of checkpoints, of which the newest one is loaded (see
                `newest.newest_checkpoint`); a path or a URL. It is used when Muster has no state to start from.
            trust_durable_store: whoever may write to the store of objects that `durable` names is trusted. To load a
                checkpoint runs what it says, and such a store does not say who has written it.

        Returns:
            The number of finished steps: 0 for a fresh start.

        Raises:
            RestoreError: a state to start from exists and can't be had.
            CheckpointError: the state doesn't fit the objects.
        """
        with self.phase(RESTORING):
            start = self._connection.join() if self._connection else StartPoint()
        named = str(durable or "")
        folder = _durable_source(start, named)
        # Where the agent says what to load, job.toml has said that the store is trusted.
        self._trusts_store = trust_durable_store or bool(start.durable_path)
        if folder is None and not start.is_in_memory:
            return 0
        self._run_warmup(warmup)
        with self.phase(RESTORING):
            # Another checkpoint than the one that the script names is not what its user wants.
            step = self._finished_steps = self._load(start, folder, may_be_older=folder != named)
        return step

    def _load(self, start: StartPoint, folder: str | None, *, may_be_older: bool) -> int:
        """Load what this generation starts from; returns the number of finished steps."""
        rank, _ = rank_and_world_size()
        if folder is not None:
            progress = LoadProgress(self._connection.report_load) if self._connection else LoadProgress()
            trusts = self._trusts_store
            load = partial(resume.from_folder, self._states, rank=rank, progress=progress, trusts_store=trusts)
            step, folder = load_newest_intact(load, folder, progress, may_be_older=may_be_older)
            log.info("starting after step %d, from %s", step, folder)
            return step
        if start.shard is not None:
            self._borrowed_pages = BorrowedPages()
            step = resume.from_shard(self._states, start.shard, rank, self._borrowed_pages)
            self._borrowed_pages.copy_in_use()
        else:
            assert self._connection is not None
            step = resume.from_shards(self._states, AgentShards(self._connection), rank)
        self._has_compared_replicas = True
        if step != start.step:
            raise CheckpointError(f"the agent gave step {step} for step {start.step}")
        log.info("starting after step %d, from memory", step)
        return step

    def _run_warmup(self, warmup: Callable[[], Any] | None) -> None:
        if warmup is not None:
            warmup()
            self._states.clear_gradients()
        elif self._states.has_bucket_rebuild():
            log.warning(
                "restoring without a warmup: DistributedDataParallel will sum gradients in another order than an "
                "unbroken run, and the results may differ in their last bits; give restore() a warmup"
            )

    def step(self, n: int, *, final: bool = False, loss: Any = None, gradient_norm: Any = None) -> bool:
        """Report that `n` optimizer steps are finished, and take a snapshot if one is due.

        Args:
            n: finished steps, counted from the start of the training.
            final: this is the last step. Its snapshot waits for a slot, and no hang is looked for afterwards.
            loss, gradient_norm: of this step, as numbers or tensors. Muster reports the first that is NaN or infinite.
                They are read only after a snapshot, because a GPU is waited for then anyway.

        Returns:
            True: go on. False: a planned stop; the state is kept, exit with status 0.

        Raises:
            CheckpointError: the steps did not read the batches that a sampler counts for them.
        """
        self._states.finish_steps(n - self._finished_steps)
        self._finished_steps = n
        if self._connection is None:
            return True
        if self._late_copies is not None:
            self._late_copies.wait()  # no optimizer has made a step since
        self._connection.read_pending()
        self._due.advise(*self._connection.advised_interval)
        due = self._due.is_due(n)  # without an agent, too: the other ranks may wait for rank 0's answer
        if not self._connection.alive:
            return True
        self._end_timed_step(n)
        stop = self._is_stop_due(n)
        if final or stop or due:
            if self._snapshot(n, last=final or stop):
                self._report_not_finite(n, {"loss": loss, "gradient norm": gradient_norm})
        else:
            self._report_finished(n)
        if self._timer is not None:
            self._timer.begin_step()
        if final:
            self._enter_phase(AFTER_LAST_STEP)
        if stop:
            self._connection.report_stopped(n)
            log.info("stopping after step %d: %s", n, self._connection.stop_reason)
        return not stop

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Declare that this rank finishes no step in the `with` block, for example during an evaluation.

        While any rank is in a declared phase, no hang is looked for. Phases may be nested; the inner one is shown.

        Raises:
            CheckpointError: the name is empty.
        """
        if not name.strip():
            raise CheckpointError('a phase needs a name, for example "evaluation"')
        self._enter_phase(name)
        try:
            yield
        finally:
            self._phases.remove(name)
            self._declare_phase()

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Declare that the script waits for its next batch in the `with` block.

        `muster diagnose` then shows that time by itself. Without it, the time counts as compute.
        """
        began = self._host_clock.note()
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.add_fetch(self._host_clock.between_us(began, self._host_clock.note()))

    def close(self) -> None:
        """Close the connection to the agent. The agent keeps the state that it has."""
        if self._timer is not None:
            self._timer.close()
        if self._late_copies is not None:
            self._late_copies.close()
        self._close_snapshot_writer()
        if self._connection is not None:
            self._connection.close()

    def _close_snapshot_writer(self) -> None:
        if self._snapshot_writer is not None:
            self._snapshot_writer.close()
        self._snapshot_writer = None

    def _enter_phase(self, phase: str) -> None:
        self._phases.append(phase)
        if self._timer is not None:
            self._timer.void_step()
        self._declare_phase()

    def _declare_phase(self) -> None:
        if self._connection is not None:
            self._connection.declare_phase(self._phases[-1] if self._phases else "")

    def _end_timed_step(self, n: int) -> None:
        """The user's part of step `n` is over. The first finished step attaches the timer: the models are in place."""
        if not self._has_timer:
            self._has_timer = True
            if rank_and_world_size()[1] > 1:
                self._timer = StepTimer.of_states(self._states.wrapped.values(), self._host_clock)
        elif self._timer is not None:
            self._timer.end_step(n)

    def _report_finished(self, n: int) -> None:
        """Report a finished step, and the steps that were measured meanwhile."""
        assert self._connection is not None
        self._connection.report_progress(n, step_times=self._timer.measured() if self._timer is not None else ())

    def _is_stop_due(self, n: int) -> bool:
        assert self._connection is not None
        if self._planned_stop is None:
            self._planned_stop = PlannedStop(*rank_and_world_size())
        return self._planned_stop.is_due(bool(self._connection.stop_reason), n)

    def _report_not_finite(self, n: int, values: dict[str, Any]) -> None:
        """Report the first values of this generation that are NaN or infinite."""
        if not self._reported_not_finite and (words := not_finite(values)):
            assert self._connection is not None
            self._reported_not_finite = True
            self._connection.report_not_finite(n, words)

    def _snapshot(self, n: int, *, last: bool) -> bool:
        """Copy the present state into a free slot; report the snapshot as skipped if no slot is free in time, or if the
        state has changed and the ranks have yet to plan. Returns whether it was taken.

        `last`: no snapshot follows. Wait for any slot. Otherwise the step is kept only if it is the one that all ranks
        keep next.
        """
        assert self._connection is not None
        # Reported before the copy: the gang runs from its first step on, and planning takes time.
        self._report_finished(n)
        began = time.monotonic()
        captured = self._states.capture(rank_and_world_size()[0], n)
        capture_s = time.monotonic() - began
        wait_s = FINAL_SLOT_TIMEOUT_S if last else 0.0
        change = self._change(captured)
        # The ranks plan together, so nothing before this depends on the rank's own slots.
        if self._plan is None or self._joint_planning.is_due(change, last=last):
            captured = self._plan_together(n, captured)
            wait_s, change = max(wait_s, NEW_SLOT_TIMEOUT_S), ""
        filled = not change and self._fill_slot(n, captured, wait_s, capture_s, may_be_late=not last)
        if not filled:
            self._connection.report_progress(n, skipped=True)
        return filled

    def _change(self, captured: CapturedState) -> str:
        """The first leaf that the plan does not fit any more; empty: none."""
        found = signature(captured.leaves)
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
        publication = plan_publication([*captured.leaves, StateLeaf(tuple(STRUCTURE.split(".")), None)])
        self._structure = agreed_states.published_structure(self._states, captured)
        if self._plan is None:
            self._joint_planning.begin()
        self._make_plan(captured, publication)
        return captured

    def _compare_replicas(self, n: int, captured: CapturedState) -> None:
        """Compare replicas once in a run: later they are compared by all their bytes."""
        if not self._has_compared_replicas:
            agreed_states.refuse_unequal_replicas(self._states, captured.leaves, n)
        self._has_compared_replicas = True

    def _fill_slot(
        self, n: int, captured: CapturedState, wait_s: float, capture_s: float, *, may_be_late: bool
    ) -> bool:
        """Write the captured state into a slot; returns False if no slot is free.

        `capture_s`: seconds that it took to capture the state. With the copy, and with the wait for an earlier late
        copy, they are what the snapshot costs. `may_be_late`: what only optimizers change may be copied after this.
        """
        assert self._connection is not None
        while self._snapshot_writer is not None:
            slot = self._connection.slot_for_any_step(n, wait_s) if wait_s else self._scheduled_slot(n)
            if slot is None:
                return False
            began = time.monotonic()
            self._borrowed_pages.wait()
            late = self._late_copies if may_be_late and self._late_copies and self._late_copies.usable else None
            try:
                rest = self._snapshot_writer.write(slot, captured.leaves, late.leaves if late else frozenset())
            except ObjectOutgrown as outgrown:
                name, size = outgrown.args
                self._min_object_bytes[name] = 2 * size
                # The publication stays the same, so no other rank has to plan again.
                self._make_plan(captured, self._snapshot_writer.plan.publication)
                wait_s = max(wait_s, NEW_SLOT_TIMEOUT_S)
                continue
            waited_s = self._late_copies.take_waited_s() if self._late_copies else 0.0
            stall_s = capture_s + waited_s + time.monotonic() - began
            report = partial(self._report_copied, slot, n, SnapshotCost(stall_s, self._due.every, self._due.is_auto))
            if late and rest:
                late.start(rest, self._snapshot_writer.copy, report)
            else:
                report(True)
            return True
        return False

    def _report_copied(self, slot: int, n: int, cost: SnapshotCost, is_intact: bool) -> None:
        """Tell the agent that a slot is filled, or that its copy came to nothing."""
        assert self._connection is not None
        if is_intact:
            self._connection.report_filled(slot, n, cost)
        else:
            self._connection.report_progress(n, skipped=True)

    def _scheduled_slot(self, n: int) -> int | None:
        """The slot for step `n`. Waits for a commit decision as long as the wait budget allows."""
        assert self._connection is not None
        started = time.monotonic()
        wait_s = self._wait_budget.remaining_s(started)
        slot = self._connection.slot_for_scheduled_step(n, wait_s)
        self._wait_budget.spend(time.monotonic() - started)
        return slot

    def _make_plan(self, captured: CapturedState, publication: Publication) -> None:
        """Plan the shard, and request slots for it."""
        assert self._connection is not None
        replicas = find_replicas(self._states, captured.leaves, publication.world_size)
        self._plan = ShardPlan(captured, publication, self._min_object_bytes, replicas, self._structure)
        if self._late_copies is not None:
            self._late_copies.begin_plan(captured.leaves)
        self._close_snapshot_writer()
        shared_bytes = self._plan.compared_bytes if self._plan.replica_group else 0
        refused = self._connection.request_slots(self._plan.bytes, self._plan.header_offset, shared_bytes)
        if refused:
            log.error("no snapshots: %s", refused)
        self._snapshot_writer = None if refused else SnapshotWriter(self._plan, self._connection.slots)


def _join_group() -> RankInGroup | None:
    """This rank's place among the ranks of the default process group; None if it is alone."""
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return None
    return RankInGroup(rank, dist.PrefixStore("muster-interval", dist.distributed_c10d._get_default_store()))


def _ranks_that_plan() -> RanksWithStore | None:
    """This rank among all that plan together; None if it is alone."""
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return None
    store = dist.PrefixStore("muster-planning", dist.distributed_c10d._get_default_store())
    return RanksWithStore(rank, world_size, store)


def _durable_source(start: StartPoint, durable: str) -> str | None:
    """The durable checkpoint to load; None if there is none, or if the state is in memory."""
    if start.is_in_memory:
        return None
    return _resolve(start.durable_path) if start.durable_path else _resolve_on_rank_0(durable)


def _resolve_on_rank_0(path: str) -> str | None:
    """The checkpoint that rank 0 finds at `path`, on all ranks.

    Another gang may complete a checkpoint there meanwhile, so ranks that looked by themselves could differ.

    Raises:
        CheckpointError: as `_resolve` does, on all ranks.
    """
    if not path or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return _resolve(path)
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [_resolve(path)]
        except CheckpointError as error:
            found = [error]
        except OSError as error:  # the other ranks wait
            found = [CheckpointError(f"{path} can't be read: {error}")]
    dist.broadcast_object_list(found)
    if isinstance(found[0], CheckpointError):
        raise found[0]
    return str(found[0]) if found[0] else None


def _resolve(path: str) -> str | None:
    """The checkpoint that a path leads to; None if there is none yet.

    If the path names a version that is not there, a newer version of the same gang beside it is found: a flush of a
    running gang may write a newer version than its order names. A name without a gang leads to no other folder.

    Raises:
        CheckpointError: the path names one checkpoint, and neither that checkpoint nor a newer one is complete.
    """
    if not path:
        return None
    place, name = locations.split(path)
    named = durable_folders.parse_folder_name(name)
    found = newest_checkpoint(path)
    if found is not None or named is None:
        return found
    newest = newest_checkpoint(place, named.gang) if named.gang else None
    label = durable_folders.parse_folder_name(locations.split(newest)[1]) if newest is not None else None
    if label is None or label.version <= named.version:
        raise CheckpointError(f"{path} is no complete checkpoint: it has no {durable_folders.METADATA}")
    return newest
