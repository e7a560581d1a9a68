"""The shared pool: if no spare is left, a node of the pool joins with a pool job.

A gang that trains, and wants to leave a node without having a spare, requests a node beforehand. Nothing waits for it.
A gang that trains with fewer nodes than it may have requests nodes of the pool now and then, and nodes that it has lost
once they are repaired (`wanted_nodes`).

That job belongs to the same user. An agent of the gang submits it, because only the user may call sbatch: the agent's
order names the request, its status brings Slurm's answer, and the agent on the new node attaches with the request's
number. The gang does not wait for long: a job that has not started in time is cancelled, and the next rung of the
recovery ladder follows.
"""

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.limits import Pool
from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.state.slurm_jobs import PoolRequest
from muster.daemon.coordinator.core.state.state_tables import FENCING, Phase
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.node_health import OUT_OF_SERVICE


def await_nodes(gang_turn: GangTurn) -> bool:
    """Nodes of the pool are on their way into seats that no other node can take. Requests them when that is due."""
    gang, terms = gang_turn.gang, gang_turn.turn.limits.pool
    missing = (len(gang.seats_to_fill()) or gang.spec.nodes) - len(gang_turn.usable())
    if missing <= 0 or not terms.options or gang_turn.turn.limits.observe:
        return False
    until = (gang.growth.pool_requested_at or gang_turn.now) + terms.wait_s
    if gang_turn.now >= until:
        for request in gang.growth.unanswered():
            close(gang_turn, request, f"no node has come within {terms.wait_s:.0f} s", refused=True)
        return False
    gang_turn.turn.tick_at(until)
    room = gang.spec.pool_nodes - len(gang.pool_members())
    if room < missing and gang.spec.fewest == gang.spec.nodes:
        return False  # too few nodes would come
    more = 0 if gang.growth.pool_refused else min(room, missing) - len(gang.growth.unanswered())
    return (more > 0 and _request(gang_turn, more)) or bool(gang.growth.unanswered())


def has_room(gang: Gang, terms: Pool) -> bool:
    """The job may hold one more node of the pool than it has, and none was refused in this recovery."""
    return bool(terms.options) and gang.spec.pool_nodes > len(gang.pool_members()) and not gang.growth.pool_refused


def request_beforehand(gang_turn: GangTurn) -> None:
    """The gang trains, and a node shall be left for which no spare is ready: request one. Nothing waits for it, so it
    has no time limit. After a refusal, this generation requests no more."""
    gang, limits = gang_turn.gang, gang_turn.turn.limits
    if has_room(gang, limits.pool) and not limits.observe and not gang.growth.unanswered():
        _request(gang_turn, 1)


def request_in_training(gang_turn: GangTurn, count: int, until: float) -> None:
    """Request up to `count` nodes of the pool, as far as the job may have so many, until then (seconds)."""
    gang, limits = gang_turn.gang, gang_turn.turn.limits
    room = gang.spec.pool_nodes - len(gang.pool_members()) - len(gang.growth.unanswered())
    if limits.pool.options and room > 0:
        _request(gang_turn, min(count, room), until)


def request_repaired(gang_turn: GangTurn, node: str, until: float) -> None:
    """Request a repaired node that the job has lost, until then (seconds): with the job's own partition, and that node
    by its name."""
    if asked := _who_can_ask(gang_turn):
        gang = gang_turn.gang
        options = (f"--nodelist={node}",)
        gang_turn.turn.record(
            facts.PoolNodeRequested(gang.id, gang.growth.pool_serial + 1, asked, options, node, until)
        )


def _request(gang_turn: GangTurn, count: int, until: float = 0.0) -> bool:
    """Request `count` nodes. True: that is done, or can be done once it is known which agents live."""
    gang, asked = gang_turn.gang, _who_can_ask(gang_turn)
    for _ in range(count if asked else 0):
        options = (*gang_turn.turn.limits.pool.options, *_exclude_option(gang_turn.gang, gang_turn.turn.state))
        gang_turn.turn.record(
            facts.PoolNodeRequested(gang.id, gang.growth.pool_serial + 1, asked, options, until=until)
        )
    return bool(_attached_of_job(gang_turn))


def _attached_of_job(gang_turn: GangTurn) -> list[str]:
    """Nodes of the gang's own job with an agent: it is a process of that job."""
    job = gang_turn.gang.slurm.job
    return [m.node for m in gang_turn.usable() if m.job == job and gang_turn.observed.is_attached(m.node)]


def _who_can_ask(gang_turn: GangTurn) -> str:
    """A node whose agent can submit a job; empty: none is known to live."""
    suspected = gang_turn.observed.suspected_since
    return next((node for node in _attached_of_job(gang_turn) if node not in suspected), "")


