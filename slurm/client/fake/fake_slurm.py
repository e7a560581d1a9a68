"""The Protocol `Slurm` over a cluster in memory: for `muster run --local`, the simulator and tests.

Whoever holds it makes things happen on `cluster` (`lose`, `recover`, `finish`). With `silent_because` set, it
is a slurmctld that does not answer: queries give `Unknown`, commands raise `SlurmTimeout` and change nothing.
No method ever waits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from muster.slurm.client.errors import SlurmRefused, SlurmTimeout
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.parsing import sbatch_request
from muster.slurm.client.types import DEFAULT_DEADLINE, GONE, JobAnswers, NodeAnswers, Topology, Unknown


class FakeSlurm:
    """Slurm's answers for `cluster`."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.silent_because = ""

    async def jobs(
        self, ids: Collection[int] | None = None, *, deadline: float = DEFAULT_DEADLINE
    ) -> JobAnswers | Unknown:
        if self.silent_because:
            return Unknown(self.silent_because)
        found = self.cluster.jobs()
        return dict(found) if ids is None else {id: found.get(id, GONE) for id in ids}

    async def nodes(
        self, names: Collection[str] | None = None, *, deadline: float = DEFAULT_DEADLINE
    ) -> NodeAnswers | Unknown:
        if self.silent_because:
            return Unknown(self.silent_because)
        found = self.cluster.nodes()
        return dict(found) if names is None else {name: found.get(name, GONE) for name in names}

    async def topology(self, *, deadline: float = DEFAULT_DEADLINE) -> Topology | Unknown:
        return Unknown(self.silent_because) if self.silent_because else self.cluster.topology

    async def drain(self, node: str, reason: str, *, deadline: float = DEFAULT_DEADLINE) -> None:
        self._answering().drain(node, reason)

    async def down(self, node: str, reason: str, *, deadline: float = DEFAULT_DEADLINE) -> None:
        self._answering().down(node, reason)

    async def resume(self, node: str, *, deadline: float = DEFAULT_DEADLINE) -> None:
        self._answering().resume(node)

    async def let_go(self, job: int, node: str, *, deadline: float = DEFAULT_DEADLINE) -> None:
        self._answering().shrink(job, node)

    async def requeue(
        self,
        job: int,
        exclude: Collection[str] = (),
        admit: Collection[str] = (),
        *,
        restarts: int | None = None,
        deadline: float = DEFAULT_DEADLINE,
    ) -> None:
        self._answering().requeue(job, exclude, restarts, admit)

    async def set_requeue_flag(self, job: int, flag: bool, *, deadline: float = DEFAULT_DEADLINE) -> None:
        self._answering().update(f"set the requeue flag of job {job}", job, requeue=flag)

    async def set_comment(self, job: int, text: str, *, deadline: float = DEFAULT_DEADLINE) -> None:
        self._answering().update(f"set the comment of job {job}", job, comment=text)

    async def cancel(self, job: int, signal: int | None = None, *, deadline: float = DEFAULT_DEADLINE) -> None:
        cluster = self._answering()
        if signal is None:
            cluster.cancel(job)

    async def complete_job(self, job: int, exit_code: int, *, deadline: float = DEFAULT_DEADLINE) -> None:
        if not 0 <= exit_code <= 255:
            raise ValueError(f"exit code {exit_code}: a job's exit code is 0 to 255")
        self._answering().complete(job, exit_code)

    async def submit(
        self,
        script: Path,
        options: Sequence[str] = (),
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        deadline: float = DEFAULT_DEADLINE,
    ) -> int:
        cluster = self._answering()
        try:
            text = script.read_text()
        except OSError as error:
            raise SlurmRefused(f"submit {script}", f"Unable to open file {script}") from error
        return cluster.submit(sbatch_request.read_request(text, options, str(cwd)))

    async def aclose(self) -> None:
        """Nothing to end."""

    def _answering(self) -> FakeCluster:
        if self.silent_because:
            raise SlurmTimeout(self.silent_because)
        return self.cluster
