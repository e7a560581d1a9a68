"""systemd's store of descriptors (FileDescriptorStoreMax= of the unit): what is put there comes back to this service
when it is started again, whatever had ended it. It goes when the service is stopped.

Without systemd nothing is stored, and nothing comes back. See sd_notify(3), sd_listen_fds(3).
"""

from __future__ import annotations

import array
import logging
import os
import socket
from collections.abc import MutableMapping

_log = logging.getLogger(__name__)

_FIRST_FD = 3


class FdStore:
    """The store.

    Args:
        notify: NOTIFY_SOCKET, a path or an abstract name ("@..."); empty: there is no systemd.
    """

    def __init__(self, notify: str) -> None:
        self._address = "\0" + notify[1:] if notify.startswith("@") else notify

    def put(self, name: str, fd: int) -> None:
        """Have a descriptor stored under a name (printable ASCII without colons, at most 255)."""
        self._say(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", fd)

    def remove(self, name: str) -> None:
        """Have what is stored under this name closed."""
        self._say(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def _say(self, words: str, *fds: int) -> None:
        if not self._address:
            return
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
                line.settimeout(1.0)
                line.sendmsg([words.encode()], beside, 0, self._address)
        except OSError as error:
            _log.warning("systemd does not take %s: %s", words.partition("\n")[0], error)


def inherited_descriptors(environ: MutableMapping[str, str], pid: int, first: int = _FIRST_FD) -> dict[str, int]:
    """The descriptors that systemd gave this process (`pid`) at its start, by name; they are the caller's from now on,
    and not spoken of in `environ` any more. Of several of one name the last is given, the others are closed."""
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
