"""Files that only their owner reads: what they hold, for example a job's environment, may be secret.

A new file has mode 0600 from the start, whatever the umask. No link is followed, and no file that was there is written
to: in a folder that several users share, somebody else may have made either.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def create(path: Path, text: str) -> None:
    """Create the file `path` with `text`.

    Raises:
        FileExistsError: there is a file, or a link, of this name.
        OSError: the file can't be written. It is removed again.
    """
    descriptor = os.open(path, _NEW, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise


def replace(path: Path, text: str) -> None:
    """Remove what has the name `path`, and create the file anew.

    Raises:
        OSError: as `create`.
    """
    path.unlink(missing_ok=True)
    create(path, text)
