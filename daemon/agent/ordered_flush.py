"""The flush that the coordinator orders: this node's shards of one version go to the shared storage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from muster.checkpoint.format.errors import FlushError
from muster.checkpoint.store.checkpoint_service import CheckpointService
from muster.daemon.agent.ending import Lifetime
from muster.v1.agent_pb2 import FlushOrder, Order
from muster.v1.common_pb2 import JobSpec, Version


class OrderedFlush:
    """One flush at a time. Training goes on if it fails: the coordinator decides what follows.

    ended_serial: of the newest flush that has ended; 0: none has.
    error: why that one has failed; empty: it has not.
    version: what that one has written; None: nothing.
    """

    def __init__(
        self,
        spec: JobSpec,
        checkpoints: CheckpointService,
        lifetime: Lifetime,
        status_changed: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._checkpoints = checkpoints
        self._lifetime = lifetime
        self._status_changed = status_changed
        self._started_serial = 0
        self._task: asyncio.Task[Any] | None = None
        self.ended_serial = 0
        self.error = ""
        self.version: Version | None = None

    def apply_order(self, order: Order) -> None:
        """Start the flush that the order newly asks for, or give up the one that it asks for no longer."""
        if order.HasField("flush"):
            if order.flush.serial > self._started_serial:
                self._started_serial = order.flush.serial
                self._start(order.flush)
        elif self._task is not None:
            self._task.cancel()  # the file system may hang

    def _start(self, order: FlushOrder) -> None:
        spec = self._spec
        work = self._checkpoints.flush(order, spec.durable_dir, spec.durable_keep, spec.durable_keep_s)
        self._task = self._lifetime.start(work)
        self._task.add_done_callback(lambda task: self._on_ended(order.serial, task))

    def _on_ended(self, serial: int, task: asyncio.Task[Any]) -> None:
        if serial < self._started_serial:
            return  # a newer order has cancelled this flush; only the newer flush is reported
        error = FlushError("given up by the coordinator") if task.cancelled() else task.exception()
        self.ended_serial = serial
        self.error = str(error) if error is not None else ""
        self.version = task.result() if error is None else None
        self._status_changed()
