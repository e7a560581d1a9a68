"""What must be right about the state folder before anything is kept there, alone or with a standby.

The settings of two machines are written twice, so they may differ: each of these mistakes would leave both acting, or
nobody when it is needed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from muster.daemon.coordinator.journal.per_term_journal import newest_term
from muster.daemon.coordinator.leadership.lease import FILE, LeaseError
from muster.daemon.coordinator.leadership.lease_holder import Incumbent
from muster.daemon.transport.site_config import SiteError

OWN = Path("/var/lib/muster")
"""A coordinator's folder where no other is given."""


def check_alone(folder: Path) -> None:
    """Before a coordinator uses `folder` by itself.

    Raises:
        SiteError: two coordinators share it.
    """
    try:
        shared = (folder / FILE).exists() or newest_term(folder)
    except OSError:
        return  # it is not there yet, or can't be read: the journal's to say
    if shared:
        raise SiteError(
            f"{folder} is shared with a coordinator on another machine, which may be acting: "
            "give --shared-state here, too, or another --state-dir"
        )


def check_shared(folder: Path | None, me: Incumbent, environ: Mapping[str, str] = os.environ) -> Path:
    """Before a coordinator stands by in `folder` (None: none was given), which it returns. May take as long as a share.

    Raises:
        SiteError: it is this machine's own, or open to others.
        LeaseError: it is not there, or can't be written.
    """
    owned = {Path(path).resolve() for path in environ.get("STATE_DIRECTORY", "").split(":") if path}
    if folder is None or folder.resolve() in owned:
        raise SiteError(
            f"--shared-state needs a folder that both machines see, and {folder or OWN} is this machine's own: "
            "give --state-dir, for example /shared/muster"
        )
    try:
        mode = folder.stat().st_mode
    except OSError as error:
        # Never made here: in the place of a share that is not mounted, a lease would be this machine's alone.
        raise LeaseError(
            f"{folder}: {error.strerror}. Is the share mounted? (The folder is made once, by hand, for Slurm's user, "
            "with mode 0700)"
        ) from error
    if mode & 0o022:
        raise SiteError(
            f"{folder} may be written by others (mode {stat.S_IMODE(mode):04o}), who could take the lease: "
            f"chmod 0700 {folder}"
        )
    try:
        _try_to_write(folder / f"standby-{me.host}-{me.pid}")
    except OSError as error:
        raise LeaseError(f"nothing can be written in {folder}: {error.strerror}. Slurm's user must own it") from error
    return folder


def _try_to_write(path: Path) -> None:
    """Now rather than when the other one has died."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    finally:
        path.unlink(missing_ok=True)
