"""Under which names a coordinator is called in plain text. With TLS its certificate says that.

A credential names the host that its caller dialled, so that what one coordinator was shown is worth nothing at the
other one. The settings name both. The names of this coordinator are those of its host, and the configured ones that
lead to an address of its host. If only one is configured, it is this coordinator's, wherever it leads: there is no
other one, or both share it.

Names are resolved only if no configured one is a name that the host has by itself. So a usual site needs no name server
for that, and a takeover waits for none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from muster.daemon.host.addresses import comparable, is_loopback, own_addresses
from muster.daemon.host.name_resolution import NameUnresolved
from muster.daemon.transport.management_hosts import RESOLVE_INTERVAL_S, Resolve

_log = logging.getLogger(__name__)


class CoordinatorNames:
    """The names, as they are now.

    Args:
        configured: the hosts of all coordinators, as the settings name them.
        this_host: the names and addresses that this host has by itself.
        addresses: returns the addresses of this host.
    """

    def __init__(
        self,
        configured: Iterable[str],
        this_host: Iterable[str],
        addresses: Callable[[], Iterable[str]] = own_addresses,
    ) -> None:
        configured, own = frozenset(configured), frozenset(this_host)
        self._addresses = addresses
        self._own = own | configured if len(configured) == 1 else own
        self._to_resolve = frozenset() if configured & self._own else configured
        self._resolved: frozenset[str] | None = None

    @property
    def current(self) -> frozenset[str]:
        """The names of this coordinator."""
        return self._own | (self._resolved or frozenset())

    @property
    def is_waiting(self) -> bool:
        """Whether `resolve_names` has yet to say which configured name is this coordinator's."""
        return bool(self._to_resolve) and self._resolved is None

    async def resolve_names(self, resolve: Resolve) -> None:
        """Find out once which configured names lead to this host."""
        here = frozenset(self._addresses())
        led = await asyncio.gather(*(self._leads_here(name, here, resolve) for name in self._to_resolve))
        found = frozenset(name for name, leads in zip(self._to_resolve, led, strict=True) if leads)
        if found != self._resolved:
            self._resolved = found
            self._log_change()

    async def run(self, resolve: Resolve, interval_s: float = RESOLVE_INTERVAL_S) -> None:
        """Find out again after each interval. Returns at once if there is nothing to resolve."""
        while self._to_resolve:
            await asyncio.sleep(interval_s)
            await self.resolve_names(resolve)

    async def _leads_here(self, name: str, here: frozenset[str], resolve: Resolve) -> bool:
        try:
            found = await resolve(name)
        except NameUnresolved:
            return False
        return any(comparable(address) in here or is_loopback(address) for address in found)

    def _log_change(self) -> None:
        configured = " ".join(sorted(self._to_resolve))
        if self._resolved:
            _log.info("of the coordinators %s this is %s", configured, " ".join(sorted(self._resolved)))
            return
        _log.error(
            "none of the coordinators %s of the settings leads to an address of this host: whoever dials it by one of "
            "these names is refused. Name this host by its host name or one of its addresses (tried again every %g s)",
            configured,
            RESOLVE_INTERVAL_S,
        )
