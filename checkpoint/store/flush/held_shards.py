"""The shards that a flush holds, and how their ranks get the slots back before everything is written.

While a flush reads a slot, its rank has one slot only, so one newer version at most is committed. A flush on slow
storage therefore copies what is still to be written, as soon as a newer version is committed, and releases the shards.
Without memory for that it keeps them. Before a planned stop the ranks need their slots for the last step: a flush
that can't release them in time is given up, and the last step is flushed instead.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.flush.give_up import SLOTS_NEEDED, FlushCancellation
from muster.checkpoint.store.flush.rank_source import RankSource, move_all
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft
from muster.checkpoint.store.memory.shards import Shard
from muster.daemon.host.worker_threads import WorkerThreads

log = logging.getLogger(__name__)

STOP_WAIT_S = 3.0
"""Seconds that a planned stop leaves a flush for the copy. Slurm's grace time may be 30 s in all."""


class HeldShards:
    """This node's shards of one flush. All methods run on the agent's event loop. A context manager: at its end, the
    shards are released; after an error, threads that still write them are told to end before.

    Args:
        version: of the shards.
        check_room: raises NoMemoryLeft if there is no room for so many bytes.
    """

    def __init__(
        self,
        version: Version,
        shards: Sequence[Shard],
        given_up: FlushCancellation,
        run_in_thread: WorkerThreads,
        check_room: Callable[[int], None],
    ) -> None:
        self.version = version
        self.sources = [RankSource(shard) for shard in shards]
        self._given_up, self._run_in_thread, self._check_room = given_up, run_in_thread, check_room
        self._held = ExitStack()
        for shard in shards:
            self._held.enter_context(shard.held())
        self._are_released = self._was_told = False
        self._moving = asyncio.Lock()

    def __enter__(self) -> "HeldShards":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._given_up.set()
        self._release()

    @property
    def holds(self) -> bool:
        """Whether the shards are still held."""
        return not self._are_released

    async def let_go(self) -> None:
        """Copy what is still to be written, and release the shards, if there is memory for it."""
        async with self._moving:
            if self._are_released:
                return
            try:
                await self._run_in_thread(move_all, self.sources, self._check_room)
            except (NoMemoryLeft, OSError) as error:
                if not self._was_told:
                    log.warning("the flush of %s keeps a slot of each rank: %s", self.version, error)
                self._was_told = True
            except CorruptShard as error:
                self._given_up.set_because(str(error))
            else:
                self._release()

    async def let_go_before_a_stop(self) -> None:
        """Release the shards within STOP_WAIT_S. If they can't be copied, the flush is given up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_WAIT_S):
                await self.let_go()
        if not self._are_released:
            self._given_up.set_because(SLOTS_NEEDED)
            self._release()

    def _release(self) -> None:
        self._are_released = True
        self._held.close()
