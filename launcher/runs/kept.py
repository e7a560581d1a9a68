"""Keeps the record of a run that is being submitted. Whatever goes wrong here, the job is queued."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from muster.daemon.host import clock
from muster.launcher.command import print_note
from muster.launcher.runs import record
from muster.launcher.runs.origins import origins

if TYPE_CHECKING:
    from muster.launcher.submission.script import Submission


class RunRecord:
    """One record; an asynchronous context manager. The repository and the packages are asked at once, beside sbatch.

    `environ`: the environment of the submitting shell, which the job inherits.
    """

    def __init__(self, submission: Submission, environ: Mapping[str, str]) -> None:
        self._submission, self._environ = submission, environ
        self._job = 0

    async def __aenter__(self) -> Self:
        spec = self._submission.spec
        wanted = self._submission.job.record.keep
        environ = {**self._environ, **spec.env}
        self._origins = asyncio.ensure_future(origins(spec.command, spec.work_dir, environ)) if wanted else None
        return self

    def keep(self, job: int) -> None:
        """The job is queued: its record is to be kept."""
        self._job = job

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._origins is None:
            return
        if not self._job:
            self._origins.cancel()
            await asyncio.wait([self._origins])  # it ends the programs that it has started
            return
        found = record.make_record(self._submission, self._job, clock.wall(), await self._origins, self._environ)
        folder = record.store_folder(self._submission.job.record.store, self._environ)
        try:
            record.write_record(folder, found)
        except OSError as failed:
            print_note(f"muster: no record of this run is kept: {failed.filename or folder}: {failed.strerror}")
            print_note("  [record] store in job.toml, or MUSTER_RUNS, names another folder; keep = false keeps none")
