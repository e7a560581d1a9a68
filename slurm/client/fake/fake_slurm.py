"""Implements the Protocol `Slurm` on an in-memory cluster.

`muster run --local`, the simulator and tests use it. The owner reports events to `cluster` (`fail_node`,
`recover_node`, `end_batch_script`). While `unavailable_reason` is set, slurmctld does not answer: queries return
`Unknown`; commands raise `SlurmTimeout` and change nothing. No method waits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from muster.fabric.sources.slurm_topology import Kind, SlurmTopology, Unit
from muster.slurm.client.deadline import DEFAULT_TIMEOUT_S
from muster.slurm.client.errors import SlurmRefused, SlurmTimeout
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.parsing import sbatch_request
from muster.slurm.client.types import (
    GONE,
    JobAnswers,
    NeverStarts,
    NodeAnswers,
    Partition,
    StartEstimate,
    Unknown,
)


class FakeSlurm:
    """Slurm's answers for `cluster`."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.unavailable_reason = ""
        self.private: frozenset[str] | Unknown = frozenset()

    async def jobs(
        self,
        ids: Collection[int] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        in_doubt: Collection[int] = (),
    ) -> JobAnswers | Unknown:
        if self.unavailable_reason:
            return Unknown(self.unavailable_reason)
        found = self.cluster.jobs()
        return dict(found) if ids is None else {id: found.get(id, GONE) for id in ids}

    async def pending_reason(self, job: int) -> str:
        """See muster.slurm.client.backends.sbatch.Sbatch."""
        return self.cluster.jobs()[job].reason

    async def nodes(
        self, names: Collection[str] | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> NodeAnswers | Unknown:
        if self.unavailable_reason:
            return Unknown(self.unavailable_reason)
        found = self.cluster.nodes()
        return dict(found) if names is None else {name: found.get(name, GONE) for name in names}

    async def topologies(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[SlurmTopology, ...] | Unknown:
        if self.unavailable_reason:
            return Unknown(self.unavailable_reason)
        below: dict[str, list[str]] = {}
        for node, leaf in self.cluster.leaves.items():
            below.setdefault(leaf, []).append(node)
        units = tuple(Unit(leaf, tuple(nodes)) for leaf, nodes in below.items())
        return (SlurmTopology(Kind.TREE, units) if units else SlurmTopology(Kind.FLAT),)

    async def partitions(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Mapping[str, Partition] | Unknown:
        if self.unavailable_reason:
            return Unknown(self.unavailable_reason)
        return {name: Partition(name, nodes=nodes) for name, nodes in self.cluster.partitions.items()}

    async def drain(self, node: str, reason: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._available_cluster().drain(node, reason)

    async def down(self, node: str, reason: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._available_cluster().down(node, reason)

    async def resume(self, node: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._available_cluster().resume(node)

    async def remove_node(self, job: int, node: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._available_cluster().remove_node(job, node)

    async def requeue(
        self,
        job: int,
        exclude: Collection[str] = (),
        admit: Collection[str] = (),
        *,
        restarts: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._available_cluster().requeue(job, exclude, restarts, admit)

    async def set_requeue_flag(self, job: int, flag: bool, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._available_cluster().update(f"set the requeue flag of job {job}", job, requeue=flag)

    async def set_comments(
        self, job: int, comment: str = "", admin_comment: str = "", *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        operation = f"set the comments of job {job}"
        self._available_cluster().update(operation, job, comment=comment, admin_comment=admin_comment)

    async def cancel(self, job: int, signal: int | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        cluster = self._available_cluster()
        if signal is None:
            cluster.cancel(job)

    async def complete_job(self, job: int, exit_code: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not 0 <= exit_code <= 255:
            raise ValueError(f"exit code {exit_code}: a job's exit code is 0 to 255")
        self._available_cluster().complete(job, exit_code)

    async def submit(
        self,
        script: Path,
        options: Sequence[str] = (),
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int:
        cluster = self._available_cluster()
        try:
            text = script.read_text()
        except OSError as error:
            raise SlurmRefused(f"submit {script}", f"Unable to open file {script}") from error
        return cluster.submit(sbatch_request.read_request(text, options, str(cwd)))

    async def estimate_start(
        self,
        script: Path,
        options: Sequence[str] = (),
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> StartEstimate | NeverStarts | Unknown:
        if self.unavailable_reason:
            return Unknown(self.unavailable_reason)
        return self.cluster.estimate_start(sbatch_request.read_request(script.read_text(), options, str(cwd)))

    async def max_switch_wait_s(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int | Unknown:
        return Unknown(self.unavailable_reason) if self.unavailable_reason else 300

    async def private_data(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> frozenset[str] | Unknown:
        return Unknown(self.unavailable_reason) if self.unavailable_reason else self.private

    async def aclose(self) -> None:
        """Does nothing: there is no process to end."""

    def _available_cluster(self) -> FakeCluster:
        if self.unavailable_reason:
            raise SlurmTimeout(self.unavailable_reason)
        return self.cluster
