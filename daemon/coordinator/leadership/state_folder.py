"""Checks of the state folder before a coordinator uses it, alone or with a standby.

A site configures its two machines separately, so their settings may differ. Each mistake that is checked here would let
both coordinators act, or leave none to act when it is needed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from muster.daemon.coordinator.journal.per_term_journal import newest_term
from muster.daemon.coordinator.leadership.lease import LEASE_FILE, LeaseError
from muster.daemon.coordinator.leadership.lease_holder import LeaseHolder
from muster.daemon.transport.site_config import SiteError

DEFAULT_STATE_DIR = Path("/var/lib/muster")
"""The state folder of a coordinator that was started without --state-dir."""


def check_unshared_folder(folder: Path) -> None:
    """Check that a coordinator may use `folder` alone.

    Raises:
        SiteError: two coordinators share the folder.
    """
    try:
        shared = (folder / LEASE_FILE).exists() or newest_term(folder)
    except OSError:
        return  # the folder does not exist yet or can't be read: opening the journal reports that
    if shared:
        raise SiteError(
            f"{folder} is shared with a coordinator on another machine, which may be acting: "
            "give --shared-state here, too, or another --state-dir"
        )


def check_shared_folder(folder: Path | None, process: LeaseHolder, environ: Mapping[str, str] = os.environ) -> Path:
    """Check that two coordinators may share `folder` (None: the command line named none), and return the folder.

    Blocks for as long as the shared file system does.

    Raises:
        SiteError: the folder is local to this machine, or other users may write it.
        LeaseError: the folder does not exist or can't be written.
    """
    local_folders = {Path(path).resolve() for path in environ.get("STATE_DIRECTORY", "").split(":") if path}
    if folder is None or folder.resolve() in local_folders:
        raise SiteError(
            f"--shared-state needs a folder that both machines see, and {folder or DEFAULT_STATE_DIR} is this "
            "machine's own: give --state-dir, for example /shared/muster"
        )
    try:
        mode = folder.stat().st_mode
    except OSError as error:
        # The folder is never created here: if the share is not mounted, the lease would be local to this machine.
        raise LeaseError(
            f"{folder}: {error.strerror}. Is the share mounted? (An administrator creates the folder once, owned by "
            "SlurmUser, with mode 0700)"
        ) from error
    if mode & 0o022:
        raise SiteError(
            f"{folder} may be written by others (mode {stat.S_IMODE(mode):04o}), who could take the lease: "
            f"chmod 0700 {folder}"
        )
    try:
        _check_writable(folder / f"standby-{process.host}-{process.pid}")
    except OSError as error:
        raise LeaseError(f"can't write in {folder}: {error.strerror}. SlurmUser must own the folder") from error
    return folder


def _check_writable(path: Path) -> None:
    """Create and remove `path` now, rather than fail when the other coordinator has died."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    finally:
        path.unlink(missing_ok=True)
