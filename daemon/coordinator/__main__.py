"""muster-coordinator: the command.

Exit status:
    0   SIGTERM ended the process.
    69  The address is in use, with --shared-state: another start may succeed.
    70  A bug. The log has the traceback.
    71  Memory has run out. Another start may succeed.
    74  The journal or the shared folder can't be read or written.
    75  Another coordinator has the lease, or may have it. A death by SIGALRM means the same.
    78  The site has to correct its settings (address in use, wrong flag or file, no munge, no Slurm).

Ranks keep training meanwhile. The next start continues from the end of the journal.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

from muster.daemon.coordinator.journal.journal import JournalError
from muster.daemon.coordinator.leadership.leader import LeaseKeeper, Watchdog, exit_at_once, wait_for_lease
from muster.daemon.coordinator.leadership.lease import Lease, LeaseError
from muster.daemon.coordinator.leadership.lease_holder import LeaseHolder
from muster.daemon.coordinator.leadership.state_folder import (
    DEFAULT_STATE_DIR,
    check_shared_folder,
    check_unshared_folder,
)
from muster.daemon.coordinator.leadership.writable_folder import wait_until_writable
from muster.daemon.coordinator.policy.policy import SITE_POLICY, Policy, PolicyError
from muster.daemon.coordinator.server import Coordinator, Settings
from muster.daemon.coordinator.slurm.local_slurm import LocalSlurm
from muster.daemon.host.process import process_memory
from muster.daemon.host.process.process_memory import collect_seldom
from muster.daemon.metrics.metrics_access import MetricsAccess
from muster.daemon.transport import site_config
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.channel import ListenError, check_listen_address
from muster.daemon.transport.identity import IdentityError
from muster.daemon.transport.management_hosts import ManagementHosts
from muster.daemon.transport.tls import TlsError
from muster.slurm.client.backends import completion
from muster.slurm.client.backends.open import open_slurm
from muster.slurm.client.backends.run_command import LIFETIME_TOOLS, can_limit_lifetime
from muster.slurm.client.deadline import LeaseGuard, no_lease
from muster.slurm.client.errors import SlurmError, SlurmUnavailable
from muster.slurm.client.parsing.site_fabric import FABRIC_FILE
from muster.slurm.client.types import Slurm

EXIT_UNAVAILABLE, EXIT_BUG, EXIT_JOURNAL = 69, 70, 74
_log = logging.getLogger("muster.coordinator")


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point `muster-coordinator`."""
    flags = _parser().parse_args(argv)
    site_config.start_logging(flags.log_level, flags.log_format, "muster-coordinator")
    collect_seldom()
    try:
        asyncio.run(_run(flags))
    except ListenError as error:
        # Status 69 makes systemd start a standby again: a standby that is down would be noticed too late.
        _die(EXIT_UNAVAILABLE if flags.shared_state else site_config.EXIT_CONFIG, str(error))
    except (site_config.SiteError, IdentityError, TlsError, PolicyError, SlurmUnavailable) as error:
        _die(site_config.EXIT_CONFIG, str(error))
    except (JournalError, LeaseError) as error:
        _die(EXIT_JOURNAL, f"not safe to go on: {error}")
    except MemoryError as error:
        _die(process_memory.EXIT_MEMORY, f"not safe to go on: {process_memory.describe_shortage(error)}")
    except Exception as error:  # noqa: BLE001  # top level: a bug ends the process, the next start replays the journal
        _log.critical("a bug", exc_info=True)
        _die(EXIT_BUG, f"not safe to go on: {type(error).__name__}: {error} (a bug; the log has its traceback)")


def _die(status: int, message: str) -> NoReturn:
    print(f"muster-coordinator: {message}", file=sys.stderr)
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = site_config.CommandLine(
        allow_abbrev=False, prog="muster-coordinator", description="Keeps gangs of training ranks running."
    )
    site_config.add_arguments(parser, listen=f":{site_config.COORDINATOR_PORT}")
    site_config.add_metrics_argument(parser)
    parser.add_argument("--state-dir", metavar="DIR", type=Path,
                        help=f"the journal's folder; default {DEFAULT_STATE_DIR}")  # fmt: skip
    parser.add_argument("--shared-state", action="store_true",
                        help="share the state folder with a coordinator on another machine: the one that holds the "
                        "lease acts, the other is the standby")  # fmt: skip
    parser.add_argument("--slurm", choices=["auto", "pyslurm", "cli", "fake"], default="auto",
                        help="how to call Slurm; fake: without Slurm (muster run --local)")  # fmt: skip
    parser.add_argument(
        "--local-nodes", metavar="NAME", nargs="+", default=(), help="without Slurm: the nodes of a job"
    )
    parser.add_argument(
        "--policy",
        metavar="FILE",
        type=Path,
        default=SITE_POLICY if os.path.exists(SITE_POLICY) else None,
        help=f"a policy file that changes rows of the built-in policy.toml; default {SITE_POLICY} if it exists",
    )
    return parser


