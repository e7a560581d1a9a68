"""Host names to IP addresses, without harm from name servers that do not answer.

The resolver of the C library may block for 30 s and more if no name server answers. It runs in a few threads of its own
here, so that nothing else waits for it: not the event loop, not its other threads, not the end of the process. While no
server answers, a name keeps the addresses that it had last. A name that a server does not know has none.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from muster.daemon.host.lasting_problem import LastingProblem
from muster.daemon.host.worker_threads import run_in_own_thread

TIMEOUT_S = 5.0
"""Seconds that a caller waits for an answer."""
MOST_THREADS = 8
"""Look-ups under way at the same time."""
_NO_SUCH_NAME = (socket.EAI_NONAME, socket.EAI_NODATA)
_log = logging.getLogger(__name__)


class NameUnresolved(OSError):
    """No name server answers, and the name was not resolved before. Says so."""


def look_up(name: str) -> set[str]:
    """The IP addresses of `name`, from the resolver of the C library; none if there is no such name. May block long.

    Raises:
        OSError: no server answers.
    """
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NO_SUCH_NAME:
            return set()
        raise
    except UnicodeError:
        return set()  # no name at all
    return {str(answer[4][0]) for answer in answers}


class NameResolver:
    """Resolves names on one event loop. `look_up`: see the function of this name."""

    def __init__(self, look_up: Callable[[str], set[str]] = look_up, timeout_s: float = TIMEOUT_S) -> None:
        self._look_up, self._timeout_s = look_up, timeout_s
        self._known: dict[str, set[str]] = {}
        self._under_way: dict[str, asyncio.Task[set[str]]] = {}
        self._threads = asyncio.Semaphore(MOST_THREADS)
        self._silent = LastingProblem(_log, "the name servers of this host answer again")

    async def __call__(self, name: str) -> set[str]:
        """The IP addresses of a host name or an address; none if there is no such name.

        Raises:
            NameUnresolved: no server answers in time, and the name was not resolved before.
        """
        try:
            found = await self.ask(name)
        except NameUnresolved as error:
            self._silent.meet(
                f"{error}. Names keep the addresses that they had last. Repair DNS; names in /etc/hosts, and IP "
                "addresses in the settings, need no name server"
            )
            if name not in self._known:
                raise
            return self._known[name]
        self._silent.end()
        self._known[name] = found
        return found

    async def ask(self, name: str, timeout_s: float | None = None) -> set[str]:
        """As a call, without what was known before. `timeout_s`: None: that of this resolver.

        Raises:
            NameUnresolved: no server answers in time.
        """
        with suppress(ValueError):
            return {str(ipaddress.ip_address(name))}
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._under_way.get(name) or self._start(name))
        except OSError as error:  # a TimeoutError is one
            why = str(error) or f"no answer for {timeout_s:g} s"
            where = os.uname().nodename
            raise NameUnresolved(f"{name} can't be resolved on {where}: no name server answers ({why})") from None

    def _start(self, name: str) -> asyncio.Task[set[str]]:
        task = asyncio.create_task(self._run_in_thread(name))
        self._under_way[name] = task
        task.add_done_callback(lambda _: self._under_way.pop(name))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # all callers may have given up
        return task

    async def _run_in_thread(self, name: str) -> set[str]:
        async with self._threads:
            return await run_in_own_thread(lambda: self._look_up(name), "name-resolution")
