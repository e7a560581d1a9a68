"""muster-coordinator: the command.

Exit status: 0 after SIGTERM; 69 the address is taken, of one with --shared-state, for which starting again may do; 70 a
bug (the log has its traceback); 74 the journal or the shared folder can't be written or read; 75 another coordinator
has the lease by now, or may have it (so does the death by SIGALRM); 78 the site has to mend its settings (address
taken, wrong flag or file, no munge, no Slurm). Agents keep training meanwhile, and the next start takes up where the
journal ends.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

from muster.daemon.coordinator.journal.journal import JournalError
from muster.daemon.coordinator.leadership.leader import Keeping, Watchdog, end_at_once, stand_by
from muster.daemon.coordinator.leadership.lease import Lease, LeaseError
from muster.daemon.coordinator.leadership.lease_holder import Incumbent
from muster.daemon.coordinator.leadership.state_folder import OWN, check_alone, check_shared
from muster.daemon.coordinator.policy.policy import Policy, PolicyError
from muster.daemon.coordinator.server import Coordinator, Settings
from muster.daemon.coordinator.slurm.local_slurm import LocalSlurm
from muster.daemon.transport import site_config
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.channel import CannotListen, check_address
from muster.daemon.transport.identity import IdentityError
from muster.slurm.client.backends.open import open_slurm
from muster.slurm.client.backends.run_command import NEEDED, can_end
from muster.slurm.client.errors import SlurmUnavailable
from muster.slurm.client.permit import Permit, unopposed
from muster.slurm.client.types import Slurm

EXIT_UNAVAILABLE, EXIT_BUG, EXIT_JOURNAL = 69, 70, 74
_log = logging.getLogger("muster.coordinator")


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point `muster-coordinator`."""
    flags = _parser().parse_args(argv)
    site_config.start_logging(flags.log_level)
    try:
        asyncio.run(_run(flags))
    except CannotListen as error:
        # A standby that stays down would not be missed before it is needed.
        _die(EXIT_UNAVAILABLE if flags.shared_state else site_config.EXIT_CONFIG, str(error))
    except (site_config.SiteError, IdentityError, PolicyError, SlurmUnavailable) as error:
        _die(site_config.EXIT_CONFIG, str(error))
    except (JournalError, LeaseError) as error:
        _die(EXIT_JOURNAL, f"not safe to go on: {error}")
    except Exception as error:  # noqa: BLE001  # the very top: a bug ends the process, the journal takes it up again
        _log.critical("a bug", exc_info=True)
        _die(EXIT_BUG, f"not safe to go on: {type(error).__name__}: {error} (a bug; the log has its traceback)")


def _die(status: int, words: str) -> NoReturn:
    print(f"muster-coordinator: {words}", file=sys.stderr)
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="muster-coordinator", description="Keeps gangs of training ranks running.")
    site_config.add_arguments(parser, listen=f":{site_config.COORDINATOR_PORT}")
    parser.add_argument("--state-dir", metavar="DIR", type=Path,
                        help=f"the journal's folder; default {OWN}")  # fmt: skip
    parser.add_argument("--shared-state", action="store_true",
                        help="the state folder is shared with a coordinator on another machine: whoever has its lease "
                        "acts, the other one stands by")  # fmt: skip
    parser.add_argument("--slurm", choices=["auto", "pyslurm", "cli", "fake"], default="auto",
                        help="how to talk to Slurm; fake: there is none (muster run --local)")  # fmt: skip
    parser.add_argument("--policy", metavar="FILE", type=Path, help="verdicts on signals, not the built-in table")
    parser.add_argument("--heartbeat", metavar="SECONDS", type=float, default=5.0,
                        help="pause between heartbeats of node daemons; default 5")  # fmt: skip
    return parser


async def _run(flags: argparse.Namespace) -> None:
    """Raises: see `main`."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    settings = site_config.Site.load(coordinator=flags.coordinator, auth=flags.auth, config=flags.config)
    policy, credentials = Policy.load(flags.policy), settings.credentials()
    flags.state_dir = await asyncio.to_thread(_check, flags)
    await _check_calls(flags)
    keeping = _keeping(flags.state_dir) if flags.shared_state else None
    permit = keeping.permit if keeping else unopposed
    slurm = await _open(flags.slurm, permit)
    try:
        async with _leased(keeping, told):
            if told.is_set():
                return
            coordinator = await Coordinator.open(
                Settings(
                    listen=flags.listen,
                    state_dir=flags.state_dir,
                    slurm=slurm,
                    credentials=credentials,
                    rights=Rights(settings.operator_uids()),
                    policy=policy,
                    heartbeat_s=flags.heartbeat,
                    before_acting=permit,
                    lease_term=keeping.lease.term if keeping else 0,
                )
            )
            await _serve(coordinator, told)
    finally:
        await slurm.aclose()


def _check(flags: argparse.Namespace) -> Path:
    """The state folder. Whatever a takeover needs is looked at before it is needed.

    Raises:
        SiteError, LeaseError, CannotListen: it would fail.
    """
    if flags.shared_state:
        check_address(flags.listen)
        return check_shared(flags.state_dir, Incumbent.of_this_process())
    folder: Path = flags.state_dir or OWN
    check_alone(folder)
    return folder


async def _check_calls(flags: argparse.Namespace) -> None:
    """Raises SiteError: a call to Slurm could outlive the lease under which it was made."""
    if flags.slurm == "fake" or await can_end():
        return
    if flags.shared_state:
        raise site_config.SiteError(
            f"with --shared-state calls to Slurm must not outlive this process, which takes {NEEDED}: install it, or "
            "run one coordinator alone"
        )
    _log.warning("calls to Slurm may outlive this process: that takes %s", NEEDED)


def _keeping(folder: Path) -> Keeping:
    return Keeping(Lease(folder, Incumbent.of_this_process(), Watchdog().arm), end_at_once)


@asynccontextmanager
async def _leased(keeping: Keeping | None, told: asyncio.Event) -> AsyncIterator[None]:
    """Hold the lease where the state is shared; waits for it, or until told to leave."""
    if keeping is None or not await stand_by(keeping.lease, told):
        yield
        return
    _log.info("holds the lease, term %d", keeping.lease.term)
    keeping.start()
    try:
        yield
    finally:
        keeping.stop()


async def _open(kind: str, permit: Permit) -> Slurm:
    if kind == "fake":
        return LocalSlurm()
    return await open_slurm("cli" if kind == "cli" else "pyslurm", strict=kind == "pyslurm", permit=permit)


async def _serve(coordinator: Coordinator, told: asyncio.Event) -> None:
    try:
        await coordinator.start()
        _log.info("listens on port %d, term %d", coordinator.port, coordinator.engine.journal.term)
        asked = asyncio.create_task(told.wait())
        broken = asyncio.create_task(coordinator.wait())
        await asyncio.wait({asked, broken}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if broken.done():
            broken.result()
        broken.cancel()
    finally:
        await coordinator.stop()


if __name__ == "__main__":
    main()
