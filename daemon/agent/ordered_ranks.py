"""The ranks of this node, and what the newest order wants of them.

Every order and every change on the node ends in `converge`. It asks `reconcile.next_steps` for steps and carries them
out until no step is left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from muster.daemon.agent.ending import Lifetime
from muster.daemon.agent.ranks import reconcile
from muster.daemon.agent.ranks.rank_supervisor import RankSupervisor
from muster.daemon.host.process import log_format
from muster.v1.agent_pb2 import Order

log = logging.getLogger(__name__)


class OrderedRanks:
    """What has been fenced, killed and started on `node`.

    Args:
        fence_store: ends the service to ranks up to a generation: nothing of them is replicated or committed any more.
        status_changed: called when the coordinator must know.

    order: the newest order; None: none has come.
    fenced_generation: no process of a generation up to this one is left.
    killed_generation: ranks of generations up to this one have been sent SIGKILL.
    misfit: why no ranks run here from now on; empty: they may.
    """

    def __init__(
        self,
        node: str,
        supervisor: RankSupervisor,
        fence_store: Callable[[int], None],
        lifetime: Lifetime,
        status_changed: Callable[[], None],
    ) -> None:
        self._node = node
        self._supervisor = supervisor
        self._fence_store = fence_store
        self._lifetime = lifetime
        self._status_changed = status_changed
        self._converging = False
        self.order: Order | None = None
        self.fenced_generation = 0
        self.killed_generation = 0
        self.misfit = ""

    def follow(self, order: Order) -> None:
        """From now on, this is the newest order."""
        self.order = order
        log_format.about_all["generation"] = order.generation
        self.converge()

    def converge(self) -> None:
        """Carry out steps until none is left. A step may call this function again; only the outermost call works."""
        if self._converging or self.order is None or self._lifetime.ended.done():
            return
        self._converging = True
        try:
            while steps := self._next_steps(self.order):
                for step in steps:
                    self._carry_out(step, self.order)
                if any(isinstance(step, reconcile.ExitAgent) for step in steps):
                    return
        finally:
            self._converging = False

    def is_carried_out(self) -> bool:
        """Whether the newest order is carried out."""
        return self.order is not None and reconcile.is_carried_out(self._local_state(), self.order)

    def self_fence(self, why: str) -> None:
        """Kill this node's ranks without waiting for an order."""
        alive = [rank.generation for rank in self._supervisor.ranks() if rank.alive]
        if alive and max(alive) > self.killed_generation:
            log.error("killing all ranks: %s", why)
            self.killed_generation = max(alive)
            self._supervisor.kill_ranks(self.killed_generation)
            self.converge()
            self._status_changed()

    def run_none(self, misfit: str) -> None:
        """Another process does not fit this one: run no ranks from now on. The coordinator decides what becomes of the
        gang."""
        if not self.misfit:
            self.misfit = misfit
            log.error("%s", misfit)
            self.self_fence(misfit)
            self._status_changed()

    def _next_steps(self, order: Order) -> list[reconcile.Step]:
        steps = reconcile.next_steps(self._local_state(), order)
        return [step for step in steps if not (self.misfit and isinstance(step, reconcile.StartRanks))]

    def _local_state(self) -> reconcile.LocalState:
        return reconcile.LocalState(
            node=self._node,
            fenced_generation=self.fenced_generation,
            killed_generation=self.killed_generation,
            ranks=self._supervisor.ranks(),
            store_generation=self._supervisor.store_generation(),
        )

    def _carry_out(self, step: reconcile.Step, order: Order) -> None:
        log.debug("step: %s", step)
        match step:
            case reconcile.KillRanks(generation):
                self.killed_generation = generation
                self._supervisor.kill_ranks(generation)
            case reconcile.ReportFenced(generation):
                self._fence_store(generation)
                self.fenced_generation = generation
                self._status_changed()
            case reconcile.OpenStore(generation):
                self._supervisor.open_store(generation)
            case reconcile.CloseStore():
                self._supervisor.close_store()
            case reconcile.StartRanks():
                self._supervisor.start_ranks(step, order)
            case reconcile.ExitAgent(exit_code, reason):
                reason = reason or "the coordinator ordered it"
                self._lifetime.end(exit_code, reason, keep_memory=order.requeued, job_over=order.job_over)
