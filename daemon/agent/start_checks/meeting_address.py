"""Addresses in the command of the ranks at which these are to meet, in place of the one that Muster gives."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from muster.v1.common_pb2 import JobSpec

_TCP = "tcp://"
"""How init_process_group writes an address (init_method)."""
_ADDRESS = re.compile(
    r"(?:--master[-_]addr(?:ess)?[= ]|\bMASTER_ADDR=)[\"']?(?P<master>[\w.-]+)"
    rf"|(?:(?<![\w.-])(?P<name>[\w.-]+)[\"']?[=: ]\s*)?[\"']?{_TCP}(?P<host>\[[^\s\]]+\]|[^\s\"':/]+)(?P<port>:\d+)?"
)
_MEETING = re.compile(r"(?:^|[-_.])(?:init|dist|distributed|ddp|rdzv|rendezvous|master)(?=$|[-_.])", re.IGNORECASE)
"""In the name of an option or of a variable that says where ranks meet."""
_LOCAL = re.compile(r"localhost$|127\.")
_LITERAL = re.compile(r"\[|\d+(?:\.\d+){3}$")
"""An IP address. No node's name tells whether it is one of the job's, and ranks wait in vain if that is missed."""


@dataclass(frozen=True, slots=True)
class MeetingAddress:
    """One address.

    text: as it stands in the command.
    is_tcp: it is for init_process_group itself, so that rank 0 is to listen there.
    is_fixed: it stays what it is when a swap takes rank 0 to another node. What a shell works out when the rank starts
        (`$(scontrol ...)`) does not, and this host is always this host.
    """

    text: str
    is_tcp: bool
    is_fixed: bool


def find(command: Sequence[str], hosts: Collection[str]) -> Iterator[MeetingAddress]:
    """The addresses in a command. A tcp:// with another name is left out: it may be that of a data base or a log.

    Args:
        hosts: nodes of the job. An interface of one is often named after it (`n0-ib`).
    """
    names = {host.partition(".")[0] for host in hosts}
    for found in _ADDRESS.finditer(" ".join(command)):
        host = found["master"] or found["host"]
        is_here, is_made = _LOCAL.match(host) is not None, host.startswith("$")
        of_job = is_here or is_made or _LITERAL.match(host) or _begins_with(host, names)
        if found["master"] or of_job or _MEETING.search(found["name"] or ""):
            text = found[0] if found["master"] else f"{_TCP}{host}{found['port'] or ''}"
            yield MeetingAddress(text, not found["master"], not (is_here or is_made))


def _begins_with(host: str, names: Collection[str]) -> bool:
    ends = (end for end in range(1, len(host) + 1) if not host[end : end + 1].isdigit())
    return any(host[:end] in names for end in ends)


def tell_if_fixed(spec: JobSpec, node: str) -> None:
    """Print a warning if the command names a fixed address. Only the first node of the script prints it."""
    if node not in spec.own_nodes[:1]:
        return
    found = find(spec.command, spec.own_nodes)
    if address := next((one.text for one in found if one.is_fixed), ""):
        print(
            f"muster: {address} stands in the arguments of the ranks, and can't follow a swap of that node: let the "
            "script read MASTER_ADDR and MASTER_PORT (env://)",
            file=sys.stderr,
            flush=True,
        )
