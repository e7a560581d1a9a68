"""The promises of every implementation of the Protocol `Slurm`, as checks that take a `World`.

The same functions run with the fake (tests/unit/test_slurm_client_contract.py) and, inside the cluster, with the
command-line backend and the pyslurm backend (run_slurm_contract.py). A check leaves jobs and node states behind; the
world's `clean` removes them. The checks need a cluster with at least four idle nodes and a tree of switches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from muster.fabric.model.level import Level
from muster.fabric.sources.slurm_topology import Kind, read_fabric
from muster.fabric.sources.tiers import Tiers
from muster.slurm.client.errors import BatchHostRefused, SlurmRefused, SlurmTimeout
from muster.slurm.client.states import JobState, NodeState
from muster.slurm.client.types import Gone, Job, Node, Slurm, Unknown

NO_SUCH_JOB = 999_999
SILENCE_S = 4.0
PATIENT_S = 60.0
"""For a requeue that must succeed: on a busy machine the nodes of the job before it take long to complete. The
coordinator asks again after its shorter time."""
REASON = 'muster: [node] Xid 79 (GPU fell off the bus) on gpu 3; "see" events = 7'


class World(Protocol):
    """A Slurm client, and the means to start jobs, to power nodes off, and to wait."""

    slurm: Slurm

    async def start(self, options: Sequence[str] = (), *, ends_with: int | None = None) -> int:
        """Submits a job as an ordinary user. The job runs until it is ended, or returns `ends_with` at once."""
        ...

    async def wait(self, seconds: float) -> None:
        """Waits."""
        ...

    async def lose(self, node: str) -> None:
        """Cuts the power of `node`: no connection on it is closed."""
        ...

    def silence(self, silent: bool) -> None:
        """Makes slurmctld stop answering (a paused process), or answer again."""
        ...


Check = Callable[[World], Awaitable[None]]
_Seen = TypeVar("_Seen", Job, Node)
_Refused = TypeVar("_Refused", bound=SlurmRefused)


async def refusal(call: Awaitable[None], kind: type[_Refused]) -> _Refused:
    """The error of type `kind` that `call` raises."""
    try:
        await call
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


async def job_of(world: World, id: int) -> Job:
    answer = await world.slurm.jobs([id])
    assert not isinstance(answer, Unknown), answer
    found = answer[id]
    assert isinstance(found, Job), f"job {id} is gone"
    return found


async def node_of(world: World, name: str) -> Node:
    answer = await world.slurm.nodes([name])
    assert not isinstance(answer, Unknown), answer
    found = answer[name]
    assert isinstance(found, Node), f"node {name} is gone"
    return found


async def _eventually(
    world: World, look: Callable[[], Awaitable[_Seen]], what: Callable[[_Seen], bool], seconds: float = 60
) -> _Seen:
    """Polls `look` until `what` holds for its result, and returns the result."""
    for _ in range(int(seconds / 0.1)):
        if what(seen := await look()):
            return seen
        await world.wait(0.1)
    raise AssertionError(f"not within {seconds} s: {await look()}")


async def registered(world: World, name: str) -> Node:
    """The node after it has registered, with its boot time."""
    return await _eventually(world, lambda: node_of(world, name), lambda node: node.boot_time is not None)


async def until(world: World, id: int, what: Callable[[Job], bool], seconds: float = 60) -> Job:
    """The job as soon as `what` holds."""
    return await _eventually(world, lambda: job_of(world, id), what, seconds)


async def running(world: World, *options: str) -> Job:
    id = await world.start(options)
    return await until(world, id, lambda job: job.running)


async def nodes_are_all_shown(world: World) -> None:
    answer = await world.slurm.nodes()
    assert not isinstance(answer, Unknown), answer
    assert len(answer) >= 4
    for name, node in answer.items():
        assert isinstance(node, Node)
        assert node.name == name
        assert node.address
        assert NodeState.IDLE in node.states
        assert not node.unrecognised
        # Known after the node has registered, which may happen after the node is back in service.
        await registered(world, name)


async def a_node_that_is_not_there_is_gone(world: World) -> None:
    known = next(iter(await names(world)))
    answer = await world.slurm.nodes([known, "nowhere7"])
    assert not isinstance(answer, Unknown), answer
    assert isinstance(answer[known], Node)
    assert isinstance(answer["nowhere7"], Gone)
    answer = await world.slurm.nodes(["nowhere7"])
    assert answer == {"nowhere7": Gone()}


async def names(world: World) -> list[str]:
    answer = await world.slurm.nodes()
    assert not isinstance(answer, Unknown), answer
    return sorted(answer)


async def every_node_has_a_leaf_in_the_only_topology(world: World) -> None:
    topologies = await world.slurm.topologies()
    assert not isinstance(topologies, Unknown), topologies
    (topology,) = topologies
    assert (topology.kind, topology.name, topology.default, topology.problem) == (Kind.TREE, "", True, "")
    read = read_fabric(topology, await names(world), Tiers())
    assert read.warnings == ()
    assert all(map(read.fabric.leaf_name, read.fabric.nodes))
    assert len(read.fabric.domains(Level.LEAF)) >= 2


async def nothing_asked_is_nothing_answered(world: World) -> None:
    assert await world.slurm.jobs([]) == {}
    assert await world.slurm.nodes([]) == {}


async def a_job_that_is_not_there_is_gone(world: World) -> None:
    job = await running(world, "-N1")
    assert await world.slurm.jobs([NO_SUCH_JOB]) == {NO_SUCH_JOB: Gone()}
    answer = await world.slurm.jobs([job.id, NO_SUCH_JOB])
    assert not isinstance(answer, Unknown), answer
    assert isinstance(answer[job.id], Job)
    assert isinstance(answer[NO_SUCH_JOB], Gone)
    every = await world.slurm.jobs()
    assert not isinstance(every, Unknown), every
    assert job.id in every
    assert NO_SUCH_JOB not in every


async def a_running_job_is_shown_in_full(world: World) -> None:
    some = await names(world)
    job = await running(
        world, "-N2", "--no-kill", "--requeue", "-J", "gang", "--comment=hello", "-x", some[-1], "-t", "30"
    )
    assert job.name == "gang"
    assert job.comment == "hello"
    assert job.requeue
    assert not job.held
    assert job.excluded == (some[-1],)
    assert len(job.nodes) == 2
    assert set(job.nodes) <= set(some[:-1])
    assert job.batch_host == job.nodes[0]
    assert job.restart_count == 0
    assert job.user_id > 0
    assert job.user_name
    assert job.exit_code is None
    assert job.time_limit_s == 1800
    assert job.start_time is not None
    assert job.end_time == job.start_time + 1800
    assert not job.final
    assert not job.unrecognised


async def an_ended_job_keeps_its_code(world: World) -> None:
    good = await world.start(["-N1"], ends_with=0)
    bad = await world.start(["-N1"], ends_with=3)
    first = await until(world, good, lambda job: job.final)
    second = await until(world, bad, lambda job: job.final)
    assert (first.state, first.exit_code) == (JobState.COMPLETED, 0)
    assert (second.state, second.exit_code, second.exit_signal) == (JobState.FAILED, 3, None)
    with_both = await world.slurm.jobs([good, bad])
    assert not isinstance(with_both, Unknown)
    assert len(with_both) == 2


async def flag_and_comment_change_nothing_else(world: World) -> None:
    before = await running(world, "-N2", "--no-kill", "--requeue", "-t", "30")
    await world.slurm.set_requeue_flag(before.id, False)
    after = await job_of(world, before.id)
    assert not after.requeue
    await world.slurm.set_requeue_flag(before.id, True)
    await world.slurm.set_comments(before.id, REASON, "for operators")
    await world.slurm.set_comments(before.id, admin_comment=REASON)
    after = await job_of(world, before.id)
    assert after.requeue
    assert (after.comment, after.admin_comment) == (REASON, REASON)
    assert (after.nodes, after.excluded, after.name, after.time_limit_s, after.end_time, after.state) == (
        before.nodes, before.excluded, before.name, before.time_limit_s, before.end_time, before.state,
    )  # fmt: skip


async def drain_and_resume(world: World) -> None:
    job = await running(world, "-N1")
    node = job.nodes[0]
    await world.slurm.drain(node, REASON)
    await world.slurm.drain(node, REASON)
    found = await node_of(world, node)
    assert found.drained
    assert not found.down
    assert found.reason == REASON
    assert found.reason_at is not None
    assert (await job_of(world, job.id)).running
    await world.slurm.resume(node)
    assert not (await node_of(world, node)).drained
    await world.slurm.resume(node)


async def down_takes_the_node_out_at_once(world: World) -> None:
    job = await running(world, "-N3", "--no-kill")
    lost = job.nodes[1]
    await world.lose(lost)  # under ReturnToService=2 a running slurmd clears DOWN within a second
    await world.slurm.down(lost, REASON)
    after = await job_of(world, job.id)
    assert after.state is JobState.RUNNING
    assert after.nodes == (job.nodes[0], job.nodes[2])
    assert (await node_of(world, lost)).drained

    async def down_again() -> Node:
        await world.slurm.down(lost, REASON)
        return await node_of(world, lost)

    # slurmctld may still hold answers to pings that it sent before the loss; each one undoes DOWN. No new answer comes.
    found = await _eventually(world, down_again, lambda node: node.down)
    assert found.drained
    assert found.reason == REASON


async def down_kills_a_job_that_did_not_ask_to_live(world: World) -> None:
    job = await running(world, "-N2", "--no-requeue")
    await world.slurm.down(job.nodes[1], REASON)
    after = await until(world, job.id, lambda job: job.state.ended)
    assert after.state is JobState.NODE_FAIL


async def a_node_is_removed(world: World) -> None:
    job = await running(world, "-N3", "--no-kill")
    await world.slurm.remove_node(job.id, job.nodes[1])
    after = await job_of(world, job.id)
    assert after.nodes == (job.nodes[0], job.nodes[2])
    assert after.running
    await world.slurm.remove_node(job.id, job.nodes[1])
    assert (await job_of(world, job.id)).nodes == after.nodes


async def the_batch_host_is_not_removed(world: World) -> None:
    job = await running(world, "-N2", "--no-kill")
    refused = await refusal(world.slurm.remove_node(job.id, job.batch_host), BatchHostRefused)
    assert "batch host" in refused.message
    assert (await job_of(world, job.id)).nodes == job.nodes


async def a_job_whose_batch_host_died_ends_with_its_code(world: World) -> None:
    job = await running(world, "-N3", "--no-kill")
    next_id = await world.start(["-N1", f"--dependency=afterok:{job.id}"])
    await world.lose(job.batch_host)
    await world.slurm.down(job.batch_host, REASON)
    after = await job_of(world, job.id)
    assert after.state is JobState.RUNNING
    assert after.nodes == job.nodes[1:]
    assert after.batch_host == job.batch_host
    await refusal(world.slurm.remove_node(job.id, after.nodes[1]), BatchHostRefused)
    assert (await job_of(world, next_id)).state is JobState.PENDING
    await world.slurm.complete_job(job.id, 0)
    # COMPLETING lasts 12 s: the slurmstepd processes first report to the one of the dead node.
    ended = await until(world, job.id, lambda job: job.final)
    assert (ended.state, ended.exit_code) == (JobState.COMPLETED, 0)
    await until(world, next_id, lambda job: job.running)
    await world.slurm.complete_job(job.id, 0)
    assert (await job_of(world, job.id)).state is JobState.COMPLETED


async def complete_with_a_code(world: World) -> None:
    job = await running(world, "-N2", "--no-kill")
    await world.slurm.complete_job(job.id, 93)
    ended = await until(world, job.id, lambda job: job.final)
    assert (ended.state, ended.exit_code) == (JobState.FAILED, 93)


async def requeue_elsewhere_and_once(world: World) -> None:
    some = await names(world)
    job = await running(world, "-N2", "--no-kill", "--requeue", "-x", some[-1])
    bad = job.nodes[0]
    await world.slurm.requeue(job.id, [bad], restarts=0, timeout_s=PATIENT_S)
    again = await until(world, job.id, lambda job: job.running)
    assert again.restart_count == 1
    assert bad not in again.nodes
    assert set(again.excluded) == {some[-1], bad}
    assert again.batch_host == again.nodes[0]
    await world.slurm.requeue(job.id, [bad], restarts=0, timeout_s=PATIENT_S)
    assert (await job_of(world, job.id)).restart_count == 1
    assert (await job_of(world, job.id)).running


async def requeue_of_a_waiting_job_excludes_and_starts_it(world: World) -> None:
    some = await names(world)
    id = await world.start(["-N1", "--begin=now+3600"])
    await until(world, id, lambda job: job.state is JobState.PENDING)
    await world.slurm.requeue(id, some[:1], restarts=0, timeout_s=PATIENT_S)
    after = await until(world, id, lambda job: job.running)
    assert after.nodes[0] != some[0]
    assert after.restart_count == 0


async def a_cancelled_job_is_not_requeued(world: World) -> None:
    job = await running(world, "-N1", "--requeue")
    await world.slurm.cancel(job.id)
    await until(world, job.id, lambda job: job.final)
    refused = await refusal(world.slurm.requeue(job.id), SlurmRefused)
    assert "is cancelled" in str(refused)


async def a_node_that_was_excluded_is_admitted_again(world: World) -> None:
    some = await names(world)
    id = await world.start(["-N1", "--begin=now+3600", "-x", f"{some[0]},{some[1]}"])
    await until(world, id, lambda job: job.state is JobState.PENDING)
    await world.slurm.requeue(id, (), [some[0]], restarts=0, timeout_s=PATIENT_S)
    after = await until(world, id, lambda job: job.running)
    assert after.excluded == (some[1],)
    await world.slurm.cancel(id)
    id = await world.start(["-N1", "--begin=now+3600", "-x", some[0]])
    await until(world, id, lambda job: job.state is JobState.PENDING)
    await world.slurm.requeue(id, (), [some[0]], restarts=0, timeout_s=PATIENT_S)
    assert (await until(world, id, lambda job: job.running)).excluded == ()


async def requeue_is_refused_where_the_flag_is_off(world: World) -> None:
    job = await running(world, "-N1", "--no-requeue")
    await refusal(world.slurm.requeue(job.id), SlurmRefused)
    assert (await job_of(world, job.id)).running


async def cancel_ends_a_job(world: World) -> None:
    job = await running(world, "-N1")
    await world.slurm.cancel(job.id)
    assert (await until(world, job.id, lambda job: job.final)).state is JobState.CANCELLED
    await world.slurm.cancel(job.id)
    await world.slurm.cancel(NO_SUCH_JOB)


async def a_signal_does_not_end_a_job(world: World) -> None:
    job = await running(world, "-N1")
    await world.slurm.cancel(job.id, 23)  # SIGURG: a process without a handler ignores it
    assert (await job_of(world, job.id)).running
    await world.slurm.cancel(NO_SUCH_JOB, 23)


async def what_is_not_there_is_refused(world: World) -> None:
    slurm = world.slurm
    attempts: list[Callable[[], Awaitable[None]]] = [
        lambda: slurm.drain("nowhere7", REASON),
        lambda: slurm.down("nowhere7", REASON),
        lambda: slurm.resume("nowhere7"),
        lambda: slurm.requeue(NO_SUCH_JOB),
        lambda: slurm.remove_node(NO_SUCH_JOB, "nowhere7"),
        lambda: slurm.set_comments(NO_SUCH_JOB, "x"),
        lambda: slurm.set_requeue_flag(NO_SUCH_JOB, True),
    ]
    for attempt in attempts:
        words = ""
        try:
            await attempt()
        except SlurmRefused as error:
            words = error.message
        assert words.startswith("Invalid"), words


async def silence_is_unknown_and_never_gone(world: World) -> None:
    job = await running(world, "-N1")
    world.silence(True)
    try:
        *queries, command = await asyncio.gather(
            world.slurm.jobs([job.id], timeout_s=SILENCE_S),
            world.slurm.jobs(timeout_s=SILENCE_S),
            world.slurm.nodes(timeout_s=SILENCE_S),
            world.slurm.drain(job.nodes[0], REASON, timeout_s=SILENCE_S),
            return_exceptions=True,
        )
        assert all(isinstance(answer, Unknown) for answer in queries), queries
        assert isinstance(command, SlurmTimeout), command
    finally:
        world.silence(False)
    answer = await world.slurm.jobs([job.id], timeout_s=20)
    assert not isinstance(answer, Unknown), answer
    assert isinstance(answer[job.id], Job)


CHECKS: tuple[Check, ...] = (
    nodes_are_all_shown,
    a_node_that_is_not_there_is_gone,
    every_node_has_a_leaf_in_the_only_topology,
    nothing_asked_is_nothing_answered,
    a_job_that_is_not_there_is_gone,
    a_running_job_is_shown_in_full,
    an_ended_job_keeps_its_code,
    flag_and_comment_change_nothing_else,
    drain_and_resume,
    down_takes_the_node_out_at_once,
    down_kills_a_job_that_did_not_ask_to_live,
    a_node_is_removed,
    the_batch_host_is_not_removed,
    a_job_whose_batch_host_died_ends_with_its_code,
    complete_with_a_code,
    requeue_elsewhere_and_once,
    requeue_of_a_waiting_job_excludes_and_starts_it,
    a_cancelled_job_is_not_requeued,
    a_node_that_was_excluded_is_admitted_again,
    requeue_is_refused_where_the_flag_is_off,
    cancel_ends_a_job,
    a_signal_does_not_end_a_job,
    what_is_not_there_is_refused,
    silence_is_unknown_and_never_gone,
)
