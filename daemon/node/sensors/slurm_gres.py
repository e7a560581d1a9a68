"""How many GPUs Slurm believes that this node has: from its slurm.conf, without a command.

The file is read again when it has changed. Nothing is known where the file is not on the node, has no line for the
node, or counts parts of GPUs (MIG) as GPUs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from muster.slurm.client.parsing import hostlist
from muster.slurm.client.parsing.gres import count_gpus

_MOST_BYTES = 16 << 20
"""Of a file; a larger one is not read."""
_log = logging.getLogger(__name__)


class NodeGres:
    """The GPUs of one node. `paths`: the first that exists is read."""

    def __init__(self, node: str, paths: Sequence[Path]) -> None:
        self._node = node
        self._paths = paths
        self._seen: tuple[Path, int, int] | None = None
        self._gpus: int | None = None

    def gpus(self) -> int | None:
        """How many GPUs the node has in Slurm; None: not known."""
        for path in self._paths:
            try:
                status = path.stat()
            except OSError:
                continue
            if self._seen != (path, status.st_mtime_ns, status.st_size):
                self._seen = (path, status.st_mtime_ns, status.st_size)
                self._gpus = self._read(path)
            return self._gpus
        return None

    def _read(self, path: Path) -> int | None:
        try:
            with path.open("rb") as file:
                text = file.read(_MOST_BYTES).decode(errors="replace")
            return gpus_of_node(text, self._node)
        except (OSError, ValueError) as error:
            _log.warning("how many GPUs Slurm expects is not known: %s: %s", path, error)
            return None


def gpus_of_node(text: str, node: str) -> int | None:
    """The GPUs of `node` in a slurm.conf; None: it has no line for the node, or GRES that count parts of GPUs.

    Raises:
        ValueError: a list of nodes is malformed.
    """
    default = ""
    for settings in _node_lines(text):
        gres = settings.get("gres", default)
        if settings["nodename"].upper() == "DEFAULT":
            default = gres
        elif node in hostlist.expand(settings["nodename"]):
            return count_gpus(gres)
    return None


def _node_lines(text: str) -> Iterator[dict[str, str]]:
    for line in text.replace("\\\n", " ").splitlines():
        words = line.split("#", 1)[0].split()
        if words and words[0].lower().startswith("nodename="):
            yield {key.lower(): value.strip('"') for key, _, value in (word.partition("=") for word in words)}
