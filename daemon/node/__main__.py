"""musterd: the command.

Exit status: 0 after SIGTERM; 69 the address to listen on is taken or not there (yet): starting again may
help; 70 a bug (the log has its traceback); 78 the site has to mend its settings (wrong flag or file, no
libmunge): it would not. That the coordinator is away ends nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from muster.daemon import site
from muster.daemon.channel import CannotListen
from muster.daemon.identity import IdentityError
from muster.daemon.memory_line import SOCKET
from muster.daemon.node import fd_store
from muster.daemon.node.daemon import NodeDaemon, Settings, Systemd
from muster.daemon.node.sensor import Roots

EXIT_UNAVAILABLE, EXIT_BUG = 69, 70
_log = logging.getLogger("muster.node")


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point `musterd`."""
    flags = _parser().parse_args(argv)
    site.start_logging(flags.log_level)
    try:
        asyncio.run(_run(_settings(flags)))
    except (site.SiteError, IdentityError) as error:
        _die(site.EXIT_CONFIG, str(error))
    except CannotListen as error:
        _die(EXIT_UNAVAILABLE, str(error))
    except Exception as error:  # noqa: BLE001  # the very top
        _log.critical("a bug", exc_info=True)
        _die(EXIT_BUG, f"{type(error).__name__}: {error} (a bug; the log has its traceback)")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="musterd", description="Calls the roll for one node, watches its hardware.")
    site.add_arguments(parser, listen=f":{site.NODE_PORT}")
    parser.add_argument("--node", metavar="NAME", help="this node in Slurm; default SLURMD_NODENAME, else hostname -s")
    parser.add_argument("--heartbeat", metavar="SECONDS", type=_seconds, default=5.0,
                        help="pause between heartbeats until the coordinator asks otherwise; default 5")  # fmt: skip
    parser.add_argument("--kmsg", metavar="FILE", type=Path, default=Roots().kmsg,
                        help=f"the kernel log: a device, or a growing file; default {Roots().kmsg}")  # fmt: skip
    parser.add_argument("--memory", metavar="SOCKET", default=SOCKET,
                        help=f"for memory of requeued jobs; empty: nowhere; default {SOCKET}")  # fmt: skip
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError("must be 0.05 to 3600")
    return value


def _settings(flags: argparse.Namespace) -> Settings:
    try:
        site.split_address(flags.listen)
    except ValueError as error:
        raise site.SiteError(f"--listen: {error}") from None
    settings = site.Site.load(coordinator=flags.coordinator, auth=flags.auth, config=flags.config)
    return Settings(
        node=site.node_name(flags.node),
        coordinator=settings.coordinator,
        listen=flags.listen,
        credentials=settings.credentials(),
        heartbeat_s=flags.heartbeat,
        roots=Roots(kmsg=flags.kmsg),
        memory=Path(flags.memory) if flags.memory else None,
        systemd=Systemd(os.environ.get("NOTIFY_SOCKET", ""), fd_store.inherited(os.environ, os.getpid())),
    )


async def _run(settings: Settings) -> None:
    loop, running = asyncio.get_running_loop(), asyncio.create_task(NodeDaemon(settings).run())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        _log.info("told to stop")


def _die(status: int, words: str) -> NoReturn:
    print(f"musterd: {words}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
