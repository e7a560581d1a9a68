"""Nodes of the pool that jobs share: where no spare is left, one joins as a small Slurm job of its own.

That job is of the same user. An agent of the gang asks Slurm for it, for sbatch is the user's to call: its order names
the request, its status says what Slurm answered, and the agent on the new node attaches with the request's number.
Nobody waits for long: what has not started in time is cancelled, and the next rung of the ladder is taken.
"""

from muster.daemon.coordinator.core.state import facts as f
from muster.daemon.coordinator.core.state.durable_state import Gang, Member, PoolRequest
from muster.daemon.coordinator.core.state.state_tables import FENCING
from muster.daemon.coordinator.core.state.turn import GangTurn


def awaited(gt: GangTurn) -> bool:
    """Nodes of the pool are on their way into the seats that nobody can take; asks for them where that is still due."""
    gang, terms = gt.gang, gt.turn.limits.pool
    missing = (len(gang.seats) or gang.spec.nodes) - len(gt.usable())
    if missing <= 0 or not terms.options or gt.turn.limits.observe:
        return False
    until = gang.pool_since + terms.wait_s if gang.pool_since else gt.now + terms.wait_s
    if gt.now >= until:
        for request in _waiting(gang):
            close(gt, request, f"no node has come within {terms.wait_s:.0f} s", refused=True)
        return False
    gt.turn.wake(until)
    room = gang.spec.pool_nodes - len(_joined(gang))
    if room < missing and gang.spec.fewest == gang.spec.nodes:
        return False  # too few would come
    more = 0 if gang.pool_refused else min(room, missing) - len(_waiting(gang))
    return (more > 0 and _ask(gt, more)) or bool(_waiting(gang))


def _waiting(gang: Gang) -> list[PoolRequest]:
    """Requests that no node has come of yet."""
    return [request for request in gang.pool.values() if not request.node]


def _joined(gang: Gang) -> list[Member]:
    """Members that came from the pool and may carry ranks."""
    return [member for member in gang.present() if member.job != gang.job]


def _ask(gt: GangTurn, count: int) -> bool:
    """Ask for `count` nodes. True: that is done, or can be as soon as it is known who lives."""
    gang = gt.gang
    own = [m.node for m in gt.usable() if m.job == gang.job and gt.seen.attached(m.node)]
    able = [node for node in own if node not in gt.seen.suspected]
    for _ in range(count if able else 0):
        options = (*gt.turn.limits.pool.options, *_rejected(gt))
        gt.turn.record(f.PoolAsked(gang.id, gang.pool_serial + 1, able[0], options))
    return bool(own)


def _rejected(gt: GangTurn) -> list[str]:
    """The option that keeps nodes away which this gang has given up, though nothing is held against them."""
    gang, ledger = gt.gang, gt.turn.ledger
    out = [ledger.node(m.node) for m in gang.members.values() if m.out and not gt.unfit(m.node)]
    names = sorted(node.name for node in out if node.judged_at <= gang.started_at)  # others were repaired since
    return [f"--exclude={','.join(names)}"] if names else []


def tend(gt: GangTurn) -> None:
    """Follow what became of each request."""
    gang = gt.gang
    for request in [*gang.pool.values()]:
        if request.node:
            member = gang.members.get(request.node)
            if member is None or member.job != request.job or member.gone:
                close(gt, request, member.out if member else "the job was started again")
            continue
        if not request.job:
            _hear(gt, request)
        if gang.phase not in FENCING and request.serial in gang.pool:
            close(gt, request, "it is wanted no more")


def _hear(gt: GangTurn, request: PoolRequest) -> None:
    """What Slurm has answered to the agent that asked."""
    asker = gt.gang.members.get(request.via)
    answer = next((a for a in gt.seen.status(request.via).pool if a.serial == request.serial), None)
    if answer is not None and answer.error:
        close(gt, request, answer.error, refused=True)
    elif answer is not None:
        gt.turn.record(f.PoolQueued(gt.gang.id, request.serial, answer.job))
    elif asker is None or asker.out:
        close(gt, request, f"{request.via}, which was to ask, is out")


def let_go(gt: GangTurn, member: Member) -> None:
    """The member carries no ranks again, and lives: its small job ends."""
    for request in [*gt.gang.pool.values()]:
        if request.job == member.job:
            close(gt, request, member.out)


def close_all(gt: GangTurn, reason: str, joined: bool) -> None:
    """No node of the pool is wanted any more; those that have joined are let go of only with `joined`."""
    for request in [*gt.gang.pool.values()]:
        if joined or not request.node:
            close(gt, request, reason)


def close(gt: GangTurn, request: PoolRequest, reason: str, refused: bool = False) -> None:
    """End one request, and its Slurm job. `refused`: nobody asks again in this recovery."""
    gt.turn.record(f.PoolClosed(gt.gang.id, request.serial, reason, refused))
    if request.job:
        gt.turn.owe("cancel", gt.gang.id, request.job, f"muster: {reason}")


def refusal(gang: Gang | None, serial: int, job: int, node: str) -> str:
    """Why an agent of Slurm job `job` on `node` may not join with the request `serial`; empty: it may."""
    request = gang.pool.get(serial) if gang and not gang.final else None
    if request is None or request.job not in (0, job) or request.node not in ("", node):
        return "no node of the pool is wanted any more"
    return ""
