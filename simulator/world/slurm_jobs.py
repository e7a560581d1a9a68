"""Slurm jobs as processes: agents start with their job, Slurm's kills end them, and the batch script ends with its
gang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.recovery.growth import shared_pool
from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.gang import Gang
from muster.node_health import OUT_OF_SERVICE
from muster.simulator.environment.machine import Machine
from muster.simulator.environment.network import COORDINATOR
from muster.simulator.world.agent import Agent, AgentIdentity
from muster.slurm.client.parsing.sbatch_request import JobRequest, read_request
from muster.slurm.client.states import JobState
from muster.slurm.client.types import Job

if TYPE_CHECKING:
    from muster.simulator.world.world import World

_LAUNCH_RETRY_S = 0.5
"""Seconds between two attempts of srun to start an agent."""
_POLL_INTERVAL_S = 1.5
"""Seconds between two polls of a batch process."""
_SIGTERM_NOTICE = "Slurm has sent SIGTERM"
_LAUNCH_TIMEOUT_S = 5.0
"""Seconds. An agent that has not started by then will not start."""


@dataclass(frozen=True, slots=True)
class JobSubmission:
    """A job as its user submits it."""

    gang: str
    spec: events.GangSpec
    time_limit_s: int | None = None
    pool_request: int = 0
    """The serial of the request for a pool node that this pool job answers. 0: this is the gang's own job. `restarts`
    is the gang's restart count at the request."""
    restarts: int = 0
    wanted_node: str = ""
    """The node that a pool job asks for by its name. Empty: any."""


