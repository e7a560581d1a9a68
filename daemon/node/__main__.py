"""The command `musterd`.

Exit status:
    0   SIGTERM ended the process.
    69  The listen address is in use or does not exist yet. A restart may help.
    70  A bug. The log has its traceback.
    71  Memory has run out. Another start may succeed.
    78  The site must correct its settings (wrong flag or file, no libmunge). A restart does not help.

A missing coordinator never ends musterd.
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

from muster.daemon.host.kept_memory_client import SOCKET
from muster.daemon.host.process import process_memory
from muster.daemon.metrics.metrics_access import MetricsAccess
from muster.daemon.node import nvhcd_service
from muster.daemon.node.daemon import NodeDaemon, NodeSettings, Systemd
from muster.daemon.node.kept_memory import systemd_fd_store
from muster.daemon.node.sensors.sensor import SensorPaths
from muster.daemon.node.watchdog import watchdog_s
from muster.daemon.transport import site_config
from muster.daemon.transport.channel import ListenError
from muster.daemon.transport.identity import IdentityError

EXIT_UNAVAILABLE, EXIT_BUG = 69, 70
KMSG_POSITION = Path("/run/muster/kmsg-position")
"""In the unit's RuntimeDirectory, which systemd keeps over a restart and removes when the service is stopped."""
_log = logging.getLogger("muster.node")


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point `musterd`."""
    flags = _parser().parse_args(argv)
    site_config.start_logging(flags.log_level, flags.log_format, "musterd", node=site_config.node_name(flags.node))
    try:
        asyncio.run(_run(_settings(flags)))
    except (site_config.SiteError, IdentityError) as error:
        _die(site_config.EXIT_CONFIG, str(error))
    except ListenError as error:
        _die(EXIT_UNAVAILABLE, str(error))
    except MemoryError as error:
        _die(process_memory.EXIT_MEMORY, process_memory.describe_shortage(error))
    except Exception as error:  # noqa: BLE001  # the very top
        _log.critical("a bug of Muster", exc_info=True)
        _die(EXIT_BUG, f"{type(error).__name__}: {error} (a bug; the log has its traceback)")


def _parser() -> argparse.ArgumentParser:
    parser = site_config.CommandLine(
        allow_abbrev=False, prog="musterd", description="Sends heartbeats for one node and watches its hardware."
    )
    site_config.add_arguments(parser, listen=f":{site_config.NODE_PORT}")
    site_config.add_metrics_argument(parser)
    parser.add_argument("--node", metavar="NAME", help="this node in Slurm; default SLURMD_NODENAME, else hostname -s")
    parser.add_argument("--heartbeat", metavar="SECONDS", type=_seconds, default=5.0,
                        help="pause between heartbeats until the coordinator asks otherwise; default 5")  # fmt: skip
    parser.add_argument("--kmsg", metavar="FILE", type=Path, default=SensorPaths().kmsg,
                        help=f"the kernel log, or a file in its place; default {SensorPaths().kmsg}")  # fmt: skip
    parser.add_argument("--kmsg-position", metavar="FILE",
                        help="where the position in the kernel log is kept over a restart of musterd, in memory of "
                        f"this boot; empty: nowhere; default {KMSG_POSITION}, and nowhere with --kmsg")  # fmt: skip
    parser.add_argument("--nvidia-driver", metavar="FILE", type=Path, default=SensorPaths().nvidia_driver,
                        help="NVIDIA GPUs are watched while this file exists; "
                        f"default {SensorPaths().nvidia_driver}")  # fmt: skip
    parser.add_argument("--host-root", metavar="DIR", type=Path, default=SensorPaths().host_root,
                        help="the folder whose sys and proc show this host's hardware; default /")  # fmt: skip
    parser.add_argument("--memory", metavar="SOCKET", default=SOCKET,
                        help=f"for memory of requeued jobs; empty: keep no memory; default {SOCKET}")  # fmt: skip
    parser.add_argument("--nvhcd", metavar="SOCKET",
                        help="for NVRx, which asks for the verdict on this node; empty: none; default "
                        f"{nvhcd_service.NAME} beside the socket of --memory")  # fmt: skip
    parser.add_argument("--metrics-textfile", metavar="DIR", type=Path,
                        help="write metrics into this folder of node_exporter; default: nowhere")  # fmt: skip
    parser.add_argument("--check-python", metavar="COMMAND", default="",
                        help="a Python interpreter with PyTorch or numpy, with its flags: it makes the check of this "
                        "node before Muster resumes the node; default: no check, and no resume")  # fmt: skip
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError("must be 0.05 to 3600")
    return value


def _kmsg_position(flags: argparse.Namespace) -> Path | None:
    if flags.kmsg_position is None:
        return KMSG_POSITION if flags.kmsg == SensorPaths().kmsg else None
    return Path(flags.kmsg_position) if flags.kmsg_position else None


def _settings(flags: argparse.Namespace) -> NodeSettings:
    try:
        site_config.split_address(flags.listen)
    except ValueError as error:
        raise site_config.SiteError(f"--listen: {error}") from None
    settings = site_config.Site.load(
        coordinator=flags.coordinator,
        auth=flags.auth,
        connections=flags.connections,
        metrics_listen=flags.metrics_listen,
        config=flags.config,
    )
    node = site_config.node_name(flags.node)
    return NodeSettings(
        node=node,
        coordinator=settings.coordinator,
        listen=flags.listen,
        credentials=settings.credentials(),
        heartbeat_s=flags.heartbeat,
        roots=SensorPaths(
            kmsg=flags.kmsg,
            kmsg_position=_kmsg_position(flags),
            nvidia_driver=flags.nvidia_driver,
            host_root=flags.host_root,
            node=node,
        ),
        memory=Path(flags.memory) if flags.memory else None,
        nvhcd=_nvhcd(flags.memory, flags.nvhcd),
        check_python=flags.check_python,
        systemd=Systemd(
            os.environ.get("NOTIFY_SOCKET", ""),
            systemd_fd_store.inherited_descriptors(os.environ, os.getpid()),
            watchdog_s(os.environ, os.getpid()),
        ),
        trust=settings.trust(),
        metrics=MetricsAccess.of_site(settings),
        metrics_textfile=flags.metrics_textfile,
    )


def _nvhcd(memory: str, given: str | None) -> Path | None:
    """The socket for NVRx."""
    if given is None:
        return Path(memory).with_name(nvhcd_service.NAME) if memory else None
    return Path(given) if given else None


async def _run(settings: NodeSettings) -> None:
    loop, running = asyncio.get_running_loop(), asyncio.create_task(NodeDaemon(settings).run())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        _log.info("stopping: got a signal")


def _die(status: int, words: str) -> NoReturn:
    print(f"musterd: {words}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
