"""The three lines in a user's training loop.

    checkpoint = Checkpoint(model=ddp, optimizer=optimizer, sampler=sampler)
    done = checkpoint.restore(warmup=lambda: loss_of(first_batch).backward())
    ...
    if not checkpoint.step(done): break

Outside Muster the same lines run: nothing is kept in memory, and `restore` begins afresh or from a durable folder.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from muster.checkpoint.format import durable_folders as disk
from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training import resume
from muster.checkpoint.training.agent_connection import AgentConnection, StartPoint
from muster.checkpoint.training.planned_stop import Stop
from muster.checkpoint.training.publication import Publication, agree, place
from muster.checkpoint.training.shard_plan import ObjectOutgrown, ShardPlan, signature
from muster.checkpoint.training.snapshot import SnapshotWriter
from muster.checkpoint.training.training_state import STRUCTURE, CapturedState, Leaf, TrainingState
from muster.checkpoint.training.wait_budget import WaitBudget

log = logging.getLogger(__name__)

LAST_SLOT_S = 30.0
"""How long the last snapshot waits for a free slot."""

LAST_PHASE, RESTORING = "after the last step", "restoring its state"
"""Phases that are declared here. No rank waits for another in them."""

FIRST_SLOT_S = 5.0
"""How long a snapshot waits for the first of new slots: the agent says so at once."""


class Checkpoint:
    """Keeps a training loop's state in memory, step by step, and brings it back.

    Args:
        every: snapshot each time that many steps are finished.
        per_rank: names of the states that differ from rank to rank; None: all but models, optimizers, schedulers and
            gradient scalers.
        wait_share: of the training time that may go into waiting for commits, 1 s in one go at most. Where it is used
            up, a step is skipped whose turn comes before the last one is committed.
        link: the line to the agent; by default the one that the environment names, if any.
        states: whatever has state_dict() and load_state_dict(), by name. The random generators need no naming.

    Raises:
        CheckpointError: a state has no state_dict, or a name or a number can't be used.
    """

    def __init__(
        self,
        *,
        every: int = 1,
        per_rank: Collection[str] | None = None,
        wait_share: float = 0.05,
        link: AgentConnection | None = None,
        **states: Any,
    ) -> None:
        if every < 1:
            raise CheckpointError(f"every={every}: a snapshot can be taken every 1 step or more")
        if not 0 <= wait_share <= 1:
            raise CheckpointError(f"wait_share={wait_share}: a share of the time, 0 (never wait) to 1")
        self._every = every
        self._waiting = WaitBudget(wait_share)
        self._states = TrainingState(states, per_rank)
        self._connection = link or AgentConnection.from_environment()
        self._snapshots: SnapshotWriter | None = None
        self._plan: ShardPlan | None = None
        self._room: dict[str, int] = {}
        self._stop: Stop | None = None
        self._phases: list[str] = []

    def restore(self, warmup: Callable[[], Any] | None = None, durable: str | Path | None = None) -> int:
        """Load the state that this generation starts from.

        Args:
            warmup: one forward and backward pass, run before the state is loaded where there is one to load:
                DistributedDataParallel rebuilds its buckets after its first backward pass, so that without it the
                resumed run sums gradients in another order than an unbroken one. Its gradients are thrown away.
            durable: a checkpoint folder, or a folder of them, of which the newest is taken (see `durable.newest`), for
                a start that Muster has no state for.

        Returns:
            The number of finished steps: 0 for a fresh start.

        Raises:
            RestoreError: there is a state to start from, and it can't be had. CheckpointError: it doesn't fit.
        """
        with self.phase(RESTORING):
            start = self._connection.join() if self._connection else StartPoint()
        folder = _source(start, str(durable or ""))
        if start.shard is None and folder is None:
            return 0
        self._warm(warmup)
        with self.phase(RESTORING):
            step = self._load(start, folder)
        log.info("starting after step %d, from %s", step, "memory" if start.shard is not None else folder)
        return step

    def _load(self, start: StartPoint, folder: Path | None) -> int:
        rank, _ = place()
        if start.shard is None:
            assert folder is not None
            return resume.from_folder(self._states, folder, rank)
        step = resume.from_shard(self._states, start.shard, rank)
        if step != start.step:
            raise CheckpointError(f"the agent gave step {step} for step {start.step}")
        return step

    def _warm(self, warmup: Callable[[], Any] | None) -> None:
        if warmup is not None:
            warmup()
            self._states.forget_gradients()
        elif self._states.data_parallel():
            log.warning(
                "restoring without a warmup: DistributedDataParallel will sum gradients in another order than an "
                "unbroken run, and the results may differ in their last bits; give restore() a warmup"
            )

    def step(self, n: int, *, final: bool = False) -> bool:
        """Say that `n` optimizer steps are finished, and snapshot the state where that is due.

        Args:
            n: finished steps, counted from the start of the training.
            final: this is the last step: it is kept whatever was skipped before. What follows it is no hang.

        Returns:
            True: go on. False: a planned stop; the state is kept, leave with status 0.
        """
        if self._connection is None or not self._connection.alive:
            return True
        self._connection.listen()
        stop = self._stops(n)
        if final or stop or n % self._every == 0:
            self._snapshot(n, LAST_SLOT_S if final or stop else 0.0)
        else:
            self._connection.progress(n)
        if final:
            self._enter(LAST_PHASE)
        if stop:
            log.info("stopping after step %d: %s", n, self._connection.stop_reason)
        return not stop

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Declare that this rank finishes no step in the `with` block: an evaluation, a compilation, a checkpoint of
        your own. While any rank is in such a phase, no hang is looked for. They may be nested; the inner one is shown.

        Raises:
            CheckpointError: the name is empty.
        """
        if not name.strip():
            raise CheckpointError('a phase needs a name, for example "evaluation"')
        self._enter(name)
        try:
            yield
        finally:
            self._phases.remove(name)
            self._declare()

    def close(self) -> None:
        """Let go of the agent; the state that it has stays kept."""
        if self._connection is not None:
            self._connection.close()

    def _enter(self, phase: str) -> None:
        self._phases.append(phase)
        self._declare()

    def _declare(self) -> None:
        if self._connection is not None:
            self._connection.declare(self._phases[-1] if self._phases else "")

    def _stops(self, n: int) -> bool:
        assert self._connection is not None
        if self._stop is None:
            self._stop = Stop(*place())
        return self._stop.due(bool(self._connection.stop_reason), n)

    def _snapshot(self, n: int, wait_s: float) -> None:
        """Copy the present state into a free slot; where none comes in time, say that it is skipped.

        `wait_s`: any slot will do, and is waited for so long; 0: the step is kept in turn, as `_granted` says.
        """
        assert self._connection is not None
        # Said before the copy: whoever waits for the first step need not wait for planning.
        self._connection.progress(n)
        captured = self._states.capture(place()[0], n)
        # Before anything that differs from rank to rank: where names or shapes are new, all ranks must plan.
        if self._plan is None or self._plan.signature != signature(captured.leaves):
            self._lay_out(captured, agree([*captured.leaves, Leaf(tuple(STRUCTURE.split(".")), None)]))
            wait_s = max(wait_s, FIRST_SLOT_S)
        if not self._write(n, captured, wait_s):
            self._connection.progress(n, skipped=True)

    def _write(self, n: int, captured: CapturedState, wait_s: float) -> bool:
        """Fill a slot; False where none is free."""
        assert self._connection is not None
        every = self._every
        while self._snapshots is not None:
            slot = self._connection.any_slot(n, every, wait_s) if wait_s else self._granted(n)
            if slot is None:
                return False
            try:
                self._snapshots.write(slot, captured.leaves)
            except ObjectOutgrown as grown:
                name, size = grown.args
                self._room[name] = 2 * size
                # What is published stays the same, so this is no other rank's affair.
                self._lay_out(captured, self._snapshots.plan.publication)
                wait_s = max(wait_s, FIRST_SLOT_S)
                continue
            self._connection.filled(slot, n)
            return True
        return False

    def _granted(self, n: int) -> int | None:
        """The slot for step `n`; a commit under way is waited for, for a while."""
        assert self._connection is not None
        asked_at = time.monotonic()
        slot = self._connection.granted_slot(n, self._every, self._waiting.left_s(asked_at))
        self._waiting.spent(time.monotonic() - asked_at)
        return slot

    def _lay_out(self, captured: CapturedState, publication: Publication) -> None:
        """Lay the state out and get slots for it."""
        assert self._connection is not None
        self._plan = ShardPlan(captured, publication, self._room)
        refused = self._connection.ask_slots(self._plan.bytes, self._plan.header)
        if refused:
            log.error("no snapshots: %s", refused)
        self._snapshots = None if refused else SnapshotWriter(self._plan, self._connection.slots)


