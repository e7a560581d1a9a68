"""What the coordinator has to do with a submission: it answers before the job is queued, and learns of it afterwards.

So Slurm queues no job without a coordinator, unless the user wants that. A job that could not be registered registers
itself when its agents start.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Self

from muster.daemon.transport.site_config import Site
from muster.launcher.command import connect, print_note
from muster.launcher.coordinator_client import CoordinatorClient
from muster.launcher.errors import LauncherError, NoCredential, SiteFault, Unavailable
from muster.v1.common_pb2 import JobSpec


class Registration:
    """One registration; an asynchronous context manager. The coordinator is asked at once, in the background: it
    answers while the job is checked.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._connection = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._answer = asyncio.ensure_future(self._ask())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answer.cancel()
        await asyncio.wait([self._answer])
        if not self._answer.cancelled():
            self._answer.exception()  # nobody may have asked for it: the job was wrong
        await self._connection.aclose()

    async def _ask(self) -> CoordinatorClient:
        coordinator = await self._connection.enter_async_context(connect(self._site))
        await coordinator.check()
        return coordinator

    async def wait_for_answer(self, *, force: bool) -> CoordinatorClient | None:
        """Waits until the coordinator has answered. With `force` it need not; None: it has not.

        Raises:
            LauncherError: the coordinator can't be reached, or refuses.
        """
        try:
            return await self._answer
        except (Unavailable, SiteFault) as error:
            if not force:
                nothing = "Nothing was queued"
                if not isinstance(error, NoCredential):
                    nothing += ". With --force the job is queued, and registers itself when it starts"
                raise type(error)(error.message, "\n  ".join(filter(None, (error.hint, nothing)))) from None
            print_note(f"muster: {error.message}; the job is queued because of --force")
            print_note("  whether an earlier run of this job is to be continued is not known: --resume PATH says so")
        return None

    async def register(self, gang: str, job: int, spec: JobSpec) -> bool:
        """Registers the job that was queued. Returns whether the coordinator knows it now."""
        with suppress(Unavailable, SiteFault):
            await (await self._answer).register(gang, job, spec)
            return True
        # While sbatch ran, another coordinator may have taken over.
        try:
            async with connect(self._site) as coordinator:
                await coordinator.register(gang, job, spec)
            return True
        except LauncherError as error:
            print_note(f"muster: job {job} is queued but not registered yet: {error.message}")
            print_note("  the job registers itself when its agents start; until then muster status does not show it")
            return False
