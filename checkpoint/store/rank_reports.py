"""What the ranks of one node say of themselves in the running generation, beside their checkpoints.

The agent adds it to its status. Every text is cut, and every list is bounded, because a rank may send anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from muster.checkpoint.store.block_times import StepBlocks
from muster.checkpoint.store.rank_silences import COUNT_INTERVAL_S, RankSilences
from muster.v1 import rank_pb2
from muster.v1.agent_pb2 import NotFinite, RankStatus

PHASE_NAME_LETTERS = 64
"""The longest name of a declared phase that is reported. Longer names are cut, to bound the size of a status."""

NOT_FINITE_LETTERS = 128
"""The longest words about a value that is no finite number. Longer ones are cut, for the same reason."""


class RankReports:
    """Runs on the agent's event loop.

    Args:
        on_change: called when `add_to` has something new that can't wait for the next step.
        is_connected: whether a rank still has its connection.
    """

    def __init__(self, on_change: Callable[[], None], is_connected: Callable[[int], bool]) -> None:
        self._on_change = on_change
        self._is_connected = is_connected
        self._timer: asyncio.TimerHandle | None = None
        self.begin_generation()

    def begin_generation(self) -> None:
        """A new generation runs: what the ranks of the old one have said is forgotten."""
        self._stopped: dict[int, int] = {}
        self._phases: dict[int, str] = {}
        self._step_blocks: dict[int, StepBlocks] = {}
        self._not_finite: dict[int, NotFinite] = {}
        self._entered_collectives: dict[int, int] = {}
        self._silences = RankSilences(self._on_change)

    def handle_message(self, rank: int, message: rank_pb2.RankMessage) -> None:
        """Take what a message of a rank of the running generation says. Messages of other kinds say that it lives."""
        self._silences.note_message(rank)
        match message.WhichOneof("body"):
            case "progress":
                self._add_step_times(rank, message.progress.step_times)
            case "declared":
                self._phases[rank] = message.declared.phase[:PHASE_NAME_LETTERS]
                self._on_change()
            case "stopped":
                self._stopped[rank] = message.stopped.step
                self._on_change()
            case "not_finite":
                self.note_not_finite(rank, message.not_finite.step, message.not_finite.words)
            case "alive":
                self._note_sign_of_life(rank, message.alive)

    def note_not_finite(self, rank: int, step: int, words: str) -> None:
        """A rank has said a loss or a gradient norm that is NaN or infinite. The first one of a generation counts."""
        if rank not in self._not_finite:
            self._not_finite[rank] = NotFinite(step=step, words=words[:NOT_FINITE_LETTERS])
            self._on_change()

    def add_to(self, status: RankStatus) -> None:
        """Add all that the rank has said to its status."""
        rank = status.rank
        status.declared_phase = self._phases.get(rank, "")
        status.stopped_step = self._stopped.get(rank, 0)
        if (times := self._step_blocks[rank].times() if rank in self._step_blocks else None) is not None:
            status.block_times.CopyFrom(times)
        if rank in self._not_finite:
            status.not_finite.CopyFrom(self._not_finite[rank])
        if (silent_s := self._silences.reported().get(rank)) is not None:
            status.silent_s = silent_s

    def any_stopped(self) -> bool:
        """Whether a rank that was asked to stop has finished its last step."""
        return bool(self._stopped)

    def entered_collectives(self, rank: int) -> int | None:
        """How many collectives the rank has entered, if it makes no step for some time, and counts them."""
        return self._entered_collectives.get(rank)

    def close(self) -> None:
        """Count no more silences."""
        if self._timer is not None:
            self._timer.cancel()

    def _add_step_times(self, rank: int, step_times: Iterable[rank_pb2.StepTime]) -> None:
        for step_time in step_times:
            self._step_blocks.setdefault(rank, StepBlocks()).add(step_time)

    def _note_sign_of_life(self, rank: int, sign: rank_pb2.RankAlive) -> None:
        self._entered_collectives.pop(rank, None)
        if sign.last:
            self._silences.forget(rank)
            return
        if sign.HasField("entered_collectives"):
            self._entered_collectives[rank] = sign.entered_collectives
        self._silences.note_sign(rank)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COUNT_INTERVAL_S, self._count_silences)

    def _count_silences(self) -> None:
        """Each second while ranks are watched. A rank that has closed its connection is watched no more."""
        for rank in [rank for rank in self._silences.watched() if not self._is_connected(rank)]:
            self._silences.forget(rank)
        self._silences.count_second([rank for rank, phase in self._phases.items() if phase])
        self._timer = None
        if self._silences.watched():
            self._timer = asyncio.get_running_loop().call_later(COUNT_INTERVAL_S, self._count_silences)
