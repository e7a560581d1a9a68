"""Queues jobs with Slurm's command `sbatch`.

`CliSlurm` is this and everything else. A program that only queues a job imports this module alone: it needs none of the
types of Slurm's answers, and starts sooner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from muster.slurm.client.backends import run_command
from muster.slurm.client.deadline import DEFAULT_TIMEOUT_S, Deadline
from muster.slurm.client.errors import SlurmUnavailable
from muster.slurm.client.parsing import error_messages, queued_job

_SHOW_TIMEOUT_S = 5.0


class Sbatch:
    """Runs `sbatch`, from PATH or from the folder `bin`. The part of the Protocol `Slurm` that queues a job."""

    def __init__(self, bin: Path | None = None) -> None:
        self._bin = bin

    def _argv(self, argv: Sequence[str]) -> list[str]:
        return [str(self._bin / argv[0]) if self._bin else argv[0], *argv[1:]]

    async def get_ready(self) -> None:
        """Finds out how this host can start programs. Otherwise `submit` does: a caller saves its time that does this
        while it waits for something else.
        """
        await run_command.can_limit_lifetime()

    async def submit(
        self,
        script: Path,
        options: Sequence[str] = (),
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int:
        """See Slurm.submit."""
        argv = self._argv(["sbatch", "--parsable", *options, str(script)])
        done = await run_command.run(argv, timeout_s=Deadline(timeout_s).remaining_s, cwd=cwd, env=env)
        if done.exit_status != 0:
            raise error_messages.to_error(f"submit {script}", done.error_text)
        try:
            return int(done.stdout.split(";")[0])
        except ValueError:
            raise SlurmUnavailable(f"sbatch --parsable printed {done.stdout!r}, expected a job id") from None

    async def pending_reason(self, job: int) -> str:
        """Why a job has not started, in Slurm's word. Empty: Slurm does not answer."""
        return queued_job.reason(await self.shown("job", str(job)))

    async def shown(self, kind: str, name: str) -> str:
        """What Slurm says of a job or a partition, in one line. Empty: it does not answer."""
        argv = self._argv(["scontrol", "--oneliner", "show", kind, name])
        try:
            done = await run_command.run(argv, timeout_s=_SHOW_TIMEOUT_S)
        except SlurmUnavailable:
            return ""
        first = done.stdout.splitlines()[:1]  # an array has a line for each task that runs
        return first[0] if done.exit_status == 0 and first else ""

    async def aclose(self) -> None:
        """Does nothing: no process outlives its call."""
