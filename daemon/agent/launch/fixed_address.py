"""An address in the command of the ranks: it stays what it is when a swap takes rank 0 to another node."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from muster.v1.common_pb2 import JobSpec

# What a shell or the script itself works out when the rank starts (`$(scontrol ...)`) is no fixed address.
_FIXED = re.compile(r"(?:tcp://|--master[-_]addr[= ]|\bMASTER_ADDR=)[\"']?(?!localhost|127\.)[\w.-]+(?::\d+)?")


def found(command: Sequence[str]) -> str:
    """The address that the command names; empty: none."""
    match = _FIXED.search(" ".join(command))
    return match[0] if match else ""


def tell(spec: JobSpec, node: str) -> None:
    """Print a warning if the command names an address. Only the first node of the script prints it."""
    if node in spec.own_nodes[:1] and (address := found(spec.command)):
        print(
            f"muster: {address} stands in the arguments of the ranks, and can't follow a swap of that node: let the "
            "script read MASTER_ADDR and MASTER_PORT (env://)",
            file=sys.stderr,
            flush=True,
        )
