"""Slurm jobs as processes: agents start with their job, are killed with it, and its batch script ends with its gang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.recovery import shared_pool
from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.durable_state import Gang
from muster.daemon.coordinator.core.state.state_tables import OUT_OF_SERVICE
from muster.simulator.world.agent import Agent, Post
from muster.simulator.world.machine import Machine
from muster.simulator.world.network import COORDINATOR
from muster.slurm.client.parsing.sbatch_request import JobRequest, read_request
from muster.slurm.client.states import JobState
from muster.slurm.client.types import Job

if TYPE_CHECKING:
    from muster.simulator.world.world import World

_AGAIN_S = 0.5
_ASK_S = 1.5
_SIGTERM = "Slurm has sent SIGTERM"
_LAUNCHED_S = 5.0
"""An agent that was not launched within this will not be."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A job as its user asks for it."""

    gang: str
    spec: events.GangSpec
    time_limit_s: int | None = None
    pool: int = 0
    """The request for a node of the shared pool that this job is, 0: it is the gang's own job; `restarts` of that."""
    restarts: int = 0


class Jobs:
    """All jobs of the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._wanted: dict[int, Wanted] = {}
        self._seen: dict[int, Job] = {}
        self._batches: dict[tuple[int, int], tuple[Machine, int]] = {}
        """By job and restart, the batch processes that have not left: on which host, in which of its lives."""
        self.ids: dict[str, int] = {}
        self.batch_heard_at: dict[int, float] = {}
        """By job, when its batch process last reached a coordinator."""
        self.never_start: set[str] = set()
        """Nodes whose agent does not start."""
        self.sbatch_fails = 0.0
        """So often, of the requests for a node of the pool."""
        self.kill_wait_s = 30.0
        """From SIGTERM to SIGKILL."""

    def submit(self, wanted: Wanted) -> None:
        """A job enters the queue."""
        spec = wanted.spec
        number = len(self._wanted) + 1
        self._wanted[number], self.ids[wanted.gang] = wanted, number
        self._world.cluster.submit(
            JobRequest(
                nodes=spec.nodes + spec.spares, name=wanted.gang, no_kill=True, requeue=spec.requeue,
                time_limit_s=wanted.time_limit_s,
            )
        )  # fmt: skip

    def submit_pool(self, post: Post, serial: int, options: Sequence[str]) -> events.PoolAnswer:
        """An agent asks for a node of the shared pool, which is the whole cluster."""
        if self._world.slurm.unavailable_reason or self._world.chance.random() < self.sbatch_fails:
            return events.PoolAnswer(serial, 0, "sbatch: error: Batch job submission failed")
        number = len(self._wanted) + 1
        self._wanted[number] = Wanted(post.gang, self._wanted[post.job].spec, None, serial, post.restarts)
        exclude = read_request("", options, "").exclude
        self._world.cluster.submit(JobRequest(nodes=1, name=post.gang, requeue=False, exclude=exclude))
        return events.PoolAnswer(serial, number)

    def pooled(self, gang: str) -> list[Job]:
        """The gang's small jobs, as Slurm has them."""
        return [self._seen[n] for n, wanted in self._wanted.items() if wanted.gang == gang and wanted.pool]

    def submitted(self, gang: str) -> events.GangSubmitted:
        """What registers the gang."""
        job = self.ids[gang]
        return events.GangSubmitted(gang, job, 1000, gang, self._wanted[job].spec, "{}")

    def changed(self, job: Job) -> None:
        """Slurm has changed a job."""
        before, self._seen[job.id] = self._seen.get(job.id), job
        ran = before if before is not None and before.state is JobState.RUNNING else None
        runs = job.state is JobState.RUNNING
        if runs and (ran is None or ran.restart_count != job.restart_count):
            self._begin(job)
        for node in ran.nodes if ran else ():
            if not runs:
                self._world.schedule.later(self._world.chance.random(), self._clear, ran, node, _SIGTERM)
            elif node not in job.nodes:
                self._world.schedule.later(2 * self._world.chance.random(), self._clear, ran, node, "")
        if ran and not runs:
            self._world.schedule.later(self.kill_wait_s, self._kill_batch, ran)

    def running(self, gang: str) -> Job | None:
        """The gang's job while it runs."""
        job = self._seen.get(self.ids.get(gang, 0))
        return job if job is not None and job.state is JobState.RUNNING else None

    def job(self, gang: str) -> Job:
        """The gang's job as Slurm has it."""
        return self._seen[self.ids[gang]]

    def preempt(self, job: Job, grace_s: float) -> None:
        """Every process is told; the job goes back into the queue, or ends, unless it has done so by then."""
        gang = self._wanted[job.id].gang
        for node in job.nodes:
            agent = self._world.agents.get((gang, node))
            if agent is not None and agent.awake() and agent.post.restarts == job.restart_count:
                agent.terminate(_SIGTERM)
        self._world.schedule.later(grace_s, self._preempted, job)

    def _preempted(self, job: Job) -> None:
        if not self._runs(job):
            return
        if self._seen[job.id].requeue:
            self._world.cluster.requeue(job.id, (), None)
        else:
            self._world.cluster.cancel(job.id)

    # -- processes --

    def _begin(self, job: Job) -> None:
        world = self._world
        world.note(f"Slurm starts job {job.id} (restart {job.restart_count}) on {' '.join(job.nodes)}")
        host = world.machines[job.batch_host]
        self._batches[job.id, job.restart_count] = (host, host.boot)
        for node in job.nodes:
            world.schedule.later(world.timing.launch(), self._launch, job, node, 0)
        world.schedule.later(world.timing.launch(), self._batch, job)

    def launches(self, job: Job) -> bool:
        """The batch process of this run of the job, and its srun, may still live, or begin."""
        return self._has_batch(job.id, job.restart_count)

    def _runs(self, job: Job) -> bool:
        """This run of the job is not over."""
        now = self._seen[job.id]
        return now.state is JobState.RUNNING and now.restart_count == job.restart_count

    def _holds(self, job: Job, node: str) -> bool:
        return self._runs(job) and node in self._seen[job.id].nodes

    def _launch(self, job: Job, node: str, tries: int) -> None:
        """srun starts the agent, once nothing of the runs before is left on any node: Slurm calls it completing."""
        world = self._world
        if not self._holds(job, node) or node in self.never_start or not self.launches(job):
            return
        wanted, machine = self._wanted[job.id], world.machines[node]
        gang = wanted.gang
        left = not wanted.pool and self._is_completing(job, gang)
        if left or not (machine.kernel and not machine.frozen) or world.machines[job.batch_host].frozen:
            if tries < 180:
                world.schedule.later(_AGAIN_S, self._launch, job, node, tries + 1)
            return
        post = Post(gang, job.id, job.restart_count, node == job.batch_host, f"{node}-r{job.restart_count}")
        if wanted.pool:
            post = Post(gang, job.id, wanted.restarts, False, f"{node}-p{wanted.pool}", wanted.pool)
        world.depots.job_starts(node, job.id)
        agent = Agent(world, machine, post)
        world.depots.take(agent)
        world.add_agent(agent)

    def _is_completing(self, job: Job, gang: str) -> bool:
        """An agent of a run before lives, or a batch process."""
        agents = [agent for (id, _), agent in self._world.agents.items() if id == gang]
        if any(agent.alive and agent.post.restarts < job.restart_count for agent in agents):
            return True
        return any(self._has_batch(job.id, restarts) for restarts in range(job.restart_count))

    def _has_batch(self, job: int, restarts: int) -> bool:
        host, boot = self._batches.get((job, restarts), (None, 0))
        return host is not None and host.kernel and host.boot == boot

    def _clear(self, job: Job, node: str, words: str) -> None:
        """slurmd ends what the job has on a node that it no longer has; a node that is cut off hears of it later."""
        world = self._world
        if self._holds(job, node):
            return
        agent = world.agents.get((self._wanted[job.id].gang, node))
        restarts = self._wanted[job.id].restarts or job.restart_count
        if agent is None or not agent.alive or (agent.post.job, agent.post.restarts) != (job.id, restarts):
            return
        if not agent.machine.kernel:
            return
        if agent.machine.frozen or not world.network.both(COORDINATOR, node):
            world.schedule.later(1.0, self._clear, job, node, words)
        elif words and self.kill_wait_s and not agent.stopped:
            agent.terminate(words)
            world.schedule.later(self.kill_wait_s, self._clear, job, node, "")
        else:
            world.end_agent(agent)

    def _batch(self, job: Job) -> None:
        """The batch script asks after its gang until it may end."""
        world = self._world
        if self._wanted[job.id].pool:
            if self._runs(job):
                self._batch_of_pool(job)
            return
        if not self.launches(job):
            return
        host, coordinator = world.machines[job.batch_host], world.coordinator
        reached = not host.frozen and world.network.both(COORDINATOR, host.name)
        gang = coordinator.core.state.gangs.get(self._wanted[job.id].gang) if coordinator.awake() else None
        if reached and gang is not None:
            if not gang.outlived(job.id, job.restart_count):
                self.batch_heard_at[job.id] = world.schedule.now
                coordinator.post(events.BatchHeard(gang.id, job.id, job.restart_count))
            if coordinator.core.may_leave(gang, job.id, job.restart_count):
                del self._batches[job.id, job.restart_count]
                if self._runs(job):
                    world.laws.batch_leaves(gang, self._seen[job.id])
                    world.cluster.end_batch_script(job.id, gang.exit_code)
                return
        world.schedule.later(_ASK_S, self._batch, job)

    def _kill_batch(self, job: Job) -> None:
        """Slurm's patience with the batch process of a run that is over has an end."""
        host = self._world.machines[job.batch_host]
        if not self.launches(job):
            self._batches.pop((job.id, job.restart_count), None)
        elif host.frozen or not self._world.network.both(COORDINATOR, host.name):
            self._world.schedule.later(1.0, self._kill_batch, job)
        else:
            self._world.note(f"Slurm kills the batch process of job {job.id} (restart {job.restart_count})")
            del self._batches[job.id, job.restart_count]

    def _batch_of_pool(self, job: Job) -> None:
        """The batch script of a small job ends with its agent."""
        world, node = self._world, job.batch_host
        agent = world.agents.get((self._wanted[job.id].gang, node))
        mine = agent if agent is not None and agent.post.job == job.id else None
        waits = world.schedule.now - (job.start_time or 0.0) < _LAUNCHED_S and node not in self.never_start
        if world.machines[node].kernel and not (mine.alive if mine else waits):
            world.cluster.end_batch_script(job.id, 0)
        world.schedule.later(_ASK_S, self._batch, job)

    # -- what the coordinator asks Slurm before it believes an agent --

    def admits(self, gang: Gang | None, node: str, post: Post) -> str | None:
        """As service_agent does: empty, words for a dismissal, or None where Slurm doesn't tell."""
        job, restarts = post.job, post.restarts
        if post.pool and (refused := shared_pool.refusal(gang, post.pool, job, node)):
            return refused
        if post.pool and self._world.coordinator.core.state.node(node).verdict in OUT_OF_SERVICE:
            return None
        if gang is not None and restarts < gang.restart_count:
            return "this run of the job is over"
        member = gang.members.get(node) if gang is not None else None
        if gang is not None and member is not None and member.job == job and restarts == gang.restart_count:
            return ""
        if self._world.slurm.unavailable_reason:
            return None
        found = self._world.cluster.jobs()[job]
        if restarts < found.restart_count or node not in found.nodes:
            return f"{node} does not belong to job {job}"
        return ""
