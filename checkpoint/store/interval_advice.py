"""On rank 0's node: what snapshots cost, as its messages say, and the interval that it is told if it wants to be."""

import asyncio

from muster.checkpoint.store.commit.commit_protocol import CommitProtocol
from muster.checkpoint.store.rank_sockets import RankSockets
from muster.v1.agent_pb2 import SnapshotCost
from muster.v1.rank_pb2 import AgentInterval, AgentRankMessage, RankMessage


class IntervalAdvice:
    """Speaks with rank 0 of the running generation. `commit` has the costs of that generation."""

    def __init__(self, sockets: RankSockets, commit: CommitProtocol) -> None:
        self._sockets, self._commit = sockets, commit
        self.begin_generation()

    def begin_generation(self) -> None:
        """A new generation runs."""
        self._advised = AgentInterval()
        """What its rank 0 was told last."""

    def note(self, message: RankMessage) -> None:
        """Take what a message of rank 0 says of the pace of the training and of its snapshots."""
        costs = self._commit.costs
        match message.WhichOneof("body"):
            case "progress":
                costs.note_step(message.progress.step, asyncio.get_running_loop().time())
            case "declared":
                costs.note_pause()
            case "filled":
                filled = message.filled
                costs.note_snapshot(filled.stall_us / 1e6, filled.every, auto=filled.auto_interval)
                costs.slots_s = filled.slots_us / 1e6 or costs.slots_s

    def advise(self) -> None:
        """Tell rank 0 of this node the best interval of snapshots, if it leaves the interval to Muster."""
        costs = self._commit.costs
        advice = AgentInterval(every=costs.choose(), period=costs.period())
        if costs.auto and advice != self._advised:
            self._advised = advice
            self._sockets.send_in(self._commit.order.generation, 0, AgentRankMessage(interval=advice))

    def costs(self) -> SnapshotCost | None:
        """What snapshots cost; None: nothing was measured in this generation."""
        costs = self._commit.costs
        if not costs.every:
            return None
        return SnapshotCost(
            every=costs.every,
            auto_interval=costs.auto,
            stall_us=round(costs.stall_s * 1e6),
            step_us=round(costs.step_s * 1e6),
            slots_us=round(costs.slots_s * 1e6),
            delay_us=round(costs.delay_s * 1e6),
        )
