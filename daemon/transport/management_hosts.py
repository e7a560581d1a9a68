"""From which hosts the rights of an operator count: `management_hosts` of the site's settings.

A name has the addresses that this host resolves it to. It is resolved when `run` begins, and again every minute. While
no name server answers, it keeps the addresses that it had last (`muster.daemon.host.name_resolution`). A name that has
no address makes nobody an operator. An entry that is an IP address needs no name server.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, Iterable

from muster.daemon.host.addresses import comparable, is_loopback, own_addresses
from muster.daemon.host.name_resolution import NameUnresolved

_log = logging.getLogger(__name__)

RESOLVE_INTERVAL_S = 60.0
"""Seconds between two look-ups of each name. A host that gets another address is an operator's host again by then."""
MAX_HOSTS = 64
"""Entries of the setting: as many names may be resolved at the same time."""
MAX_NAME_CHARS = 253
"""Characters of a host name in DNS."""

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
# The last label holds a letter: "10.0.0.300" and "10.1" are mistyped addresses.
_HOST_NAME = re.compile(rf"({_LABEL}\.)*(?=[0-9_-]*[A-Za-z]){_LABEL}")

Resolve = Callable[[str], Awaitable[set[str]]]
"""Resolves a host name or an address to IP addresses; none if there is no such name. Doesn't block the loop. Raises
NameUnresolved if no server answers in time."""


def check_host(entry: str) -> str:
    """Return an entry of the setting in the form in which `ManagementHosts` compares it.

    Raises:
        ValueError: it is neither a host name nor the address of one host.
    """
    if address := comparable(entry):
        if ipaddress.ip_address(address).is_unspecified:
            raise ValueError(f"{entry!r} is not the address of a host; leave the list empty for all hosts")
        return address
    if len(entry) > MAX_NAME_CHARS or not _HOST_NAME.fullmatch(entry):
        raise ValueError(f"{entry!r} is neither a host name nor an IP address, for example mgmt1 or 10.0.0.1")
    return entry


class ManagementHosts:
    """The hosts, and the addresses that they have now. No entries: all hosts of the network.

    Args:
        entries: host names and IP addresses, as `check_host` returns them.
        this_host: the addresses of the machine on which this process runs.
    """

    def __init__(self, entries: Iterable[str] = (), this_host: Iterable[str] | None = None) -> None:
        entries = tuple(entries)
        self._all_hosts = not entries
        self._this_host = frozenset(own_addresses() if this_host is None else this_host)
        self._names = tuple(entry for entry in entries if not comparable(entry))
        self._fixed = frozenset(entry for entry in entries if comparable(entry))
        self._resolved: dict[str, frozenset[str]] = {}

    def includes(self, address: str) -> bool:
        """Whether a call from this IP address comes from one of the hosts.

        A call from a loopback address comes from this machine. It counts if this machine is one of the hosts.
        """
        if self._all_hosts:
            return True
        known = self._fixed.union(*self._resolved.values())
        if address in known:
            return True
        return is_loopback(address) and any(is_loopback(one) or one in self._this_host for one in known)

    async def resolve_names(self, resolve: Resolve) -> None:
        """Resolve all names once, at the same time."""
        found = await asyncio.gather(*(_addresses(resolve, name) for name in self._names))
        for name, addresses in zip(self._names, found, strict=True):
            self._set(name, frozenset(filter(None, map(comparable, addresses))))

    async def run(self, resolve: Resolve, interval_s: float = RESOLVE_INTERVAL_S) -> None:
        """Resolve the names now, and again after each interval. Returns at once if there is no name."""
        while self._names:
            await self.resolve_names(resolve)
            await asyncio.sleep(interval_s)

    def _set(self, name: str, addresses: frozenset[str]) -> None:
        before = self._resolved.get(name)
        self._resolved[name] = addresses
        if addresses == before:
            return
        if addresses:
            _log.info("management host %s has the addresses %s", name, " ".join(sorted(addresses)))
        else:
            _log.error(
                "management host %s of muster.toml can't be resolved: no call from it has an operator's rights until "
                "it can (tried again every %g s; an IP address in its place needs no name server)",
                name,
                RESOLVE_INTERVAL_S,
            )


async def _addresses(resolve: Resolve, name: str) -> set[str]:
    try:
        return await resolve(name)
    except NameUnresolved:
        return set()
