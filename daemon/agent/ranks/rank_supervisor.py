"""Supervises the zygotes of a node, and the ranks and the rendezvous store that are forked from them.

Carries out the steps of `reconcile` and holds their state. Every change ends in a call of `changed`. Nothing here
blocks the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from muster.daemon.agent.ranks import rank_environment
from muster.daemon.agent.ranks.imports.job_imports import JobImports
from muster.daemon.agent.ranks.rank_places import RankPlaces
from muster.daemon.agent.ranks.rank_process import Outcome, RankId, RankProcess
from muster.daemon.agent.ranks.reconcile import LocalRank, StartRanks
from muster.daemon.agent.ranks.rendezvous_process import RendezvousProcess
from muster.daemon.agent.ranks.zygote_handle import CannotStart, ZygoteHandle, ZygoteSpec, describe
from muster.daemon.host import packets, process_tree, rank_log_files
from muster.v1.agent_pb2 import Order, RankStatus
from muster.wording import counted

log = logging.getLogger(__name__)

_ORPHAN_POLL_S = 0.01
# A zygote that dies so often during its imports is started without imports.
_MAX_PRELOAD_DEATHS = 2
_ZYGOTE_RESTART_S = 0.5
# A store that has ended so often is left for rank 0 to open.
_MAX_STORE_DEATHS = 3
_ORPHAN_TIMEOUT_S = 10.0
_ADDRESS = "tcp://"
"""In an argument: where the ranks are to meet (init_process_group's init_method)."""

# rank, generation -> the rank's end of its socket to this agent
RankSocket = Callable[[int, int], socket.socket]


@dataclass(frozen=True, slots=True)
class NodeJob:
    """What the supervisor runs. `run_dir`: the folder of the logs. `from_script`: a user's own script has
    launched it. Its ranks are told where torch can write down with which error they fail, and may well lack Muster.
    `of_srun`: srun would start its ranks.
    `variables`: those of one local rank alone.
    """

    gang: str
    node: str
    zygote_spec: ZygoteSpec
    run_dir: str
    ranks_per_node: int
    from_script: bool = False
    of_srun: bool = False
    variables: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    @property
    def opens_store(self) -> bool:
        """Whether rank 0 opens the store: the script may choose address and port itself.

        Where a store is open already, torch never opens one at the address that an argument names, and waits for it.
        """
        return self.of_srun or any(_ADDRESS in word for word in self.zygote_spec.argv)


class _LocalZygote:
    """The zygote of one local rank, and its children that may still exist."""

    def __init__(self) -> None:
        self.handle: ZygoteHandle | None = None
        self.ready = asyncio.Event()
        self.started = False
        # Why no zygote can ever be started; empty: no error.
        self.start_error = ""
        self.children: dict[str, RankProcess | RendezvousProcess] = {}
        self.deaths = 0
        # Its interpreter can't run one, so that it runs in the agent's and starts ranks by exec.
        self.is_too_old = False
        # What its imports show to be broken, once it is ready.
        self.broken = ""


class RankSupervisor:
    """All processes of one gang on one node.

    failure: an error that no order can correct, for the user; empty: none.
    `other_children`: pids of children of this process that no rank has left behind. `places`: what ranks are told of
    their place.
    """

    def __init__(
        self,
        job: NodeJob,
        rank_socket: RankSocket,
        changed: Callable[[], None],
        other_children: Callable[[], set[int]] = set,
        places: RankPlaces | None = None,
    ) -> None:
        self._places = places or RankPlaces(job.node)
        self._other_children = other_children
        self._job = job
        self._rank_socket = rank_socket
        self._changed = changed
        self._zygotes = [_LocalZygote() for _ in range(job.ranks_per_node)]
        self._ranks: dict[int, RankProcess] = {}
        self._ports: set[int] = set()
        self._store_deaths: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.imports = JobImports(self._at_once)
        self.store: RendezvousProcess | None = None
        self.failure = ""

    # --- state -------------------------------------------------------------------------------------------------------

    def ranks(self) -> tuple[LocalRank, ...]:
        """The newest generation of each rank that was started here, and older ones that are still alive."""
        return tuple(LocalRank(r.id.rank, r.id.generation, r.alive) for r in self._ranks.values())

    def outcomes(self) -> list[Outcome]:
        """How those ranks go."""
        return [rank.outcome for rank in self._ranks.values()]

    def statuses(self, steps: dict[int, int]) -> Iterator[RankStatus]:
        """The ranks' statuses. `steps`: the newest declared step of each rank."""
        for rank in self._ranks.values():
            status = rank.status(steps.get(rank.id.rank))
            if (gpu := self._places.gpu_of(rank.id.rank)) is not None:
                status.gpu = gpu
            yield status

    def any_alive(self) -> bool:
        """Whether a rank runs, or will start."""
        return any(rank.alive for rank in self._ranks.values())

    def pids(self, generation: int) -> dict[int, int]:
        """The pid of each running rank of this generation."""
        ranks = [rank for rank in self._ranks.values() if rank.running and rank.id.generation == generation]
        return {rank.id.rank: rank.pid for rank in ranks}

    def running_pids(self) -> dict[tuple[int, int], int]:
        """The pid of each running rank, by its number and generation."""
        return {(rank.id.rank, rank.id.generation): rank.pid for rank in self._ranks.values() if rank.running}

    def ready_zygotes(self) -> int:
        """The number of zygotes that are ready to fork."""
        return sum(zygote.handle is not None and zygote.handle.ready for zygote in self._zygotes)

    async def broken_import(self) -> str:
        """The installed module that can't be imported here, and why; empty: none. Returns after the imports."""
        zygote = self._zygotes[0]
        await zygote.ready.wait()
        return zygote.broken

    def store_generation(self) -> int:
        """The generation whose store is open or opening; 0: none."""
        return self.store.generation if self.store is not None and not self.store.ended else 0

    # --- steps -------------------------------------------------------------------------------------------------------

    def start_zygotes(self) -> None:
        """Start missing zygotes: one at a time while ranks run, otherwise one per processor."""
        at_once = self._at_once()
        starting = sum(zygote.started and not zygote.ready.is_set() for zygote in self._zygotes)
        for zygote in self._zygotes:
            if not zygote.started and not zygote.start_error and starting < at_once and not self._stopping:
                starting += self._start_zygote(zygote)

    def _at_once(self) -> int:
        """How many zygotes may import at the same time."""
        return 1 if self.any_alive() else (os.cpu_count() or 1)

    def start_ranks(self, step: StartRanks, order: Order) -> None:
        """Start ranks. They count as alive from now on."""
        ids = [RankId(rank, local_rank, step.generation) for rank, local_rank in step.places]
        positions = self._places.positions(ids, order)
        for identity in ids:
            rank, local_rank = identity.rank, identity.local_rank
            started = RankProcess(identity, self._changed)
            self._ranks[rank] = started
            if local_rank >= len(self._zygotes):
                started.fail_start(f"the order places local rank {local_rank} on a node of {len(self._zygotes)}")
                continue
            zygote, place = self._zygotes[local_rank], positions[rank]
            if zygote.ready.is_set():
                self._fork_rank(zygote, started, place)
            else:
                self._spawn(self._fork_when_ready(zygote, started, place))

    def kill_ranks(self, generation: int) -> None:
        """SIGKILL all ranks of generations up to `generation`."""
        for rank in self._ranks.values():
            if rank.alive and rank.id.generation <= generation:
                rank.kill()

    def signal_ranks(self, signum: int) -> None:
        """Send a signal to every running rank."""
        for rank in self._ranks.values():
            rank.send_signal(signum)

    def open_store(self, generation: int) -> None:
        """Open a store for `generation`, in place of any other, as soon as a zygote is ready."""
        self.close_store()
        deaths = self._store_deaths.get(generation, 0)
        self._store_deaths = {generation: deaths + 1}
        self.store = RendezvousProcess(generation, self._changed)
        self._open_pending_store(hosted=deaths < _MAX_STORE_DEATHS)

    def close_store(self) -> None:
        """End the store."""
        if self.store is not None:
            self.store.close()
            self.store = None

    async def stop(self) -> None:
        """End all processes; return when all zygotes have ended."""
        self._stopping = True
        self.close_store()
        self.kill_ranks(2**63)
        for task in list(self._tasks):
            task.cancel()
        handles = [zygote.handle for zygote in self._zygotes if zygote.handle is not None]
        await asyncio.gather(*(handle.stop() for handle in handles))
        await self._end_orphans()
        self._places.close()

    # --- ranks -------------------------------------------------------------------------------------------------------

    async def _fork_when_ready(
        self, zygote: _LocalZygote, rank: RankProcess, place: rank_environment.RankPosition
    ) -> None:
        # The environment depends on the torch that the zygote finds.
        await zygote.ready.wait()
        self._fork_rank(zygote, rank, place)

    def _fork_rank(self, zygote: _LocalZygote, rank: RankProcess, place: rank_environment.RankPosition) -> None:
        if not rank.alive:
            return  # fenced during the imports
        if zygote.start_error:
            self._fail_rank(rank, zygote.start_error)
            return
        if zygote.handle is None:
            rank.kill()
            return
        rank.forked = True
        zygote.children[rank.id.key] = rank
        # Only rank 0's node holds the store; other ranks are clients.
        hosted = self.store.hosted if self.store is not None else zygote.handle.has_torch and not self._job.opens_store
        libuv = zygote.handle.has_libuv or not zygote.handle.has_torch
        environment = rank_environment.environment_of_rank(
            self._job.zygote_spec.environment,
            place,
            rank_environment.StoreAccess(hosted, libuv),
            self._job.gang,
            self._job.run_dir,
            of_srun=self._job.of_srun,
        )
        environment |= self._job.variables.get(rank.id.local_rank, {})
        where = (self._job.run_dir, self._job.gang, rank.id.generation, rank.id.rank)
        if self._job.from_script:
            environment["TORCHELASTIC_ERROR_FILE"] = str(rank_log_files.error_path(*where))
        with self._rank_socket(rank.id.rank, rank.id.generation) as sock:
            zygote.handle.run_rank(rank.id.key, environment, where, sock.fileno())

    def _fail_rank(self, rank: RankProcess, words: str) -> None:
        self.failure = words
        log.error("%s can't be started: %s", rank.id.key, words)
        rank.fail_start(words)

    # --- the store ---------------------------------------------------------------------------------------------------

    def _open_pending_store(self, *, hosted: bool = True) -> None:
        store = self.store
        if store is None or store.port or any(store.key in zygote.children for zygote in self._zygotes):
            return
        ready = [zygote for zygote in self._zygotes if zygote.ready.is_set() and zygote.handle is not None]
        host = next((zygote for zygote in ready if zygote.handle is not None and zygote.handle.has_torch), None)
        if hosted and not self._job.opens_store and host is not None and host.handle is not None:
            host.children[store.key] = store
            host.handle.open_store(store.key, sorted(self._ports))
        elif ready:
            store.reserve(self._ports)
            self._ports.add(store.port)

    # --- zygotes -----------------------------------------------------------------------------------------------------

    def _start_zygote(self, zygote: _LocalZygote) -> bool:
        zygote_spec = self._job.zygote_spec.for_local_rank(self._zygotes.index(zygote))
        if zygote.is_too_old:
            zygote_spec = zygote_spec.started_anew()
        elif zygote.deaths >= _MAX_PRELOAD_DEATHS:
            zygote_spec = zygote_spec.without_preload()
        handle = ZygoteHandle(partial(self._on_message, zygote), partial(self._on_zygote_exit, zygote))
        try:
            handle.start(zygote_spec)
        except CannotStart as error:
            self.failure = zygote.start_error = str(error)
            zygote.ready.set()  # wakes every task that waits for the zygote
            self._changed()
            return False
        zygote.handle, zygote.started = handle, True
        return True

    def _on_message(self, zygote: _LocalZygote, message: packets.Message) -> None:
        if message["say"] == "ready":
            self._on_zygote_ready(zygote, message)
            return
        if message["say"] in ("imported", "left", "learned"):
            self._on_lesson(zygote, message)
            return
        child = zygote.children.get(message["key"])
        if child is None:
            return
        if child.handle_message(message):
            del zygote.children[message["key"]]
            if zygote.handle is not None:
                zygote.handle.reap(message["key"])
        if message["say"] == "store":
            self._ports.add(message["port"])
        if message["say"] == "refused":
            self.failure = message["words"]
            log.error("%s can't be started: %s", message["key"], self.failure)

    def _on_lesson(self, zygote: _LocalZygote, message: packets.Message) -> None:
        """A zygote says what its rank imports, and what it has imported for the next one."""
        if message["say"] == "imported":
            self.imports.add(message["words"])
        elif message["say"] == "left":
            log.info("a warm process leaves %s to the script: %s", message["name"], message["why"])
        elif zygote.handle is not None:
            if message["modules"]:
                log.info("a warm process has imported what the script imports: %s", ", ".join(message["modules"]))
            self.imports.finish(zygote.handle)

    def _on_zygote_ready(self, zygote: _LocalZygote, message: packets.Message) -> None:
        log.info(describe(message))
        for note in message["notes"]:
            of_library = self._job.from_script and note.startswith("preload: muster.")
            log.log(logging.INFO if of_library else logging.WARNING, note)
        died = f"{counted(zygote.deaths, 'process has', 'processes have')} ended during the import of `preload`"
        zygote.broken = message["broken"] or (died if zygote.deaths >= _MAX_PRELOAD_DEATHS else "")
        zygote.ready.set()
        if self._job.zygote_spec.learns and zygote.handle is not None:
            self.imports.join(zygote.handle)
        self._open_pending_store()
        self.start_zygotes()
        self._changed()

    def _on_zygote_exit(self, zygote: _LocalZygote) -> None:
        was_ready, is_too_old = zygote.ready.is_set(), zygote.handle is not None and zygote.handle.is_too_old
        zygote.ready.clear()
        handle, zygote.handle, zygote.started = zygote.handle, None, False
        if is_too_old and not self._stopping:
            zygote.is_too_old = True
            self.start_zygotes()
            return
        zygote.deaths += not was_ready
        children = list(zygote.children.values())
        zygote.children.clear()
        for child in children:
            child.handle_zygote_exit()
        if not self._stopping:
            if handle is not None:
                self.imports.leave(handle)
            log.error("a zygote has ended unexpectedly; starting another")
            self._spawn(self._replace(children))

    async def _replace(self, children: list[RankProcess | RendezvousProcess]) -> None:
        if await self._end_orphans():
            for child in children:
                child.mark_gone()
        await asyncio.sleep(_ZYGOTE_RESTART_S)
        self.start_zygotes()

    async def _end_orphans(self) -> bool:
        """Kill what a dead zygote left behind, which the kernel has given to this process. Return whether nothing is
        left."""
        for _ in range(round(_ORPHAN_TIMEOUT_S / _ORPHAN_POLL_S)):
            zygote_pids = {zygote.handle.pid for zygote in self._zygotes if zygote.handle is not None}
            if process_tree.kill_orphans(zygote_pids | self._other_children()) == 0:
                return True
            await asyncio.sleep(_ORPHAN_POLL_S)
        log.error("processes that ranks left behind do not end after SIGKILL")
        return False

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a step failed", exc_info=error)
            self.failure = f"muster-agent: {type(error).__name__}: {error}"
            self._changed()
