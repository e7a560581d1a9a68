"""The login names of uids, without harm from a directory service that does not answer.

A site's users may be in LDAP. The C library then asks a service of this host (sssd, nslcd), which may block for many
seconds if the directory does not answer. So a look-up has a thread of its own, and a caller waits TIMEOUT_S for it. A
name that was found once is kept: names change less often than directories fail.
"""

from __future__ import annotations

import asyncio
import pwd
from collections.abc import Callable

from muster.daemon.host.worker_threads import run_in_own_thread

TIMEOUT_S = 1.0
"""Seconds that a caller waits. The name is for people; the uid says the same."""
MOST_THREADS = 4
"""Look-ups under way at the same time."""


def look_up(uid: int) -> str:
    """The login name of `uid`; "uid 1000" if this host knows none. May block long."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return _unknown(uid)


class LoginNames:
    """Finds names on one event loop. `look_up`: see the function of this name."""

    def __init__(self, look_up: Callable[[int], str] = look_up, timeout_s: float = TIMEOUT_S) -> None:
        self._look_up, self._timeout_s = look_up, timeout_s
        self._known: dict[int, str] = {}
        self._under_way: dict[int, asyncio.Task[str]] = {}

    async def __call__(self, uid: int) -> str:
        """The login name of `uid`; "uid 1000" if this host knows none, or does not say in time."""
        if uid in self._known:
            return self._known[uid]
        looking = self._under_way.get(uid)
        if looking is None:
            if len(self._under_way) >= MOST_THREADS:
                return _unknown(uid)
            looking = self._under_way[uid] = asyncio.create_task(self._find(uid))
        done, _ = await asyncio.wait({looking}, timeout=self._timeout_s)
        return looking.result() if done else _unknown(uid)

    async def _find(self, uid: int) -> str:
        try:
            found = await run_in_own_thread(lambda: self._look_up(uid), "login-name")
        except OSError:
            found = _unknown(uid)
        finally:
            del self._under_way[uid]
        if found != _unknown(uid):
            self._known[uid] = found
        return found


def _unknown(uid: int) -> str:
    return f"uid {uid}"
