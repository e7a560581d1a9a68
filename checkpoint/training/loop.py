"""The three lines in a user's training loop.

    checkpoint = Checkpoint(model=ddp, optimizer=optimizer, sampler=sampler)
    done = checkpoint.restore(warmup=lambda: loss_of(first_batch).backward())
    ...
    if not checkpoint.step(done): break

Outside Muster the same lines run: no snapshot is taken, and `restore` starts from step 0 or from a durable folder.
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training import resume
from muster.checkpoint.training.agent_connection import AgentConnection, StartPoint
from muster.checkpoint.training.agent_shards import AgentShards
from muster.checkpoint.training.agreements.planned_stop import PlannedStop
from muster.checkpoint.training.agreements.process_group import rank_and_world_size, ranks_with_store
from muster.checkpoint.training.borrowed_pages import BorrowedPages
from muster.checkpoint.training.due_steps import AUTO, DueSteps
from muster.checkpoint.training.durable_loading import named_checkpoint
from muster.checkpoint.training.durable_loading.load_progress import LoadProgress
from muster.checkpoint.training.durable_loading.newest_intact import find_together, load_newest_intact
from muster.checkpoint.training.finite_values import not_finite
from muster.checkpoint.training.planning.publication import Publication
from muster.checkpoint.training.planning.shard_plan import leaf_directory
from muster.checkpoint.training.rank_signals import reported_numbers
from muster.checkpoint.training.rank_signals.flop_count import FlopCount
from muster.checkpoint.training.rank_signals.reported_numbers import ReportedNumbers
from muster.checkpoint.training.rank_signals.step_timer import HostClock, StepTimer
from muster.checkpoint.training.states.training_state import TrainingState
from muster.checkpoint.training.step_keeper import StepKeeper
from muster.checkpoint.training.wait_budget import WaitBudget
from muster.wording import counted

log = logging.getLogger(__name__)

AFTER_LAST_STEP, RESTORING = "after the last step", "restoring its state"
"""Phases that this module declares. In these phases no rank waits for another one."""


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
        total_steps: the last step of the training. Muster then says when it will be done.
        count_flops: have PyTorch count the floating-point operations of one step, once, from which Muster computes MFU
            where job.toml has no [model]. Also by MUSTER_COUNT_FLOPS=1.
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
        total_steps: int = 0,
        count_flops: bool = False,
        link: AgentConnection | None = None,
        host_time: Callable[[], float] = time.monotonic,
        **states: Any,
    ) -> None:
        if every != AUTO and (not isinstance(every, int) or every < 1):
            raise CheckpointError(f'every={every!r}: a number of steps, 1 or more, or "{AUTO}"')
        if not 0 <= wait_share <= 1:
            raise CheckpointError(f"wait_share={wait_share}: a share of the time, 0 (never wait) to 1")
        self._due = DueSteps(None if every == AUTO else int(every), partial(ranks_with_store, "interval"))
        self._states = TrainingState(states, per_rank, differs_in)
        self._connection = link or AgentConnection.from_environment()
        self._numbers = ReportedNumbers(link.send_page) if link is not None else reported_numbers.of_process()
        if self._numbers is not None:
            self._numbers.set_total(total_steps)
            if (sampler := self._states.step_counter) is not None:
                self._numbers.set_sampler(lambda: getattr(sampler, "position", None))
        counts = self._numbers is not None and (count_flops or os.environ.get("MUSTER_COUNT_FLOPS") == "1")
        self._flop_count = FlopCount() if counts else None
        self._keeper: StepKeeper | None = None
        if self._connection is not None:
            self._connection.first_due = self._due.first_due
            self._keeper = StepKeeper(self._states, self._connection, self._due, WaitBudget(wait_share), overlap)
        self._planned_stop: PlannedStop | None = None
        self._phases: list[str] = []
        self._host_clock = HostClock(host_time)
        self._timer: StepTimer | None = None
        self._has_timer = False
        self._reported_not_finite = False
        self._finished_steps = 0
        self._was_restored = False
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
            durable: a checkpoint, or a folder of checkpoints, of which the newest one of this job is loaded (see
                `named_checkpoint.find_for_script`); a path or a URL. It is used when Muster has no state to start from.
            trust_durable_store: whoever may write to the store of objects that `durable` names is trusted. To load a
                checkpoint runs what it says, and such a store does not say who has written it.

        Returns:
            The number of finished steps: 0 for a fresh start.

        Raises:
            RestoreError: a state to start from exists and can't be had.
            CheckpointError: the state doesn't fit the objects.
        """
        self._was_restored = True
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
            if start.skip_to_step > step:
                log.info("the batches of steps %d to %d are skipped", step + 1, start.skip_to_step)
                self._states.finish_steps(start.skip_to_step - step)
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
        assert self._connection is not None
        assert self._keeper is not None
        if start.shard is not None:
            pages = self._keeper.borrowed_pages = BorrowedPages()
            directory = leaf_directory(start.shard)
            step = resume.from_shard(self._states, start.shard, directory, rank, pages)
            self._keeper.publication = Publication.of_shard(start.shard, directory)
            pages.copy_in_use()
        else:
            step = resume.from_shards(self._states, AgentShards(self._connection), rank)
        self._keeper.are_replicas_equal = True
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

    def step(
        self,
        n: int,
        *,
        final: bool = False,
        loss: Any = None,
        gradient_norm: Any = None,
        tokens: Any = None,
        lr: Any = None,
        **numbers: Any,
    ) -> bool:
        """Report that `n` optimizer steps are finished, and take a snapshot if one is due.

        Args:
            n: finished steps, counted from the start of the training.
            final: this is the last step. Its snapshot waits for a slot, and no hang is looked for afterwards.
            loss, gradient_norm: of this step, as numbers or tensors. Muster shows them, and reports the first that is
                NaN or infinite. A GPU is waited for only after a snapshot, as it is anyway; otherwise they are shown
                some steps late.
            tokens: how many tokens this rank has read in this step. lr: the learning rate.
            numbers: others of the script's own, which Muster shows by their names, at most 32 in all.

        Returns:
            True: go on. False: a planned stop; the state is kept, exit with status 0.

        Raises:
            CheckpointError: the number is not larger than the last one, `restore` was not called, or the steps did not
                read the batches that a sampler counts for them.
        """
        if n <= self._finished_steps:
            finished = counted(self._finished_steps, "step is", "steps are")
            raise CheckpointError(
                f"step({n}): {finished} finished already; call it once after each step of the optimizer, with "
                "the number of finished steps, and begin with what restore() has returned"
            )
        if self._connection is not None and not self._was_restored:
            raise CheckpointError(
                f"step({n}) without restore(): call restore() before the first step, on all ranks. After a fault it "
                "loads the newest state, which a run from the beginning would replace"
            )
        self._states.finish_steps(n - self._finished_steps)
        self._finished_steps = n
        if self._connection is None or self._keeper is None:
            return True
        self._keeper.wait()  # for late copies, if no optimizer has made a step since
        self._connection.read_pending()
        self._due.advise(*self._connection.advised_interval)
        due = self._due.is_due(n)  # without an agent, too: the other ranks may wait for rank 0's answer
        if not self._connection.alive:
            return True
        self._end_timed_step(n)
        stop = self._is_stop_due(n)
        # Before the copy: the gang runs from its first step on, and planning takes time.
        self._report_finished(n)
        if self._numbers is not None:
            self._numbers.note(n, {"loss": loss, "gradient_norm": gradient_norm, "tokens": tokens, "lr": lr, **numbers})
        if (final or stop or due) and self._keeper.take(n, last=final or stop):
            self._report_not_finite(n, {"loss": loss, "gradient norm": gradient_norm})
        if self._timer is not None:
            self._timer.begin_step()
        if self._flop_count is not None:
            self._count_flops(self._flop_count)
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
        if self._flop_count is not None:
            self._flop_count.close()
        if self._timer is not None:
            self._timer.close()
        if self._keeper is not None:
            self._keeper.close()
        if self._connection is not None:
            self._connection.close()

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

    def _count_flops(self, count: FlopCount) -> None:
        """Count those of the step that begins, or report those of the step that has ended."""
        assert self._numbers is not None
        if not count.step_finished():
            self._numbers.set_flops(count.flops)
            self._flop_count = None
        elif self._timer is not None:
            self._timer.void_step()  # it is slow

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


def _durable_source(start: StartPoint, durable: str) -> str | None:
    """The durable checkpoint to load; None if there is none, or if the state is in memory."""
    if start.is_in_memory:
        return None
    if start.durable_path:
        found = named_checkpoint.find(start.durable_path)
        if start.skip_to_step and found != start.durable_path:  # a newer one has what the job goes back from
            raise CheckpointError(
                f"{start.durable_path}, to which the job goes back, is no complete checkpoint any more"
            )
        return found
    return find_together(durable, os.environ.get("MUSTER_JOB", ""))
