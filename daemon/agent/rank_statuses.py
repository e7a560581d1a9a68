"""The statuses of this node's ranks, put together from all who know something about a rank."""

from __future__ import annotations

from muster.checkpoint.store.checkpoint_service import CheckpointService
from muster.daemon.agent.ranks.rank_idleness import RankIdleness
from muster.daemon.agent.ranks.rank_supervisor import RankSupervisor
from muster.daemon.agent.ranks.stack_dumps import StackDumps
from muster.daemon.agent.status_limits import limit_stderr
from muster.v1.agent_pb2 import RankPhase, RankStatus


class RankStatuses:
    """The ranks of this node.

    Args:
        ordered_collectives: all ranks enter the same collectives, so that their numbers can be compared.
    """

    def __init__(
        self,
        supervisor: RankSupervisor,
        store: CheckpointService,
        idleness: RankIdleness,
        stacks: StackDumps,
        *,
        ordered_collectives: bool,
    ) -> None:
        self._supervisor = supervisor
        self._store = store
        self._idleness = idleness
        self._stacks = stacks
        self._ordered_collectives = ordered_collectives
        self.exit_withheld = False
        """An end with 0 is not in the newest statuses yet."""

    def read(self, fenced_generation: int, killed_generation: int) -> list[RankStatus]:
        """The statuses now.

        A rank that exited with 0 is reported only after all that it kept is reported: if the gang ends with it, the
        last checkpoint is chosen among the reported ones. Ends that this agent causes are reported with the fence,
        after all ranks have ended, so that none looks like a crash. A fault is reported at once.

        Args:
            fenced_generation: no process of a generation up to this one is left.
            killed_generation: ranks of generations up to this one have been sent SIGKILL.
        """
        # Before the steps are read: it reads the last messages of ranks that have ended.
        digesting = {_key(rank) for rank in self._supervisor.statuses({}) if self._is_digesting(rank)}
        self.exit_withheld = bool(digesting)
        ranks = list(self._supervisor.statuses(self._store.progress()))
        idle_quarters = self._idleness.reported()
        for rank in ranks:
            self._store.rank_reports.add_to(rank)
            if _key(rank) in idle_quarters:
                rank.idle_quarters = idle_quarters[_key(rank)]
            if rank.generation == self._stacks.generation:
                self._add_hang_place(rank)
            if _key(rank) in digesting or fenced_generation < rank.generation <= killed_generation:
                rank.phase = RankPhase.RANK_PHASE_RUNNING
        limit_stderr(ranks)
        return ranks

    def _is_digesting(self, rank: RankStatus) -> bool:
        ended_well = rank.phase == RankPhase.RANK_PHASE_EXITED and rank.exit_code == 0
        return ended_well and self._store.is_digesting(rank.rank, rank.generation)

    def _add_hang_place(self, rank: RankStatus) -> None:
        """Where the rank was when its generation hung, and which collective it has come to."""
        if place := self._stacks.places.get(rank.rank):
            rank.hang_place.waits, rank.hang_place.where = place.waits, place.where
        entered = self._store.rank_reports.entered_collectives(rank.rank)
        if entered is not None and self._ordered_collectives:
            rank.entered_collectives = entered


def _key(rank: RankStatus) -> tuple[int, int]:
    return rank.rank, rank.generation
