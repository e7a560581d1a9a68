"""What `musterd` tells systemd: that it serves, and again and again that it still does.

systemd starts what waits for `musterd` (slurmd) after the first notice, and kills and restarts a `musterd` whose
notices stay away (WatchdogSec= of the unit). Without systemd nothing is told. See sd_notify(3) and
sd_watchdog_enabled(3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from muster.daemon.node.kept_memory.systemd_fd_store import tell_systemd

_NOTICES_PER_WATCHDOG = 3
"""So that two late notices in a row do no harm."""


def watchdog_s(environ: Mapping[str, str], pid: int) -> float:
    """Seconds after which systemd kills this process (`pid`) if it hears nothing; 0: it does not."""
    microseconds = environ.get("WATCHDOG_USEC", "")
    is_ours = environ.get("WATCHDOG_PID", str(pid)) == str(pid)
    return int(microseconds) / 1e6 if is_ours and microseconds.isdecimal() else 0.0


async def report_alive(notify: str, timeout_s: float) -> None:
    """Tell systemd that the daemon serves, and then within each `timeout_s` that its event loop runs, until cancelled.
    With a `timeout_s` of 0 systemd wants no further notice.

    The task of a daemon whose event loop is blocked does not run, so its notices stay away. A sensor or a coordinator
    that hangs blocks no event loop, and is no reason for a restart.
    """
    tell_systemd(notify, "READY=1")
    while timeout_s:
        await asyncio.sleep(timeout_s / _NOTICES_PER_WATCHDOG)
        tell_systemd(notify, "WATCHDOG=1", taken_s=0)