def _source(start: StartPoint, durable: str) -> Path | None:
    """The durable checkpoint to load; None: there is none, or a state in memory."""
    if start.shard is not None:
        return None
    return _folder(start.durable_path) if start.durable_path else _alike(durable)


def _alike(path: str) -> Path | None:
    """What rank 0 finds at `path`, for all ranks: another gang may complete a checkpoint there while they look.

    Raises:
        CheckpointError: as `_folder` does, on all ranks.
    """
    if not path or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return _folder(path)
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [_folder(path)]
        except CheckpointError as error:
            found = [error]
    dist.broadcast_object_list(found)
    if isinstance(found[0], CheckpointError):
        raise found[0]
    return Path(found[0]) if found[0] else None


def _folder(path: str) -> Path | None:
    """The checkpoint that a path leads to; None where there is none yet.

    A path that names a version which isn't there leads to a newer one of the same gang beside it: a flush of a running
    gang writes what is newest by then. A name of before has no gang, and leads nowhere else.

    Raises:
        CheckpointError: the path names one checkpoint, and neither that nor a newer one is whole.
    """
    if not path:
        return None
    named, found = disk.parse_folder_name(Path(path).name), disk.newest_checkpoint(Path(path))
    if found is not None or named is None:
        return found
    beside = disk.newest_checkpoint(Path(path).parent, named.gang) if named.gang else None
    label = disk.parse_folder_name(beside.name) if beside is not None else None
    if label is None or label.version <= named.version:
        raise CheckpointError(f"{path} is no whole checkpoint: it has no {disk.METADATA}")
    return beside
