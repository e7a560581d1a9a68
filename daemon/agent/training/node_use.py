"""How much of this node is used, for the agent's status: its memory, and the GPUs of its ranks, as NVML tells musterd.

It is looked at now and then, in a thread, and a change alone sends no status for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from google.protobuf import json_format

from muster.daemon.host import kept_memory_client
from muster.daemon.host.process.cgroup_memory import MemoryLeft, memory_left
from muster.daemon.host.worker_threads import run_in_own_thread
from muster.v1.agent_pb2 import NodeUse
from muster.v1.memory_pb2 import GpuUse, MemoryAnswer

LOOK_S = 15.0
"""Seconds between two looks."""
STATUS_WITHIN_S = 15.0
"""Seconds within which a change is reported, if no status goes before."""
_TIMEOUT_S = 1.0
"""Seconds that musterd may take: it answers from memory."""
_ROUNDED_TO = 1 << 26
"""Bytes: smaller changes are none."""


class NodeUseRecord:
    """Of one agent.

    Args:
        socket: musterd's; empty: there is none.
        gpus: the indexes of the GPUs that the ranks of this node have; empty: not known, so all GPUs count.
        schedule_status: called with the seconds within which the status is to be sent.
    """

    def __init__(
        self,
        socket: str,
        gpus: Callable[[], Collection[int]],
        schedule_status: Callable[[float], None],
        memory: Callable[[], MemoryLeft | None] = memory_left,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._socket, self._gpus, self._schedule_status = socket, gpus, schedule_status
        self._memory, self._pause = memory, pause
        self.status: NodeUse | None = None
        """What the agent's status says; None: nothing is known yet."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self._pause(LOOK_S)
            use = _put_together(*await run_in_own_thread(self._look, "muster-use"), self._gpus())
            if use != self.status:
                self.status = use
                self._schedule_status(STATUS_WITHIN_S)

    def _look(self) -> tuple[MemoryLeft | None, list[GpuUse]]:
        return self._memory(), ask_gpus(self._socket) if self._socket else []


def ask_gpus(socket: str) -> list[GpuUse]:
    """The use of the node's GPUs, as musterd at the socket `socket` says; empty: it does not. Blocks."""
    try:
        answer, _ = kept_memory_client.send_request(socket, {"ask_gpu_use": {}}, timeout_s=_TIMEOUT_S)
        return list(json_format.ParseDict(answer, MemoryAnswer(), ignore_unknown_fields=True).gpu_use)
    except (OSError, ValueError, json_format.ParseError):  # no musterd, or one of an earlier version
        return []


def _put_together(memory: MemoryLeft | None, all_gpus: list[GpuUse], own: Collection[int]) -> NodeUse:
    use = NodeUse()
    if memory is not None and memory.of_bytes:
        use.memory_bytes = _rounded(max(0, memory.of_bytes - memory.bytes))
        use.memory_limit_bytes = memory.of_bytes
    if gpus := [gpu for gpu in all_gpus if gpu.total_bytes and (not own or gpu.index in own)]:
        fullest = max(gpus, key=lambda gpu: gpu.used_bytes / gpu.total_bytes)
        use.gpu_memory_bytes, use.gpu_memory_limit_bytes = _rounded(fullest.used_bytes), fullest.total_bytes
        use.gpu_busy_percent = round(sum(gpu.busy_percent for gpu in gpus) / len(gpus))
    return use


def _rounded(size: int) -> int:
    return round(size / _ROUNDED_TO) * _ROUNDED_TO
