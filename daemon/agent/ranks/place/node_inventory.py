"""What the agent knows of its own node before ranks start: the hardware, and what NCCL's configuration files set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from muster.v1.common_pb2 import Hardware

SITE_NCCL_FILE = Path("/etc/nccl.conf")
_MOST_BYTES = 1 << 16
"""Of a configuration file; the rest is not read."""


@dataclass(frozen=True, slots=True)
class NodeInventory:
    """`nccl_files`: the text of NCCL's configuration files, one after the other."""

    hardware: Hardware = field(default_factory=Hardware)
    nccl_files: str = ""


def read_nccl_files(environ: Mapping[str, str]) -> str:
    """The text of the files that NCCL reads: the user's, and the site's. Blocks: a home may be on shared storage."""
    return "\n".join(_texts(environ))


def _texts(environ: Mapping[str, str]) -> Iterator[str]:
    own = environ.get("NCCL_CONF_FILE") or (f"{home}/.nccl.conf" if (home := environ.get("HOME")) else "")
    for path in (*([Path(own)] if own else []), SITE_NCCL_FILE):
        try:
            with path.open("rb") as file:
                yield file.read(_MOST_BYTES).decode(errors="replace")
        except OSError:
            continue
