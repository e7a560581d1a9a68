"""The node's crew: its warm processes, and the ranks and the rendezvous store that are forked from them.

Carries out the steps of `converge` and holds what they work on. Every change ends in a call of `changed`; nothing here
blocks the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from muster.daemon.agent.ranks import rank_environment
from muster.daemon.agent.ranks.rank_process import RankId, RankProcess
from muster.daemon.agent.ranks.reconcile import LocalRank, StartRanks
from muster.daemon.agent.ranks.rendezvous_process import RendezvousProcess
from muster.daemon.agent.ranks.zygote_handle import CannotStart, ZygoteHandle, ZygoteSpec, describe
from muster.daemon.host import packets, process_tree
from muster.v1.agent_pb2 import Order, RankStatus

log = logging.getLogger(__name__)

_REAP_AGAIN_S = 0.01
# A warm process that keeps dying while it imports is started without importing anything.
_DEATHS_WARM = 2
_RESTART_S = 0.5
# A store that keeps ending is left to rank 0 to open.
_DEATHS_STORE = 3
_ORPHANS_S = 10.0

# rank, generation -> the rank's end of its socket to this agent
RankSocket = Callable[[int, int], socket.socket]


@dataclass(frozen=True, slots=True)
class NodeJob:
    """What the crew works for. `environment`: of all ranks; `run_dir`: where logs go."""

    gang: str
    node: str
    recipe: ZygoteSpec
    run_dir: str
    ranks_per_node: int


class _Berth:
    """One local rank's warm process, and what has been forked from it and may still be there."""

    def __init__(self) -> None:
        self.warm: ZygoteHandle | None = None
        self.ready = asyncio.Event()
        self.started = False
        # Why no process can be started for it, ever; empty: one can.
        self.refused = ""
        self.children: dict[str, RankProcess | RendezvousProcess] = {}
        self.deaths = 0


