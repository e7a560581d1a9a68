"""IP addresses: those of this machine, and the form in which addresses and names of hosts are compared.

The machine's are read from /proc: neither a name server nor a netlink socket is needed.
"""

from __future__ import annotations

import ipaddress
from itertools import pairwise
from pathlib import Path

PROC_NET = Path("/proc/net")


def own_addresses(proc_net: Path = PROC_NET) -> tuple[str, ...]:
    """Return the addresses of all interfaces, sorted, without loopback and link-local ones. `proc_net`: /proc/net.

    A machine without IPv6 has no file for it; a missing file counts as empty.
    """
    found = {ipaddress.ip_address(text) for text in (*_ipv4(proc_net / "fib_trie"), *_ipv6(proc_net / "if_inet6"))}
    return tuple(sorted(str(address) for address in found if not address.is_loopback and not address.is_link_local))


def comparable(text: str) -> str:
    """The IP address in the form in which addresses are compared; empty: this is none, or is valid on one link only."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id:
        return ""
    return str(getattr(address, "ipv4_mapped", None) or address)


def comparable_host(host: str) -> str:
    """A host's name or IP address in the form in which hosts are compared: DNS does not tell capitals from others."""
    return comparable(host) or host.lower()


def is_loopback(address: str) -> bool:
    """Whether this is a loopback address. Anything may be asked about."""
    return bool(comparable(address)) and ipaddress.ip_address(address).is_loopback


def _ipv4(path: Path) -> list[str]:
    """The local addresses in the kernel's routing trie: an address stands on the line before its "/32 host LOCAL"."""
    lines = [line.split() for line in _lines(path)]
    return [before[1] for before, line in pairwise(lines) if line == ["/32", "host", "LOCAL"] and len(before) == 2]


def _ipv6(path: Path) -> list[str]:
    """Each line begins with an address as 32 hexadecimal digits."""
    digits = [line.split()[0] for line in _lines(path) if line.strip()]
    return [":".join(text[i : i + 4] for i in range(0, 32, 4)) for text in digits]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:
        return []
