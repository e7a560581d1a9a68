"""The node check that the coordinator asks for, before Muster resumes a node that it has drained.

musterd makes it beside no job, with the interpreter of the site's choice. The result is reported with each heartbeat
until the coordinator no longer asks for this check, so a lost stream or another coordinator loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
from dataclasses import replace
from typing import NoReturn

from muster.daemon.preflight import check_process, inventory
from muster.daemon.preflight.check_message import as_message
from muster.daemon.preflight.check_result import CheckResult, Outcome
from muster.v1 import node_pb2 as pb

_log = logging.getLogger(__name__)


class RequestedCheck:
    """Makes each check that is asked for once.

    `interpreter`: the command line of a Python interpreter with numpy or PyTorch; empty: this daemon makes no checks.
    `driver_gpus`: how many GPUs the driver has.
    """

    def __init__(self, interpreter: str, driver_gpus: int | None = None) -> None:
        self._interpreter = shlex.split(interpreter)
        self._driver_gpus = inventory.driver_gpus() if driver_gpus is None else driver_gpus
        self._asked = asyncio.Event()
        self._request = ""
        self._checked: pb.RequestedCheck | None = None

    def ask(self, request: str) -> None:
        """The coordinator asks for this check; empty: for none."""
        self._request = request
        if request and self._interpreter:
            self._asked.set()

    def message(self) -> pb.RequestedCheck | None:
        """The check that is asked for, once it has ended."""
        checked = self._checked
        return checked if checked is not None and checked.request == self._request else None

    async def run(self) -> NoReturn:
        """Make checks until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            request = self._request
            if request and (self._checked is None or self._checked.request != request):
                _log.info("the coordinator asks for a check of this node")
                result = await self.make()
                _log.info("the check of this node: %s %s", result.outcome, result.reason)
                self._checked = pb.RequestedCheck(request=request, check=as_message(result))

    async def make(self) -> CheckResult:
        """Check the node now. A check of the processors alone is no check of a node with GPUs."""
        result = await check_process.run_check(check_process.command(self._interpreter), os.environ)
        if self._driver_gpus and not result.host_to_device_gb_s and result.outcome is Outcome.PASSED:
            reason = "the GPUs were not checked: the interpreter has no PyTorch with CUDA"
            return replace(result, outcome=Outcome.FAILED, reason=reason)
        return result
