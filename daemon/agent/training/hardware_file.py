"""What hardware the nodes of a run have, for its record: one line for each node, in `RUN_DIR/logs/GANG/hardware/NODE`.

The agent of the node writes it once (preflight/inventory). All functions block.
"""

from __future__ import annotations

import os

from muster.daemon.host.held_folder import HeldFolder
from muster.daemon.host.rank_log_files import hold_log_folder, log_folder

_FOLDER = "hardware"
_MOST_BYTES = 4096


def write(run_dir: str, gang: str, node: str, line: str) -> None:
    """Leave the line of a node. The run folder must exist.

    Raises:
        OSError: it can't be written, or another user has taken a name on its way.
    """
    with hold_log_folder(run_dir, gang, _FOLDER) as folder:
        part = f".{node}.part"
        with os.fdopen(folder.create(part), "w", encoding="utf-8") as file:
            file.write(f"{line}\n")
        folder.rename(part, node)


def read(run_dir: str, gang: str) -> dict[str, list[str]]:
    """The nodes of a run by their lines. What can't be read is left out."""
    found: dict[str, list[str]] = {}
    try:
        with HeldFolder.open(log_folder(run_dir, gang) / _FOLDER) as folder:
            for node in sorted(name for name in folder.names() if not name.startswith(".")):
                try:
                    with os.fdopen(folder.open_file(node), "rb") as file:
                        line = file.read(_MOST_BYTES).decode(errors="replace").strip()
                except OSError:
                    continue
                found.setdefault(line, []).append(node)
    except OSError:
        pass  # an earlier version has written none
    return found