class SlurmJobs:
    """All jobs of the run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._submissions: dict[int, JobSubmission] = {}
        self._jobs: dict[int, Job] = {}
        self._held: dict[tuple[int, int], set[str]] = {}
        """By job and restart count: every node that this run of the job has had."""
        self._own_nodes: dict[tuple[int, int], tuple[str, ...]] = {}
        """By job and restart count: what the job's script takes for its own nodes."""
        self._batch_processes: dict[tuple[int, int], tuple[Machine, int]] = {}
        """By job and restart count: the host of each batch process that has not ended, and the boot of that host."""
        self.job_ids: dict[str, int] = {}
        self.batch_heard_at: dict[tuple[int, int], float] = {}
        """By job and restart count: the time at which the batch process of this run last reached a coordinator."""
        self.unstartable_nodes: set[str] = set()
        """Nodes on which no agent starts."""
        self.sbatch_failure_rate = 0.0
        """Probability that sbatch fails for a pool node."""
        self.kill_wait_s = 30.0
        """Seconds from SIGTERM to SIGKILL (Slurm's KillWait)."""

    def submit(self, submission: JobSubmission) -> None:
        """Put a job into the queue."""
        spec = submission.spec
        job_id = len(self._submissions) + 1
        self._submissions[job_id], self.job_ids[submission.gang] = submission, job_id
        self._world.cluster.submit(
            JobRequest(
                nodes=spec.nodes + spec.spares, name=submission.gang, no_kill=True, requeue=spec.requeue,
                time_limit_s=submission.time_limit_s,
            )
        )  # fmt: skip

    def submit_pool_job(self, identity: AgentIdentity, serial: int, options: Sequence[str]) -> events.PoolAnswer:
        """An agent asks for a node of the shared pool, which is the whole cluster."""
        if self._world.slurm.unavailable_reason or self._world.rng.random() < self.sbatch_failure_rate:
            return events.PoolAnswer(serial, 0, "sbatch: error: Batch job submission failed")
        job_id = len(self._submissions) + 1
        asked = read_request("", options, "")
        wanted_node = asked.required_nodes[0] if asked.required_nodes else ""
        self._submissions[job_id] = JobSubmission(
            identity.gang, self._submissions[identity.job].spec, None, serial, identity.restarts, wanted_node
        )
        self._world.cluster.submit(
            JobRequest(
                nodes=1, name=identity.gang, requeue=False, exclude=asked.exclude, required_nodes=asked.required_nodes
            )
        )
        return events.PoolAnswer(serial, job_id)

    def is_of_pool(self, job: int) -> bool:
        """The job was submitted for any node of the shared pool."""
        submission = self._submissions[job]
        return bool(submission.pool_request) and not submission.wanted_node

    def ever_held(self, job: int, restart_count: int) -> frozenset[str]:
        """Every node that the job has had in that run, as Slurm says."""
        return frozenset(self._held.get((job, restart_count), ()))

    def wants_preflight(self, job: int) -> bool:
        """The agents of the job check their nodes."""
        return self._submissions[job].spec.preflight

    def hang_after_idle_s(self, job: int) -> float:
        """Seconds for which all ranks of the job may be idle; 0: its agents don't measure it."""
        return self._submissions[job].spec.hang_after_idle_s

    def pool_jobs(self, gang: str) -> list[Job]:
        """The gang's pool jobs, as Slurm has them."""
        return [
            self._jobs[n]
            for n, submission in self._submissions.items()
            if submission.gang == gang and submission.pool_request
        ]

    def registration(self, gang: str) -> events.GangSubmitted:
        """The event that registers the gang."""
        job = self.job_ids[gang]
        return events.GangSubmitted(gang, job, 1000, gang, self._submissions[job].spec, "{}")

    def job_changed(self, job: Job) -> None:
        """Slurm has changed a job."""
        before, self._jobs[job.id] = self._jobs.get(job.id), job
        self._held.setdefault((job.id, job.restart_count), set()).update(job.nodes)
        earlier_run = before if before is not None and before.state.holds_nodes else None
        is_running_now = job.state.holds_nodes
        if is_running_now and (earlier_run is None or earlier_run.restart_count != job.restart_count):
            self._start_job(job)
        for node in earlier_run.nodes if earlier_run else ():
            if not is_running_now:
                self._world.schedule.call_later(
                    self._world.rng.random(), self._end_agent, earlier_run, node, _SIGTERM_NOTICE
                )
            elif node not in job.nodes:
                self._world.schedule.call_later(2 * self._world.rng.random(), self._end_agent, earlier_run, node, "")
        if earlier_run and not is_running_now:
            self._world.schedule.call_later(self.kill_wait_s, self._kill_batch_process, earlier_run)

    def running_job(self, gang: str) -> Job | None:
        """The gang's job, if it runs."""
        job = self._jobs.get(self.job_ids.get(gang, 0))
        return job if job is not None and job.state is JobState.RUNNING else None

    def job(self, gang: str) -> Job:
        """The gang's job, as Slurm has it."""
        return self._jobs[self.job_ids[gang]]

    def preempt(self, job: Job, grace_s: float) -> None:
        """Send SIGTERM to every process of the job.

        After the grace time, requeue the job or cancel it, unless this run of it is over.
        """
        gang = self._submissions[job.id].gang
        for node in job.nodes:
            agent = self._world.agents.get((gang, node))
            if agent is not None and agent.is_running() and agent.identity.restarts == job.restart_count:
                agent.receive_sigterm(_SIGTERM_NOTICE)
        self._world.schedule.call_later(grace_s, self._preempted, job)

    def _preempted(self, job: Job) -> None:
        if not self._is_current_run(job):
            return
        if self._jobs[job.id].requeue:
            self._world.cluster.requeue(job.id, (), None)
        else:
            self._world.cluster.cancel(job.id)

    # -- processes --

    def _start_job(self, job: Job) -> None:
        world = self._world
        world.note(f"Slurm starts job {job.id} (restart {job.restart_count}) on {' '.join(job.nodes)}")
        if self._submissions[job.id].spec.awaits_launch:  # a user's own script, which never launches
            world.schedule.call_later(world.durations.launch_s(), self._end_script, job.id)
            return
        host = world.machines[job.batch_host]
        self._batch_processes[job.id, job.restart_count] = (host, host.boot_count)
        own = self._submissions[job.id].spec.own_nodes
        self._own_nodes[job.id, job.restart_count] = tuple(job.nodes[: len(own)]) if job.restart_count else own
        for node in job.nodes:
            world.schedule.call_later(world.durations.launch_s(), self._launch_agent, job, node, 0)
        world.schedule.call_later(world.durations.launch_s(), self._poll_gang, job)

    def _end_script(self, job: int) -> None:
        self._world.cluster.end_batch_script(job)

    def has_batch_process(self, job: Job) -> bool:
        """The batch process of this run of the job lives, so srun may live or start."""
        return self._batch_process_lives(job.id, job.restart_count)

    def _is_current_run(self, job: Job) -> bool:
        """This run of the job is not over."""
        now = self._jobs[job.id]
        return now.state is JobState.RUNNING and now.restart_count == job.restart_count

    def _has_node(self, job: Job, node: str) -> bool:
        return self._is_current_run(job) and node in self._jobs[job.id].nodes

    def _launch_agent(self, job: Job, node: str, attempts: int) -> None:
        """srun starts the agent once no process of an earlier run is left on any node.

        Until then Slurm shows the job as completing.
        """
        world = self._world
        if not self._has_node(job, node) or node in self.unstartable_nodes or not self.has_batch_process(job):
            return
        submission, machine = self._submissions[job.id], world.machines[node]
        gang = submission.gang
        must_wait = not submission.pool_request and self._is_completing(job, gang)
        if must_wait or not (machine.powered and not machine.frozen) or world.machines[job.batch_host].frozen:
            if attempts < 180:
                world.schedule.call_later(_LAUNCH_RETRY_S, self._launch_agent, job, node, attempts + 1)
            return
        identity = AgentIdentity(
            gang, job.id, job.restart_count, node == job.batch_host, f"{node}-r{job.restart_count}",
            own_nodes=self._own_nodes[job.id, job.restart_count],
        )  # fmt: skip
        if submission.pool_request:
            identity = AgentIdentity(
                gang, job.id, submission.restarts, False, f"{node}-p{submission.pool_request}", submission.pool_request
            )
        world.kept_memory.job_starts(node, job.id)
        agent = Agent(world, machine, identity)
        world.kept_memory.give_back(agent)
        world.add_agent(agent)

    def _is_completing(self, job: Job, gang: str) -> bool:
        """An agent or a batch process of an earlier run is alive."""
        agents = [agent for (id, _), agent in self._world.agents.items() if id == gang]
        if any(agent.alive and agent.identity.restarts < job.restart_count for agent in agents):
            return True
        return any(self._batch_process_lives(job.id, restarts) for restarts in range(job.restart_count))

    def _batch_process_lives(self, job: int, restarts: int) -> bool:
        host, boot = self._batch_processes.get((job, restarts), (None, 0))
        return host is not None and host.powered and host.boot_count == boot

    def _end_agent(self, job: Job, node: str, notice: str) -> None:
        """slurmd ends the job's processes on a node that the job no longer has.

        A node that is cut off learns of it later.
        """
        world = self._world
        if self._has_node(job, node):
            return
        agent = world.agents.get((self._submissions[job.id].gang, node))
        restarts = self._submissions[job.id].restarts or job.restart_count
        if agent is None or not agent.alive or (agent.identity.job, agent.identity.restarts) != (job.id, restarts):
            return
        if not agent.machine.powered or agent.is_rogue:
            return
        if agent.machine.frozen or not world.network.connected(COORDINATOR, node):
            world.schedule.call_later(1.0, self._end_agent, job, node, notice)
        elif notice and self.kill_wait_s and not agent.stopped:
            agent.receive_sigterm(notice)
            world.schedule.call_later(self.kill_wait_s, self._end_agent, job, node, "")
        else:
            world.end_agent(agent)

    def _poll_gang(self, job: Job) -> None:
        """The batch process polls its gang until it may end."""
        world = self._world
        if self._submissions[job.id].pool_request:
            if self._is_current_run(job):
                self._poll_pool_agent(job)
            return
        if not self.has_batch_process(job):
            return
        host, coordinator = world.machines[job.batch_host], world.coordinator
        reached = not host.frozen and world.network.connected(COORDINATOR, host.name)
        gang = coordinator.core.state.gangs.get(self._submissions[job.id].gang) if coordinator.is_running() else None
        if reached and gang is not None:
            if not gang.slurm.run_is_over(job.id, job.restart_count):
                self.batch_heard_at[job.id, job.restart_count] = world.schedule.now
                coordinator.post_event(events.BatchHeartbeat(gang.id, job.id, job.restart_count))
            if coordinator.core.batch_may_end(gang, job.id, job.restart_count):
                del self._batch_processes[job.id, job.restart_count]
                if self._is_current_run(job):
                    world.observer.batch_script_ended(gang, self._jobs[job.id])
                    world.cluster.end_batch_script(job.id, gang.exit_code)
                return
        world.schedule.call_later(_POLL_INTERVAL_S, self._poll_gang, job)

    def _kill_batch_process(self, job: Job) -> None:
        """KillWait is over: Slurm kills the batch process of a run that is over."""
        host = self._world.machines[job.batch_host]
        if not self.has_batch_process(job):
            self._batch_processes.pop((job.id, job.restart_count), None)
        elif host.frozen or not self._world.network.connected(COORDINATOR, host.name):
            self._world.schedule.call_later(1.0, self._kill_batch_process, job)
        else:
            self._world.note(f"Slurm kills the batch process of job {job.id} (restart {job.restart_count})")
            del self._batch_processes[job.id, job.restart_count]

    def _poll_pool_agent(self, job: Job) -> None:
        """The batch script of a pool job ends with its agent."""
        world, node = self._world, job.batch_host
        agent = world.agents.get((self._submissions[job.id].gang, node))
        own_agent = agent if agent is not None and agent.identity.job == job.id else None
        may_still_start = (
            world.schedule.now - (job.start_time or 0.0) < _LAUNCH_TIMEOUT_S and node not in self.unstartable_nodes
        )
        if world.machines[node].powered and not (own_agent.alive if own_agent else may_still_start):
            world.cluster.end_batch_script(job.id, 0)
        world.schedule.call_later(_POLL_INTERVAL_S, self._poll_gang, job)

    # -- what the coordinator asks Slurm before it believes an agent --

    def dismissal_reason(self, gang: Gang | None, node: str, identity: AgentIdentity) -> str | None:
        """Checks an agent like the coordinator's agent service does.

        Returns an empty text if the agent is admitted, the reason of its dismissal, or None if Slurm gives no answer.
        """
        job, restarts = identity.job, identity.restarts
        if identity.pool_request and (refused := shared_pool.refusal(gang, identity.pool_request, job, node)):
            return refused
        if identity.pool_request and self._world.coordinator.core.state.node(node).health in OUT_OF_SERVICE:
            return None
        if gang is not None and restarts < gang.slurm.restart_count:
            return "this run of the job is over"
        member = gang.roster.members.get(node) if gang is not None else None
        if gang is not None and member is not None and member.job == job and restarts == gang.slurm.restart_count:
            return ""
        if self._world.slurm.unavailable_reason:
            return None
        slurm_job = self._world.cluster.jobs()[job]
        if restarts < slurm_job.restart_count or node not in slurm_job.nodes:
            return f"{node} does not belong to job {job}"
        return ""
