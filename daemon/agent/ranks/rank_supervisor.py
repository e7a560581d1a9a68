"""Supervises the ranks of a node and the rendezvous store, which are forked from its zygotes.

Carries out the steps of `reconcile` and holds their state. Every change ends in a call of `changed`. Nothing here
blocks the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from muster.daemon.agent.ranks import rank_environment
from muster.daemon.agent.ranks.local_zygotes import LocalZygote, LocalZygotes, ZygoteCallbacks
from muster.daemon.agent.ranks.rank_places import RankPlaces
from muster.daemon.agent.ranks.rank_process import Outcome, RankId, RankProcess
from muster.daemon.agent.ranks.reconcile import LocalRank, StartRanks
from muster.daemon.agent.ranks.rendezvous_process import RendezvousProcess
from muster.daemon.agent.ranks.zygote_handle import ForkedProcess, ZygoteSpec
from muster.daemon.agent.start_checks import meeting_address
from muster.daemon.host import packets, rank_log_files
from muster.v1.agent_pb2 import Order, RankStatus

log = logging.getLogger(__name__)

_NAMED_AFTER_S = 5.0
"""Seconds after SIGKILL from which a live rank is reported with what it waits for. After ten, its node leaves."""
# A store that has ended so often is left for rank 0 to open.
_MAX_STORE_DEATHS = 3

# rank, generation -> the rank's end of its socket to this agent
RankSocket = Callable[[int, int], socket.socket]


@dataclass(frozen=True, slots=True)
class NodeJob:
    """What the supervisor runs. `run_dir`: the folder of the logs. `from_script`: a user's own script has
    launched it. Its ranks are told where torch can write down with which error they fail, and may well lack Muster.
    `of_srun`: srun would start its ranks.
    `variables`: those of one local rank alone. `hosts`: nodes that the command may name. `forks`: of the launcher,
    which become the first zygotes.
    """

    gang: str
    node: str
    zygote_spec: ZygoteSpec
    run_dir: str
    ranks_per_node: int
    from_script: bool = False
    of_srun: bool = False
    variables: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    forks: tuple[ForkedProcess, ...] = ()

    @property
    def opens_store(self) -> bool:
        """Whether rank 0 opens the store: the script may choose address and port itself.

        Where a store is open already, torch never opens one at the address that an argument names, and waits for it.
        """
        found = meeting_address.find(self.zygote_spec.argv, (self.node, *self.hosts))
        return self.of_srun or any(one.is_tcp for one in found)


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
        self._job, self._opens_store = job, job.opens_store
        self._rank_socket = rank_socket
        self._changed = changed
        self._zygotes = LocalZygotes(
            job.zygote_spec,
            job.ranks_per_node,
            ZygoteCallbacks(self.any_alive, self._on_child_message, self._on_zygote_ready, self._fail),
            other_children,
            may_lack_muster=job.from_script,
            forks=job.forks,
        )
        self.imports = self._zygotes.imports
        self._ranks: dict[int, RankProcess] = {}
        self._ports: set[int] = set()
        self._store_deaths: dict[int, int] = {}
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
        return sum(zygote.handle is not None and zygote.handle.ready for zygote in self._zygotes.all)

    async def broken_import(self) -> str:
        """The installed module that can't be imported here, and why; empty: none. Returns after the imports."""
        zygote = self._zygotes.all[0]
        await zygote.ready.wait()
        return zygote.broken

    def store_generation(self) -> int:
        """The generation whose store is open or opening; 0: none."""
        return self.store.generation if self.store is not None and not self.store.ended else 0

    # --- steps -------------------------------------------------------------------------------------------------------

    def start_zygotes(self) -> None:
        """Start those that are missing."""
        self._zygotes.start()

    def start_ranks(self, step: StartRanks, order: Order) -> None:
        """Start ranks. They count as alive from now on."""
        ids = [RankId(rank, local_rank, step.generation) for rank, local_rank in step.places]
        positions = self._places.positions(ids, order)
        for identity in ids:
            rank, local_rank = identity.rank, identity.local_rank
            started = RankProcess(identity, self._changed)
            self._ranks[rank] = started
            if local_rank >= len(self._zygotes.all):
                started.fail_start(f"the order places local rank {local_rank} on a node of {len(self._zygotes.all)}")
                continue
            zygote, place = self._zygotes.all[local_rank], positions[rank]
            if zygote.ready.is_set():
                self._fork_rank(zygote, started, place)
            else:
                self._zygotes.spawn(self._fork_when_ready(zygote, started, place))

    def kill_ranks(self, generation: int) -> None:
        """SIGKILL all ranks of generations up to `generation`."""
        killed = [rank for rank in self._ranks.values() if rank.alive and rank.id.generation <= generation]
        for rank in killed:
            rank.kill()
        if killed:  # an order that comes again finds none
            self._zygotes.spawn(self._name_those_left(killed))

    def signal_ranks(self, signum: int) -> None:
        """Send a signal to every running rank."""
        for rank in self._ranks.values():
            rank.send_signal(signum)

    def open_store(self, generation: int) -> None:
        """Open a store for `generation`, in place of any other, as soon as a zygote is ready; at once if rank 0
        opens it."""
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

    async def _name_those_left(self, killed: list[RankProcess]) -> None:
        await asyncio.sleep(_NAMED_AFTER_S)
        for rank in killed:
            await rank.name_what_is_left()

    async def stop(self) -> None:
        """End all processes; return when all zygotes have ended."""
        self.close_store()
        self.kill_ranks(2**63)
        await self._zygotes.stop()
        self._places.close()

    # --- ranks -------------------------------------------------------------------------------------------------------

    async def _fork_when_ready(
        self, zygote: LocalZygote, rank: RankProcess, place: rank_environment.RankPosition
    ) -> None:
        # The environment depends on the torch that the zygote finds.
        await zygote.ready.wait()
        self._fork_rank(zygote, rank, place)

    def _fork_rank(self, zygote: LocalZygote, rank: RankProcess, place: rank_environment.RankPosition) -> None:
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
        hosted = self.store.hosted if self.store is not None else zygote.handle.has_torch and not self._opens_store
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

    def _fail(self, words: str) -> None:
        self.failure = words
        self._changed()

    def _on_child_message(self, message: packets.Message) -> None:
        if message["say"] == "store":
            self._ports.add(message["port"])
        if message["say"] == "refused":
            self.failure = message["words"]
            log.error("%s can't be started: %s", message["key"], self.failure)
        if message["say"] == "unlogged":
            log.error("%s runs without a log: %s", message["key"], message["words"])

    def _on_zygote_ready(self) -> None:
        self._open_pending_store()
        self._changed()

    # --- the store ---------------------------------------------------------------------------------------------------

    def _open_pending_store(self, *, hosted: bool = True) -> None:
        store = self.store
        if store is None or store.port or any(store.key in zygote.children for zygote in self._zygotes.all):
            return
        ready = [zygote for zygote in self._zygotes.all if zygote.ready.is_set() and zygote.handle is not None]
        host = next((zygote for zygote in ready if zygote.handle is not None and zygote.handle.has_torch), None)
        if hosted and not self._opens_store and host is not None and host.handle is not None:
            host.children[store.key] = store
            host.handle.open_store(store.key, sorted(self._ports))
        elif ready or self._opens_store:  # then nobody need wait for imports
            store.reserve(self._ports)
            self._ports.add(store.port)