def _exclude_option(gang: Gang, state: DurableState) -> list[str]:
    """The sbatch option that excludes nodes which this gang has removed, though no fault of them is known, and those
    without which its job was requeued. A node that gave way to another one has none."""
    bad_since = {node: one.at for node, one in gang.slurm.exclusions.items() if node not in gang.slurm.admitted}
    bad_since |= {m.node: gang.newest.started_at for m in gang.roster.members.values() if m.removed and not m.gave_way}
    known = [node for node in map(state.node, bad_since) if node.health not in OUT_OF_SERVICE]
    names = sorted(node.name for node in known if node.judged_at <= bad_since[node.name])  # others were repaired
    return [f"--exclude={','.join(names)}"] if names else []


def follow_requests(gang_turn: GangTurn, wanted_beforehand: bool) -> None:
    """Record what became of each request. `wanted_beforehand`: the gang trains and waits for a spare."""
    gang = gang_turn.gang
    for request in [*gang.growth.pool.values()]:
        if request.node:
            member = gang.roster.members.get(request.node)
            if member is None or member.job != request.job or member.gone:
                close(gang_turn, request, member.removal_reason if member else "the job was started again")
            continue
        if not request.job:
            _read_answer(gang_turn, request)
        # While this run trains, Slurm's answer comes: without it, the pool job could not be cancelled.
        is_due = request.job or gang.phase not in (Phase.STARTING, Phase.RUNNING)
        if not is_due or gang.phase in FENCING or request.serial not in gang.growth.pool:
            continue
        if not (_is_wanted_in_training(gang, request) if request.until else wanted_beforehand):
            close(gang_turn, request, "it is wanted no more")
        elif request.until and gang_turn.now >= request.until:
            close(gang_turn, request, f"no node has come within {gang_turn.turn.limits.pool.wait_s:.0f} s")
        elif request.until:
            gang_turn.turn.tick_at(request.until)


def _is_wanted_in_training(gang: Gang, request: PoolRequest) -> bool:
    """The gang still lacks the node that it has requested while it trained."""
    if gang.plans.stop is not None or gang.phase not in (Phase.STARTING, Phase.RUNNING):
        return False
    if request.wanted_node:
        return len(gang.own_members()) < gang.spec.nodes + gang.spec.spares
    return len(gang.roster.present()) < gang.spec.nodes


def _read_answer(gang_turn: GangTurn, request: PoolRequest) -> None:
    """Record Slurm's answer to the agent that made the request."""
    asker = gang_turn.gang.roster.members.get(request.requesting_node)
    answer = next(
        (a for a in gang_turn.observed.status(request.requesting_node).pool if a.serial == request.serial), None
    )
    if answer is not None and answer.error:
        close(gang_turn, request, answer.error, refused=not request.wanted_node)
    elif answer is not None:
        gang_turn.turn.record(facts.PoolJobQueued(gang_turn.gang.id, request.serial, answer.job))
    elif asker is None or asker.removed:
        close(gang_turn, request, f"{request.requesting_node}, which was to ask, is out")


def release_member(gang_turn: GangTurn, member: Member) -> None:
    """End the pool job of a member that carries no rank again."""
    for request in [*gang_turn.gang.growth.pool.values()]:
        if request.job == member.job:
            close(gang_turn, request, member.removal_reason)


def close_all(gang_turn: GangTurn, reason: str, joined: bool) -> None:
    """Close all requests; those from which a node has joined only with `joined`."""
    for request in [*gang_turn.gang.growth.pool.values()]:
        if joined or not request.node:
            close(gang_turn, request, reason)


def close(gang_turn: GangTurn, request: PoolRequest, reason: str, refused: bool = False) -> None:
    """Close one request, and cancel its Slurm job. `refused`: this recovery requests no more nodes."""
    gang_turn.turn.record(facts.PoolRequestClosed(gang_turn.gang.id, request.serial, reason, refused))
    if request.job:
        gang_turn.turn.owe("cancel", gang_turn.gang.id, request.job, f"muster: {reason}")


def refusal(gang: Gang | None, serial: int, job: int, node: str) -> str:
    """Why an agent of job `job` on `node` may not join with the request `serial`; empty: it may."""
    request = gang.growth.pool.get(serial) if gang and not gang.final else None
    if request is None or request.job not in (0, job) or request.node not in ("", node):
        return "no node of the pool is wanted any more"
    if request.wanted_node not in ("", node):
        return f"{request.wanted_node} was asked for"
    return ""
