"""An agent's whole status, put together from all who know something of its node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from muster.checkpoint.store.checkpoint_service import CheckpointService
from muster.daemon.agent.ending import WindDown
from muster.daemon.agent.failure_detector.peer_monitor import PeerMonitor
from muster.daemon.agent.failure_detector.peers import PeerService
from muster.daemon.agent.ordered_flush import OrderedFlush
from muster.daemon.agent.ordered_ranks import OrderedRanks
from muster.daemon.agent.own_node_check import OwnNodeCheck
from muster.daemon.agent.pool_jobs import PoolRequests
from muster.daemon.agent.ranks.rank_idleness import RankIdleness
from muster.daemon.agent.ranks.rank_supervisor import RankSupervisor
from muster.daemon.agent.ranks.stack_dumps import StackDumps
from muster.daemon.agent.training.node_use import NodeUseRecord
from muster.daemon.agent.training.training_record import TrainingRecord
from muster.daemon.transport.job_limits import MAX_STDERR_BYTES
from muster.v1.agent_pb2 import AgentStatus, RankPhase, RankStatus


@dataclass(frozen=True, slots=True)
class OwnStatus:
    """Who knows what. `lacks`: what this node lacks for the job; empty: nothing."""

    lacks: str
    ranks: OrderedRanks
    supervisor: RankSupervisor
    rank_statuses: RankStatuses
    stacks: StackDumps
    checkpoints: CheckpointService
    flush: OrderedFlush
    wind_down: WindDown
    peer_monitor: PeerMonitor
    peer_service: PeerService
    pool: PoolRequests
    node_check: OwnNodeCheck
    training: TrainingRecord
    use: NodeUseRecord

    def read(self) -> AgentStatus:
        """The status now."""
        ranks, supervisor, checkpoints, flush = self.ranks, self.supervisor, self.checkpoints, self.flush
        listening = supervisor.store if supervisor.store is not None and supervisor.store.port else None
        return AgentStatus(
            fenced_generation=ranks.fenced_generation,
            ranks=self.rank_statuses.read(ranks.fenced_generation, ranks.killed_generation),
            shards=checkpoints.shards(),
            parities=checkpoints.combined(),
            committed=checkpoints.committed(),
            store_port=listening.port if listening is not None else 0,
            store_generation=listening.generation if listening is not None else 0,
            warm=supervisor.ready_zygotes(),
            heard_ms=self.peer_monitor.heard_ms(),
            answered_ms=self.peer_service.answered_ms(),
            flushed_serial=flush.ended_serial,
            flush_error=flush.error,
            order_serial=ranks.order.serial if ranks.order is not None and ranks.is_carried_out() else 0,
            failure=self.wind_down.failure or self.lacks or ranks.misfit or supervisor.failure,
            notice=self.wind_down.notice,
            pool=self.pool.answers(),
            store_reserved=listening is not None and not listening.hosted,
            stacks_generation=self.stacks.generation,
            disagreement=checkpoints.disagreement(),
            node_check=self.node_check.status,
            transfers=checkpoints.transfers(),
            snapshot_cost=checkpoints.snapshot_cost(),
            no_slots=checkpoints.no_slots,
            copies_wait=checkpoints.copies_wait,
            flushed_version=flush.version,
            corrupt_copies=checkpoints.corrupt_copies(),
            restore=checkpoints.restore_progress(),
            flush_progress=checkpoints.flush_progress(),
            training=self.training.status,
            use=self.use.status,
        )


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
        # An end with 0 is not in the newest statuses yet.
        self._exit_withheld = False
        self._ranks_with_steps: frozenset[int] = frozenset()

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
        self._exit_withheld = bool(digesting)
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

    def is_awaited(self) -> bool:
        """Whether the gang waits for what the store has learned since: the first step of a generation, or what follows
        the last one."""
        before, self._ranks_with_steps = self._ranks_with_steps, frozenset(self._store.progress())
        first_step = self._ranks_with_steps != before
        return first_step or self._exit_withheld or self._store.rank_reports.any_stopped()

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


def limit_stderr(ranks: Iterable[RankStatus], most_bytes: int = MAX_STDERR_BYTES) -> None:
    """Remove the stderr of the ranks after the first `most_bytes` of it: the first ranks explain what happened.

    A status must fit into one message, also if very many ranks end at once."""
    left = most_bytes
    for rank in ranks:
        left -= len(rank.stderr_tail.encode())
        if left < 0:
            rank.stderr_tail = ""
