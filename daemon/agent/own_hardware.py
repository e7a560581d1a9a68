"""What hardware this agent's node has, as the node's musterd says, and what NCCL's files set. Without musterd, nothing
is known."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from google.protobuf import json_format

from muster.daemon.agent.ranks.place.node_inventory import NodeInventory, read_nccl_files
from muster.daemon.host import kept_memory_client
from muster.daemon.transport.node_hardware import InvalidHardware, nvlink_domain_of, report_of
from muster.v1.common_pb2 import Hardware

log = logging.getLogger(__name__)

DEADLINE_S = 2.0
"""Seconds for which ranks and the agent's start may wait for an answer. A home on shared storage may hang."""
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


class OwnHardware:
    """Asks musterd at the socket `socket`; empty: ask nobody. `ask` blocks; it is called in a thread.

    `environ`: the environment that Slurm gave to the agent. It says where NCCL's files are.
    """

    def __init__(
        self,
        socket: str,
        environ: Mapping[str, str],
        ask: Callable[[str], Hardware] = ask,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._deadline_s = deadline_s
        self._asking: asyncio.Future[NodeInventory] | None = None
        self._socket = socket
        self._environ = environ
        self._ask = ask
        self.current = NodeInventory()
        """What was said last."""

    @property
    def nvlink_domain(self) -> str:
        """The NVLink domain of several nodes that all GPUs of the node are in; empty: none."""
        return nvlink_domain_of(self.current.hardware)

    async def refresh(self) -> None:
        """Ask again. If musterd does not answer, what it said before stays. A question that hangs is asked once only:
        other work needs threads, too."""
        if not self._socket:
            return
        asking = self._asking = self._asking or asyncio.ensure_future(asyncio.to_thread(self._read))
        done, _ = await asyncio.wait([asking], timeout=self._deadline_s)
        if not done:
            log.warning("the hardware of this node is not known: no answer for %g s", self._deadline_s)
            return
        self._asking = None
        try:
            self.current = asking.result()
        except HardwareUnknown as error:
            log.info("the hardware of this node is not known: %s", error)

    def _read(self) -> NodeInventory:
        return NodeInventory(self._ask(self._socket), read_nccl_files(self._environ))
