"""The negotiated speed of the network interface that has an address: what a link is rated for.

The kernel shows it to every user. Virtual interfaces (veth, tap) show made-up numbers, so only adapters and bonds of
them count. What can't be read is not known.
"""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import struct
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915
"""The ioctl that reads an interface's IPv4 address (linux/sockios.h)."""
_MBIT = re.compile(r"[0-9]{1,8}")


def rated_bytes_per_s(address: str, root: Path = Path("/")) -> float:
    """Bytes a second of the interface with this IP address, in one direction; 0 if it is not known."""
    name = interface_of(address)
    folder = root / "sys/class/net" / name
    if not name or not any((folder / kind).exists() for kind in ("device", "bonding")):
        return 0.0
    with suppress(OSError, ValueError):
        text = (folder / "speed").read_text().strip()  # Mb/s; -1, or an error, while the link is down
        return int(text) * 1e6 / 8 if _MBIT.fullmatch(text) else 0.0
    return 0.0


def interface_of(address: str, proc_net: Path = Path("/proc/net")) -> str:
    """The name of the interface with this IP address; empty if no interface is found."""
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(wanted, ipaddress.IPv6Address):
        if wanted.ipv4_mapped is None:
            return _ipv6_interface(wanted, proc_net / "if_inet6")
        wanted = wanted.ipv4_mapped
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if found[20:24] == wanted.packed:
                    return name
    return ""


def _ipv6_interface(wanted: ipaddress.IPv6Address, table: Path) -> str:
    with suppress(OSError):
        for line in table.read_text().splitlines():
            words = line.split()
            if len(words) == 6 and words[0] == wanted.packed.hex():
                return words[5]
    return ""
