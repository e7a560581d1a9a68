"""systemd's store of descriptors (FileDescriptorStoreMax= of the unit). Stored descriptors come back when this service
is started again, however it ended. Stopping the service closes them.

Without systemd nothing is stored and nothing comes back. See sd_notify(3) and sd_listen_fds(3).
"""

from __future__ import annotations

import array
import logging
import os
import socket
from collections.abc import MutableMapping

_log = logging.getLogger(__name__)

_FIRST_FD = 3
_TAKEN_S = 1.0
"""Seconds in which systemd has to take a message. It takes one at once unless it hangs."""


class FdStore:
    """The store.

    Args:
        notify: NOTIFY_SOCKET, a path or an abstract name ("@..."); empty: no systemd.
    """

    def __init__(self, notify: str) -> None:
        self._notify = notify

    def put(self, name: str, fd: int) -> None:
        """Store a descriptor under a name (printable ASCII without colons, at most 255 characters)."""
        tell_systemd(self._notify, f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", fd)

    def remove(self, name: str) -> None:
        """Close what is stored under this name."""
        tell_systemd(self._notify, f"FDSTOREREMOVE=1\nFDNAME={name}")


def tell_systemd(notify: str, message: str, *fds: int, taken_s: float = _TAKEN_S) -> None:
    """Send systemd a message, and descriptors with it. If systemd does not take it, log a warning.

    Args:
        notify: as for FdStore.
        taken_s: seconds to wait until systemd takes it.
    """
    if not notify:
        return
    address = "\0" + notify[1:] if notify.startswith("@") else notify
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(taken_s)
            sock.sendmsg([message.encode()], ancillary, 0, address)
    except OSError as error:
        _log.warning("systemd does not take %s: %s", message.partition("\n")[0], error)


def inherited_descriptors(environ: MutableMapping[str, str], pid: int, first: int = _FIRST_FD) -> dict[str, int]:
    """Return the descriptors that systemd gave this process (`pid`) at its start, by name, and remove systemd's
    variables from `environ`. The caller owns the descriptors. If several have one name, the last is returned and the
    others are closed."""
    count, names = environ.pop("LISTEN_FDS", ""), environ.pop("LISTEN_FDNAMES", "")
    if environ.pop("LISTEN_PID", "") != str(pid) or not count.isdecimal():
        return {}
    found: dict[str, int] = {}
    for fd, name in zip(range(first, first + int(count)), names.split(":"), strict=False):
        os.set_inheritable(fd, False)
        if name in found:
            os.close(found[name])
        found[name] = fd
    return found
