"""The jobs of a chaos run: one user's jobs one after another, and what each must have reached at its end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from muster.slurm.image.engine import EngineError
from muster.slurm.testcluster.cluster import LOGIN, Cluster
from muster.slurm.testcluster.training import SMALL_MODEL, Training, TrainingSpec
from muster.slurm.testcluster.waiting import WaitTimeout, wait_until

MODEL = (*SMALL_MODEL, "--bucket-cap-mb", "0.05", "--dropout", "0.1")
PAUSE_S = 0.1
"""Seconds that each rank sleeps after a step, so that one job lives through several faults."""
STEPS, NODES, SPARES = 400, 3, 1
JOB_END_TIMEOUT_S = 300.0
"""Seconds in which a job ends after the last fault."""
_POOL_FACTS = ("PoolQueued", "MemberJoined")
"""PoolQueued: a pool job has its number. MemberJoined: an agent of that job has joined."""


class PromiseBroken(AssertionError):
    """A check of Muster's promises failed."""


@dataclass
class JobSequence:
    """The jobs of one user, one after another. A job that has ended is followed by the next one."""

    user: str
    training: Training
    say: Callable[[str], None]
    runs: int = 0
    """How many jobs have ended."""
    killed_at: int = -1
    """The step at which a rank of the running job was last killed."""
    pool_joins: int = 0
    """How many nodes joined from the shared pool, over all jobs that have ended."""

    @property
    def has_ended(self) -> bool:
        """Whether the newest job has ended."""
        return bool(self.training.view.get("final"))

    def check_end(self, expected: str) -> None:
        """Waits for the end of the newest job. `expected`: the digest of its weights.

        Raises:
            PromiseBroken: it has not ended as it must.
        """
        wait_done(self.training)
        if digest(self.training) != expected:
            raise PromiseBroken(f"{self.training.spec.name} ended with other weights than a run without faults")
        self.runs += 1
        recoveries = len(self.training.view.get("recoveries", ()))
        joins = count_pool_joins(self.training)
        self.pool_joins += joins
        self.say(
            f"{self.training.spec.name}: done after {recoveries} recoveries, {joins} nodes joined from the pool, "
            "with the weights of a run without faults"
        )

    def submit_next(self) -> None:
        """Submits another job in place of the one that has ended."""
        self.training.close()
        self.training = submit(self.training.cluster, self.user, self.runs)
        self.killed_at = -1


def job_spec(name: str, user: str, spares: int = SPARES, pause_s: float = PAUSE_S) -> TrainingSpec:
    """A job that may be requeued, and that writes a digest of its weights at its end."""
    folder = f"/shared/jobs/{name}"
    arguments = (*MODEL, "--pause", str(pause_s), "--digest", f"{folder}/digest")
    settings = (f'durable_dir = "{folder}/durable"', "[slurm]", 'time = "01:00:00"')
    return TrainingSpec(name, NODES, spares, STEPS, arguments, settings, user)


def digest(training: Training) -> str:
    """The digest of the weights, which all ranks must agree on.

    Raises:
        PromiseBroken: the ranks have different weights.
    """
    digests = {(training.folder / f"digest.{rank}").read_text().strip() for rank in range(NODES)}
    if len(digests) != 1:
        raise PromiseBroken(f"{training.spec.name}: the ranks ended with different weights")
    return digests.pop()


def reference_digest(cluster: Cluster) -> str:
    """The digest of the weights after a job without faults."""
    with Training(cluster, job_spec("reference_digest", "alice", spares=0, pause_s=0.0)) as training:
        training.submit()
        wait_done(training)
        return digest(training)


def wait_done(training: Training) -> None:
    """Waits until the job has ended DONE.

    Raises:
        PromiseBroken: the job ended in another phase, or not in time.
    """
    try:
        view = training.wait_final(JOB_END_TIMEOUT_S)
        training.wait_job_ended(120)
    except (TimeoutError, WaitTimeout) as error:
        raise PromiseBroken(str(error)) from error
    if view["phase"] != "DONE":
        raise PromiseBroken(f"{training.spec.name} ended {view['phase']}: {view.get('reason')}")


def count_pool_joins(training: Training) -> int:
    """How many nodes of the shared pool joined the job, from the job's journal."""
    words = ("muster", "events", "--json", str(training.job))

    def read_events() -> list[str]:
        result = training.cluster.exec(LOGIN, *words, user=training.spec.user, check=False)
        return result.stdout.splitlines() if result.rc == 0 else []

    records = [
        json.loads(line) for line in wait_until(read_events, 60, f"the events of {training.spec.name}", every=0.5)
    ]
    jobs = {name: [json.loads(r["json"])["job"] for r in records if r["name"] == name] for name in _POOL_FACTS}
    return sum(job in jobs["PoolQueued"] for job in jobs["MemberJoined"])


def submit(cluster: Cluster, user: str, run: int) -> Training:
    """Submits the next job of the sequence."""
    training = Training(cluster, job_spec(f"{user}-{run}", user))
    wait_until(lambda: _submitted(training), 60, f"{user}'s job is taken", every=0.5)
    return training


def _submitted(training: Training) -> bool:
    try:
        return training.submit() > 0
    except EngineError as error:
        if re.search("coordinator|slurm", str(error), re.I):
            return False  # the coordinator or slurmctld is restarting: a user would retry as well
        raise
