"""The zygotes of a node, one for each local rank: how they start, what they say and learn, what follows their death.

Nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from muster.daemon.agent.ranks.imports.job_imports import JobImports
from muster.daemon.agent.ranks.rank_process import RankProcess
from muster.daemon.agent.ranks.rendezvous_process import RendezvousProcess
from muster.daemon.agent.ranks.zygote_handle import CannotStart, ForkedProcess, ZygoteHandle, ZygoteSpec, describe
from muster.daemon.host import packets, process_tree
from muster.wording import counted

log = logging.getLogger(__name__)

_ORPHAN_POLL_S = 0.01
# A zygote that dies so often during its imports is started without imports.
_MAX_PRELOAD_DEATHS = 2
_ZYGOTE_RESTART_S = 0.5
_ORPHAN_TIMEOUT_S = 10.0


class LocalZygote:
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


@dataclass(frozen=True, slots=True)
class ZygoteCallbacks:
    """Whom zygotes tell.

    has_ranks: whether ranks run.
    child_said: a child has said this, and knows it.
    ready: a zygote is ready.
    failed: an error that no order can correct, in words for the user.
    """

    has_ranks: Callable[[], bool]
    child_said: Callable[[packets.Message], None]
    ready: Callable[[], None]
    failed: Callable[[str], None]


class LocalZygotes:
    """All zygotes of a node.

    Args:
        other_children: pids of children of this process that no rank has left behind.
        may_lack_muster: it is no fault of the job if its ranks can't import Muster.
        forks: processes of a launcher that become the first zygotes.
    """

    def __init__(
        self,
        spec: ZygoteSpec,
        count: int,
        callbacks: ZygoteCallbacks,
        other_children: Callable[[], set[int]],
        *,
        may_lack_muster: bool,
        forks: Sequence[ForkedProcess] = (),
    ) -> None:
        self._spec, self._callbacks, self._other_children = spec, callbacks, other_children
        self._may_lack_muster, self._forks = may_lack_muster, list(forks)
        self.all = [LocalZygote() for _ in range(count)]
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.imports = JobImports(self._at_once)

    def start(self) -> None:
        """Start missing zygotes: one at a time while ranks run, otherwise one per processor."""
        at_once = self._at_once()
        starting = sum(zygote.started and not zygote.ready.is_set() for zygote in self.all)
        for zygote in self.all:
            if not zygote.started and not zygote.start_error and starting < at_once and not self._stopping:
                starting += self._start(zygote)

    async def stop(self) -> None:
        """End all processes; return when all zygotes have ended."""
        self._stopping = True
        for task in list(self._tasks):
            task.cancel()
        for fork in self._forks:
            fork.link.close()
        handles = [zygote.handle for zygote in self.all if zygote.handle is not None]
        await asyncio.gather(*(handle.stop() for handle in handles))
        await self._end_orphans()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this until `stop`. An error in it ends the job."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a step failed", exc_info=error)
            self._callbacks.failed(f"muster-agent: {type(error).__name__}: {error}")

    def _at_once(self) -> int:
        """How many zygotes may import at the same time."""
        return 1 if self._callbacks.has_ranks() else (os.cpu_count() or 1)

    def _start(self, zygote: LocalZygote) -> bool:
        spec = self._spec.for_local_rank(self.all.index(zygote))
        if zygote.is_too_old:
            spec = spec.started_anew()
        elif zygote.deaths >= _MAX_PRELOAD_DEATHS:
            spec = spec.without_preload()
        handle = ZygoteHandle(partial(self._on_message, zygote), partial(self._on_exit, zygote))
        try:
            handle.start(spec, fork := self._forks.pop() if self._forks else None)
        except CannotStart as error:
            zygote.start_error = str(error)
            zygote.ready.set()  # wakes every task that waits for the zygote
            self._callbacks.failed(zygote.start_error)
            return False
        log.info("warm process %d is %s", handle.pid, "started" if fork is None else "a fork of the launcher")
        zygote.handle, zygote.started = handle, True
        return True

    def _on_message(self, zygote: LocalZygote, message: packets.Message) -> None:
        if message["say"] == "ready":
            self._on_ready(zygote, message)
        elif message["say"] in ("imported", "left", "learned"):
            self._on_lesson(zygote, message)
        elif (child := zygote.children.get(message["key"])) is not None:
            if child.handle_message(message):
                del zygote.children[message["key"]]
                if zygote.handle is not None:
                    zygote.handle.reap(message["key"])
            self._callbacks.child_said(message)

    def _on_lesson(self, zygote: LocalZygote, message: packets.Message) -> None:
        """A zygote says what its rank imports, and what it has imported for the next one."""
        if message["say"] == "imported":
            self.imports.add(message["words"])
        elif message["say"] == "left":
            log.info("a warm process leaves %s to the script: %s", message["name"], message["why"])
        elif zygote.handle is not None:
            if message["modules"]:
                log.info("a warm process has imported what the script imports: %s", ", ".join(message["modules"]))
            self.imports.finish(zygote.handle)

    def _on_ready(self, zygote: LocalZygote, message: packets.Message) -> None:
        log.info(describe(message))
        for note in message["notes"]:
            of_library = self._may_lack_muster and note.startswith("preload: muster.")
            log.log(logging.INFO if of_library else logging.WARNING, note)
        died = f"{counted(zygote.deaths, 'process has', 'processes have')} ended during the import of `preload`"
        zygote.broken = message["broken"] or (died if zygote.deaths >= _MAX_PRELOAD_DEATHS else "")
        zygote.ready.set()
        if self._spec.learns and zygote.handle is not None:
            self.imports.join(zygote.handle)
        self.start()
        self._callbacks.ready()

    def _on_exit(self, zygote: LocalZygote) -> None:
        was_ready, is_too_old = zygote.ready.is_set(), zygote.handle is not None and zygote.handle.is_too_old
        zygote.ready.clear()
        handle, zygote.handle, zygote.started = zygote.handle, None, False
        if is_too_old and not self._stopping:
            zygote.is_too_old = True
            self.start()
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
            self.spawn(self._replace(children))

    async def _replace(self, children: list[RankProcess | RendezvousProcess]) -> None:
        if await self._end_orphans():
            for child in children:
                child.mark_gone()
        await asyncio.sleep(_ZYGOTE_RESTART_S)
        self.start()

    async def _end_orphans(self) -> bool:
        """Kill what a dead zygote left behind, which the kernel has given to this process. Return whether nothing is
        left."""
        for _ in range(round(_ORPHAN_TIMEOUT_S / _ORPHAN_POLL_S)):
            zygote_pids = {zygote.handle.pid for zygote in self.all if zygote.handle is not None}
            zygote_pids |= set() if self._stopping else {fork.pid for fork in self._forks}
            if process_tree.kill_orphans(zygote_pids | self._other_children()) == 0:
                return True
            await asyncio.sleep(_ORPHAN_POLL_S)
        log.error("processes that ranks left behind do not end after SIGKILL")
        return False
