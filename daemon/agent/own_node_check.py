"""The agent's check of its own node: once, at the agent's start, while the gang gathers.

A node without GPUs is checked without PyTorch. Whether PyTorch can be imported there is seen where the ranks will be
forked from, which costs nothing: no rank starts before these imports have ended.

Rejected: a fork of the zygote for checks with GPUs, which would save the import of PyTorch. A driver that hangs would
hang a child of the process that starts the ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from muster.daemon.agent.ranks.zygote_handle import CannotStart, ZygoteSpec, interpreter_of
from muster.daemon.preflight import check_process
from muster.daemon.preflight.check_message import as_message
from muster.daemon.preflight.check_result import CheckResult, Outcome
from muster.v1.common_pb2 import CheckOutcome, NodeCheck


class OwnNodeCheck:
    """Checks the node with the job's interpreter.

    `broken_import` returns the installed module that can't be imported, and why, after the imports; empty: none.

    status: for the agent's status; None if the job wants no check.
    pids: the process of the check, while there is one.
    """

    def __init__(
        self,
        wanted: bool,
        job: ZygoteSpec,
        changed: Callable[[], None],
        broken_import: Callable[[], Awaitable[str]],
        deadline_s: float = check_process.DEADLINE_S,
    ) -> None:
        self._job = job
        self._broken_import = broken_import
        self._deadline_s = deadline_s
        self._changed = changed
        self.pids: set[int] = set()
        self.status = NodeCheck(outcome=CheckOutcome.CHECK_OUTCOME_RUNNING) if wanted else None

    async def run(self) -> None:
        """Check the node, if the job wants that. Returns within the check's deadline."""
        if self.status is not None:
            imports_until = asyncio.get_running_loop().time() + self._deadline_s
            result = await self._check()
            self.pids.clear()
            self.status = as_message(await self._with_imports(result, imports_until))
            self._changed()

    async def _check(self) -> CheckResult:
        try:
            command = check_process.command(interpreter_of(self._job))
        except CannotStart as error:
            return CheckResult(Outcome.FAILED, str(error))
        spec = self._job
        return await check_process.run_check(command, spec.environment, spec.work_dir, started=self.pids.add)

    async def _with_imports(self, result: CheckResult, until: float) -> CheckResult:
        """The result, unless an import has failed. Imports that last longer than a check may accuse nobody."""
        if result.outcome not in (Outcome.PASSED, Outcome.SLOW):
            return result
        try:
            async with asyncio.timeout_at(until):
                broken = await self._broken_import()
        except TimeoutError:
            return result
        return replace(result, outcome=Outcome.FAILED, reason=" ".join(broken.split())) if broken else result
