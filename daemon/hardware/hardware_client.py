"""Asks this node's musterd what hardware the node has."""

from __future__ import annotations

from google.protobuf import json_format

from muster.daemon.hardware.node_hardware import InvalidHardware, report_of
from muster.daemon.host import kept_memory_client
from muster.v1.common_pb2 import Hardware

ASK_TIMEOUT_S = 1.0
"""Seconds that musterd may take: it answers from memory."""


class HardwareUnknown(Exception):
    """Nobody says what the node has. The message says why."""


def ask(socket: str) -> Hardware:
    """What musterd at the socket `socket` has seen so far. Blocks.

    Raises:
        HardwareUnknown: there is no musterd, it is of an older version, or its answer is no report.
    """
    try:
        answer, _ = kept_memory_client.send_request(socket, {"ask_hardware": {}}, timeout_s=ASK_TIMEOUT_S)
        if refused := answer.get("refused"):
            raise HardwareUnknown(f"musterd refuses to say it: {refused}")
        hardware = json_format.ParseDict(answer.get("hardware", {}), Hardware(), ignore_unknown_fields=True)
        report_of(hardware)
    except (OSError, ValueError, AttributeError, json_format.ParseError, InvalidHardware) as error:
        raise HardwareUnknown(f"{socket}: {error}") from None
    return hardware