async def _run(flags: argparse.Namespace) -> None:
    """Raises: see `main`."""
    loop, stop_requested = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_requested.set)
    settings = site_config.Site.load(
        coordinator=flags.coordinator,
        auth=flags.auth,
        connections=flags.connections,
        metrics_listen=flags.metrics_listen,
        config=flags.config,
        calls_coordinator=False,
    )
    metrics = MetricsAccess.of_site(settings)
    policy, credentials = Policy.load(flags.policy), settings.credentials()
    certificate_files = settings.certificate_files()
    await wait_until_writable(flags.state_dir or DEFAULT_STATE_DIR, stop_requested)
    if stop_requested.is_set():
        return
    flags.state_dir = await asyncio.to_thread(_check_state_dir, flags)
    await _check_slurm_calls_can_end(flags)
    keeper = _lease_keeper(flags.state_dir) if flags.shared_state else None
    lease_guard = keeper.guard if keeper else no_lease
    slurm = await _open_slurm(flags, lease_guard)
    try:
        async with _lease_held(keeper, stop_requested):
            if stop_requested.is_set():
                return
            coordinator = await Coordinator.open(
                Settings(
                    listen=flags.listen,
                    state_dir=flags.state_dir,
                    slurm=slurm,
                    credentials=credentials,
                    certificate_files=certificate_files,
                    configured_names=settings.coordinator_hosts(),
                    rights=Rights(
                        settings.operator_uids(), management_hosts=ManagementHosts(settings.management_hosts)
                    ),
                    policy=policy,
                    confirm_leadership=lease_guard,
                    lease_term=keeper.lease.term if keeper else 0,
                    private_jobs=settings.privacy == "jobs",
                    metrics=metrics,
                    fabric_file=None if flags.slurm == "fake" else FABRIC_FILE,
                )
            )
            await _serve(coordinator, stop_requested)
    finally:
        await slurm.aclose()


def _check_state_dir(flags: argparse.Namespace) -> Path:
    """The state folder. A standby checks at its start what a takeover will need.

    Raises:
        SiteError, LeaseError, ListenError: a takeover would fail.
    """
    if flags.shared_state:
        check_listen_address(flags.listen)
        return check_shared_folder(flags.state_dir, LeaseHolder.of_this_process())
    folder: Path = flags.state_dir or DEFAULT_STATE_DIR
    check_unshared_folder(folder)
    return folder


async def _check_slurm_calls_can_end(flags: argparse.Namespace) -> None:
    """Raises SiteError: a call to Slurm could outlive the lease under which it was made."""
    if flags.slurm == "fake" or await can_limit_lifetime():
        return
    if flags.shared_state:
        raise site_config.SiteError(
            f"with --shared-state calls to Slurm must not outlive this process, which needs {LIFETIME_TOOLS}: "
            "install it, or run one coordinator without a standby"
        )
    _log.warning("calls to Slurm may outlive this process: to end them it needs %s", LIFETIME_TOOLS)


def _lease_keeper(folder: Path) -> LeaseKeeper:
    return LeaseKeeper(Lease(folder, LeaseHolder.of_this_process(), Watchdog().arm), exit_at_once)


@asynccontextmanager
async def _lease_held(keeper: LeaseKeeper | None, stop_requested: asyncio.Event) -> AsyncIterator[None]:
    """Wait for the lease and hold it while the body runs; no lease without a `keeper`, or once a stop is requested."""
    if keeper is None or not await wait_for_lease(keeper.lease, stop_requested):
        yield
        return
    _log.info("this coordinator holds the lease, term %d", keeper.lease.term)
    keeper.start()
    try:
        yield
    finally:
        keeper.stop()


async def _open_slurm(flags: argparse.Namespace, lease_guard: LeaseGuard) -> Slurm:
    kind = flags.slurm
    if kind == "fake":
        return LocalSlurm(flags.local_nodes)
    backend = "cli" if kind == "cli" else "pyslurm"
    opened, _ = await asyncio.gather(
        open_slurm(backend, strict=kind == "pyslurm", lease_guard=lease_guard), _check_jobs_can_be_ended()
    )
    return opened


async def _check_jobs_can_be_ended() -> None:
    try:
        await completion.library()
    except SlurmError as error:
        _log.warning("a job that loses its first node may hold its nodes until its time limit: %s", error)


async def _serve(coordinator: Coordinator, stop_requested: asyncio.Event) -> None:
    try:
        await coordinator.start()
        _log.info("listens on port %d, term %d", coordinator.port, coordinator.engine.journal.term)
        stop = asyncio.create_task(stop_requested.wait())
        failure = asyncio.create_task(coordinator.wait())
        await asyncio.wait({stop, failure}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if failure.done():
            failure.result()
        failure.cancel()
    finally:
        await coordinator.stop()


if __name__ == "__main__":
    main()
