"""The login names and groups of uids, without harm from a directory service that does not answer.

A site's users may be in LDAP. The C library then asks a service of this host (sssd, nslcd), which may block for many
seconds if the directory does not answer. So a look-up has a thread of its own, and a caller waits TIMEOUT_S for it. A
name that was found once is kept: names change less often than directories fail. Who is in a group is asked again after
GROUPS_KEPT_S: whoever leaves a group loses its rights.
"""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
from collections.abc import Callable
from typing import Generic, TypeVar

from muster.daemon.host import clock
from muster.daemon.host.worker_threads import run_in_own_thread
from muster.slurm.client.names import GROUP_PREFIX

TIMEOUT_S = 1.0
"""Seconds that a caller waits. The name is for people; the uid says the same."""
MOST_THREADS = 4
"""Look-ups under way at the same time."""
GROUPS_KEPT_S = 60.0
"""Seconds for which the names and groups of a user count."""
_Found = TypeVar("_Found")


def look_up(uid: int) -> str:
    """The login name of `uid`; "uid 1000" if this host knows none. May block long."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return _unknown(uid)


def look_up_reader(uid: int) -> frozenset[str]:
    """The names by which a job can name `uid` as a reader: the login name, and each group as "group:NAME". May block
    long."""
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return frozenset()
    names = {user.pw_name}
    for gid in os.getgrouplist(user.pw_name, user.pw_gid):
        try:
            names.add(GROUP_PREFIX + grp.getgrgid(gid).gr_name)
        except KeyError:
            pass  # a group without a name: nobody can have named it
    return frozenset(names)


class _LookUps(Generic[_Found]):
    """Look-ups in threads. Callers who ask for the same uid at once wait for one of them."""

    def __init__(self, look_up: Callable[[int], _Found], timeout_s: float) -> None:
        self._look_up, self._timeout_s = look_up, timeout_s
        self._under_way: dict[int, asyncio.Task[_Found | None]] = {}

    async def find(self, uid: int) -> _Found | None:
        """What was found; None: nothing in time, or too much is asked at once."""
        looking = self._under_way.get(uid)
        if looking is None:
            if len(self._under_way) >= MOST_THREADS:
                return None
            looking = self._under_way[uid] = asyncio.create_task(self._find(uid))
        done, _ = await asyncio.wait({looking}, timeout=self._timeout_s)
        return looking.result() if done else None

    async def _find(self, uid: int) -> _Found | None:
        try:
            found = await run_in_own_thread(lambda: self._look_up(uid), "login-name")
        except OSError:
            return None
        finally:
            del self._under_way[uid]
        self.keep(uid, found)
        return found

    def keep(self, uid: int, found: _Found) -> None:
        """A look-up has found this, perhaps after its callers have left."""


class LoginNames(_LookUps[str]):
    """Finds names on one event loop. `look_up`: see the function of this name."""

    def __init__(self, look_up: Callable[[int], str] = look_up, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(look_up, timeout_s)
        self._known: dict[int, str] = {}

    async def __call__(self, uid: int) -> str:
        """The login name of `uid`; "uid 1000" if this host knows none, or does not say in time."""
        return self._known.get(uid) or await self.find(uid) or _unknown(uid)

    def keep(self, uid: int, found: str) -> None:
        """See _LookUps."""
        if found != _unknown(uid):
            self._known[uid] = found


class ReaderNames(_LookUps[frozenset[str]]):
    """Finds the names and groups by which jobs name a reader. `look_up`: see look_up_reader. `now`: seconds. `kept_s`:
    seconds for which what was found counts."""

    def __init__(
        self,
        look_up: Callable[[int], frozenset[str]] = look_up_reader,
        now: Callable[[], float] = clock.monotonic,
        timeout_s: float = TIMEOUT_S,
        kept_s: float = GROUPS_KEPT_S,
    ) -> None:
        super().__init__(look_up, timeout_s)
        self.kept_s = kept_s
        self._now = now
        self._known: dict[int, tuple[frozenset[str], float]] = {}

    async def learn(self, uid: int) -> None:
        """Ask who the user is, unless that is known. Without an answer in time, the user is no reader."""
        if uid not in self._known or self._now() - self._known[uid][1] > self.kept_s:
            self._known.pop(uid, None)
            await self.find(uid)

    def known(self, uid: int) -> frozenset[str]:
        """What was learned of the user."""
        return self._known[uid][0] if uid in self._known else frozenset()

    def keep(self, uid: int, found: frozenset[str]) -> None:
        """See _LookUps."""
        self._known[uid] = found, self._now()


def _unknown(uid: int) -> str:
    return f"uid {uid}"