class RankSupervisor:
    """All processes of one gang on one node.

    failure: an error that no order can mend, for the user; empty: none.
    """

    def __init__(self, job: NodeJob, rank_socket: RankSocket, changed: Callable[[], None]) -> None:
        self._job = job
        self._rank_socket = rank_socket
        self._changed = changed
        self._berths = [_Berth() for _ in range(job.ranks_per_node)]
        self._ranks: dict[int, RankProcess] = {}
        self._ports: set[int] = set()
        self._store_deaths: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = False
        self.store: RendezvousProcess | None = None
        self.failure = ""

    # --- what stands -------------------------------------------------------------------------------------------------

    def ranks(self) -> tuple[LocalRank, ...]:
        """The newest generation of each rank that was started here, and older ones that still live."""
        return tuple(LocalRank(r.id.rank, r.id.generation, r.alive) for r in self._ranks.values())

    def statuses(self, steps: dict[int, int]) -> Iterator[RankStatus]:
        """The ranks' statuses; `steps`: newest declared step by rank."""
        return (rank.status(steps.get(rank.id.rank)) for rank in self._ranks.values())

    def pids(self, generation: int) -> dict[int, int]:
        """The processes of the ranks of a generation that run, by rank."""
        ranks = [rank for rank in self._ranks.values() if rank.running and rank.id.generation == generation]
        return {rank.id.rank: rank.pid for rank in ranks}

    def ready_zygotes(self) -> int:
        """Number of warm processes that stand ready."""
        return sum(berth.warm is not None and berth.warm.ready for berth in self._berths)

    def store_generation(self) -> int:
        """The generation that a store is open, or opening, for; 0: none."""
        return self.store.generation if self.store is not None and not self.store.ended else 0

    # --- steps -------------------------------------------------------------------------------------------------------

    def start_zygotes(self) -> None:
        """Start warm processes that are missing: one after the other while ranks run, else one a processor."""
        busy = any(rank.alive for rank in self._ranks.values())
        at_once = 1 if busy else (os.cpu_count() or 1)
        starting = sum(berth.started and not berth.ready.is_set() for berth in self._berths)
        for berth in self._berths:
            if not berth.started and not berth.refused and starting < at_once and not self._leaving:
                starting += self._start_warm(berth)

    def start_ranks(self, step: StartRanks, order: Order) -> None:
        """Start ranks; they are counted as alive from now on."""
        for rank, local_rank in step.places:
            started = RankProcess(RankId(rank, local_rank, step.generation), self._changed)
            self._ranks[rank] = started
            if local_rank >= len(self._berths):
                started.fail_start(f"the order places local rank {local_rank} on a node of {len(self._berths)}")
                continue
            berth, place = self._berths[local_rank], self._place(started, order)
            if berth.ready.is_set():
                self._go(berth, started, place)
            else:
                self._later(self._launch(berth, started, place))

    def kill_ranks(self, generation: int) -> None:
        """SIGKILL all ranks of a generation up to `generation`."""
        for rank in self._ranks.values():
            if rank.alive and rank.id.generation <= generation:
                rank.kill()

    def signal_ranks(self, signum: int) -> None:
        """Send a signal to every running rank."""
        for rank in self._ranks.values():
            rank.send_signal(signum)

    def open_store(self, generation: int) -> None:
        """Open a store for `generation` in place of any other, as soon as a process is warm."""
        self.close_store()
        deaths = self._store_deaths.get(generation, 0)
        self._store_deaths = {generation: deaths + 1}
        self.store = RendezvousProcess(generation, self._changed)
        self._place_store(by_itself=deaths < _DEATHS_STORE)

    def close_store(self) -> None:
        """End the store."""
        if self.store is not None:
            self.store.close()
            self.store = None

    async def stop(self) -> None:
        """End everything; returns when all warm processes have ended."""
        self._leaving = True
        self.close_store()
        self.kill_ranks(2**63)
        for task in list(self._tasks):
            task.cancel()
        warms = [berth.warm for berth in self._berths if berth.warm is not None]
        await asyncio.gather(*(warm.stop() for warm in warms))
        await self._end_orphans()

    # --- ranks -------------------------------------------------------------------------------------------------------

    def _place(self, rank: RankProcess, order: Order) -> rank_environment.RankPosition:
        here = sum(place.node == self._job.node for place in order.places)
        nodes = {place.node for place in order.places}
        group_rank = next((m.group_rank for m in order.members if m.node == self._job.node), 0)
        return rank_environment.RankPosition(
            rank=rank.id.rank,
            local_rank=rank.id.local_rank,
            world_size=order.world_size,
            local_world_size=here,
            group_rank=max(group_rank, 0),
            group_world_size=len(nodes),
            master_addr=order.master_addr,
            master_port=order.master_port,
            generation=rank.id.generation,
        )

    async def _launch(self, berth: _Berth, rank: RankProcess, place: rank_environment.RankPosition) -> None:
        # The environment depends on which torch it finds.
        await berth.ready.wait()
        self._go(berth, rank, place)

    def _go(self, berth: _Berth, rank: RankProcess, place: rank_environment.RankPosition) -> None:
        if not rank.alive:
            return  # fenced while the imports went on
        if berth.refused:
            self._fail(rank, berth.refused)
            return
        if berth.warm is None:
            rank.kill()
            return
        rank.forked = True
        berth.children[rank.id.key] = rank
        # Rank 0's node has the store; ranks elsewhere are clients either way.
        hosted = self.store.hosted if self.store is not None else berth.warm.has_torch
        environment = rank_environment.environment_of_rank(
            self._job.recipe.environment,
            place,
            rank_environment.StoreAccess(hosted, berth.warm.has_libuv),
            self._job.gang,
            self._job.run_dir,
        )
        with self._rank_socket(rank.id.rank, rank.id.generation) as sock:
            where = (self._job.run_dir, self._job.gang, rank.id.generation, rank.id.rank)
            berth.warm.run_rank(rank.id.key, environment, where, sock.fileno())

    def _fail(self, rank: RankProcess, words: str) -> None:
        self.failure = words
        log.error("%s can't be started: %s", rank.id.key, words)
        rank.fail_start(words)

    # --- the store ---------------------------------------------------------------------------------------------------

    def _place_store(self, *, by_itself: bool = True) -> None:
        store = self.store
        if store is None or store.port or any(store.key in berth.children for berth in self._berths):
            return
        ready = [berth for berth in self._berths if berth.ready.is_set() and berth.warm is not None]
        host = next((berth for berth in ready if berth.warm is not None and berth.warm.has_torch), None)
        if by_itself and host is not None and host.warm is not None:
            host.children[store.key] = store
            host.warm.open_store(store.key, sorted(self._ports))
        elif ready:
            store.reserve(self._ports)
            self._ports.add(store.port)

    # --- warm processes ----------------------------------------------------------------------------------------------

    def _start_warm(self, berth: _Berth) -> bool:
        recipe = self._job.recipe if berth.deaths < _DEATHS_WARM else self._job.recipe.without_preload()
        warm = ZygoteHandle(partial(self._heard, berth), partial(self._warm_ended, berth))
        try:
            warm.start(recipe)
        except CannotStart as error:
            self.failure = berth.refused = str(error)
            berth.ready.set()  # whoever waits for it is told at once
            self._changed()
            return False
        berth.warm, berth.started = warm, True
        return True

    def _heard(self, berth: _Berth, message: packets.Message) -> None:
        if message["say"] == "ready":
            self._warm_ready(berth, message)
            return
        child = berth.children.get(message["key"])
        if child is None:
            return
        if child.handle_message(message):
            del berth.children[message["key"]]
            if berth.warm is not None:
                berth.warm.reap(message["key"])
        if message["say"] == "store":
            self._ports.add(message["port"])
        if message["say"] == "refused":
            self.failure = message["words"]
            log.error("%s can't be started: %s", message["key"], self.failure)

    def _warm_ready(self, berth: _Berth, message: packets.Message) -> None:
        log.info(describe(message))
        for note in message["notes"]:
            log.warning(note)
        berth.ready.set()
        self._place_store()
        self.start_zygotes()
        self._changed()

    def _warm_ended(self, berth: _Berth) -> None:
        was_ready = berth.ready.is_set()
        berth.ready.clear()
        berth.warm, berth.started = None, False
        berth.deaths += not was_ready
        children = list(berth.children.values())
        berth.children.clear()
        for child in children:
            child.handle_zygote_exit()
        if not self._leaving:
            log.error("a warm process has ended by itself; another is started")
            self._later(self._replace(children))

    async def _replace(self, children: list[RankProcess | RendezvousProcess]) -> None:
        if await self._end_orphans():
            for child in children:
                child.mark_gone()
        await asyncio.sleep(_RESTART_S)
        self.start_zygotes()

    async def _end_orphans(self) -> bool:
        """End what a warm process left behind at its death, which has come to us; whether nothing of it is left."""
        for _ in range(round(_ORPHANS_S / _REAP_AGAIN_S)):
            warm = {berth.warm.pid for berth in self._berths if berth.warm is not None}
            if process_tree.kill_orphans(warm) == 0:
                return True
            await asyncio.sleep(_REAP_AGAIN_S)
        log.error("processes that ranks have left behind can't be ended")
        return False

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a step failed", exc_info=error)
            self.failure = f"muster-agent: {type(error).__name__}: {error}"
            self._changed()
