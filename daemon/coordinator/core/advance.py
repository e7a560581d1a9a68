"""A gang's next move: for each phase, what must hold before it goes on.

Everything here is level-triggered: it looks at the ledger and at what is seen, never at which event came last, so that
lost, doubled and reordered events change nothing but the moment.
"""

from collections.abc import Collection

from muster.daemon.coordinator.core import (
    breaker,
    doubt,
    flushing,
    hang,
    patience,
    placement,
    pool,
    restore,
    silence,
    stopping,
    suspicion,
)
from muster.daemon.coordinator.core import facts as f
from muster.daemon.coordinator.core.events import RankState, Version
from muster.daemon.coordinator.core.ledger import Gang
from muster.daemon.coordinator.core.states import ACTIVE, Phase
from muster.daemon.coordinator.core.tally import of_generation
from muster.daemon.coordinator.core.turn import GangTurn

SPARE_WAIT_S = 30.0
"""How long a complete set of rank nodes waits for its spares before it starts without."""
LAUNCH_S = 120.0
"""srun has given up a node that does not answer by then: in 40 s with a MessageTimeout of 10 s, Slurm's default."""
LOOK_S = 1.0
"""So often it is looked who is silent, while a complete set of nodes waits."""
STORE_S = 45.0
"""A node that opens no rendezvous store in this time (its first imports included) is passed over."""
STORE_TRIES = 14
"""So often in a row a node may be passed over: ten minutes, for modules may come slowly from a file system that is new
to all nodes. Then no other node would mend it."""
JOB_ENDS_S = 15.0
"""A batch script leaves within seconds of the gang's end."""
SLURM_WORD_S = 5.0
"""Slurm's view of a job is read every 2 s; this long it may take to hear that Slurm ended the job."""
RELEASE_S = 30.0
"""A script without the library declares no step: its outgoing nodes are let go this long after its ranks run."""

EXCLUDED_S = 600.0
"""A node that is in service, and that a job was requeued without, is left out of it for so long."""

EXIT_NO_REQUEUE = 93
"""Decided: the software fails again and again, do not requeue."""
EXIT_NO_NODES = 94
"""No node is left to go on with, and the job may not be requeued."""
EXIT_NEVER_GATHERED = 95
"""The nodes did not all report in time."""
WORDS_MOST = 200
"""Characters of a rank's last line that are told as a reason."""
EXIT_AGENT = 96
"""Most agents met an error that no other node would mend."""
EXIT_NOT_DURABLE = 97
"""Every rank has ended well, but the last checkpoint could not be written."""
EXIT_STOPPED = 98
"""Stopped by plan and saved, and not to be requeued: submit it again to go on."""
EXIT_OBSERVED = 99
"""In observe mode: what would have been a recovery ends the job, as it does without Muster."""
EXIT_CANCELLED = 130
"""A user wanted it so."""


def advance(gt: GangTurn) -> None:
    """Move the gang as far as what is seen allows."""
    for _ in range(12):
        before = len(gt.turn.outcome.facts)
        _once(gt)
        if len(gt.turn.outcome.facts) == before:
            return


def _once(gt: GangTurn) -> None:
    gang = gt.gang
    if gang.final:
        _see_job_out(gt)
        return
    if _outside_end(gt):
        return
    stopping.plan(gt)
    if _failing(gt):
        return
    if gang.phase in ACTIVE:
        _remove_unfit(gt)
    suspicion.examine(gt)
    pool.tend(gt)
    flushing.progress(gt)
    match gang.phase:
        case Phase.SUBMITTED:
            _await_agents(gt)
        case Phase.REQUEUED:
            _admit(gt)
            _await_agents(gt)
        case Phase.GATHERING:
            _gather(gt)
        case Phase.PREFLIGHT | Phase.RECOVERING:
            _recover(gt)
        case Phase.STARTING | Phase.RUNNING:
            _run(gt)
        case Phase.DRAINING:
            _drain(gt)
        case _:
            pass


# -- ends --


def end(gt: GangTurn, phase: Phase, exit_code: int, reason: str) -> None:
    """End the gang, and its job where its batch script can't."""
    gang, job_ended = gt.gang, gt.job_ended
    gt.turn.record(f.GangEnded(gang.id, phase, exit_code, reason))
    pool.close_all(gt, reason, joined=phase is Phase.CANCELLED)
    if job_ended:
        gt.turn.record(f.JobOver(gang.id, job_ended))
        return
    if phase is Phase.CANCELLED:
        gt.turn.owe("cancel", gang.id, gang.job, f"muster: {reason}")
        return
    if exit_code == EXIT_NO_REQUEUE:
        gt.turn.owe("requeue_off", gang.id, gang.job, f"muster: {reason}")
    if _batch_host_dead(gang):
        gt.turn.owe("complete", gang.id, gang.job, f"muster: {reason}", exit_code=exit_code)


def _batch_host_dead(gang: Gang) -> bool:
    """Nobody is left who would report the job's end to Slurm."""
    host = gang.batch_host
    left = host is not None and bool(gang.job_nodes) and host.node not in gang.job_nodes
    return host is None or left or host.gone


def _see_job_out(gt: GangTurn) -> None:
    """A final gang's job ends with its batch script; where that does not happen, its host has died unseen."""
    gang = gt.gang
    if gt.seen.cancel and not gang.job_over:
        gt.turn.owe("cancel", gang.id, gang.job, f"muster: cancelled by {gt.seen.cancel}")
        gt.seen.cancel = ""
    over = gang.job_over or gang.completed or gang.phase is Phase.CANCELLED
    if over and not gang.pool:
        return
    if gt.now - gang.phase_at < JOB_ENDS_S:
        gt.turn.wake(gang.phase_at + JOB_ENDS_S)
        return
    pool.close_all(gt, gang.reason, joined=True)
    if not over:
        words = f"muster: {gang.reason}"
        gt.turn.owe("complete", gang.id, gang.job, words, exit_code=gang.exit_code)


def _outside_end(gt: GangTurn) -> bool:
    """A user's cancel, or Slurm's own end of the job."""
    state = gt.job_ended
    if gt.seen.cancel:
        end(gt, Phase.CANCELLED, EXIT_CANCELLED, f"cancelled by {gt.seen.cancel}")
        gt.seen.cancel = ""
    elif state and not _ended_before_the_requeue(gt, state) and not stopping.saves(gt):
        end_as_slurm(gt, state)
    return gt.gang.final or stopping.given_up(gt)


def end_as_slurm(gt: GangTurn, state: str) -> None:
    """End the gang as Slurm has ended its job."""
    phase = Phase.CANCELLED if state == "CANCELLED" else Phase.FAILED
    end(gt, phase, EXIT_CANCELLED if phase is Phase.CANCELLED else 1, f"Slurm ended job {gt.gang.job}: {state}")


def _ended_before_the_requeue(gt: GangTurn, state: str) -> bool:
    """The end that Slurm tells of is that of the run which is being requeued."""
    older = gt.seen.job_restarts <= gt.gang.restart_count
    return gt.gang.phase is Phase.REQUEUED and older and state not in ("CANCELLED", "GONE")


# -- gathering --


def _await_agents(gt: GangTurn) -> None:
    """A job that runs while no agent of it attaches will not gather."""
    gang = gt.gang
    if gt.seen.granted is None:
        return
    restarts, since = gt.seen.granted
    if gang.phase is Phase.REQUEUED and restarts <= gang.restart_count:
        return  # Slurm has not taken it back yet
    if gt.now - since > gang.spec.gather_timeout_s:
        end(gt, Phase.FAILED, EXIT_NEVER_GATHERED, _missing(gang, []))
    else:
        gt.turn.wake(since + gang.spec.gather_timeout_s + 0.01)


def _gather(gt: GangTurn) -> None:
    gang, spec = gt.gang, gt.gang.spec
    if gang.stop is not None:
        _leave(gt)
        return
    since = max(gang.phase_at, gt.turn.sight.since)  # after a restart every agent has to attach anew
    waited = gt.now - since
    here = len(gt.tally.here)
    if _never_enough(gt):
        _no_nodes(gt, _few_words(gt))
    elif here < spec.nodes and _nobody_launches(gt):
        _no_nodes(gt, f"{here} agents have attached, and their batch host is lost, which started them")
    elif here >= _awaited_nodes(gt, waited):
        _call_roll(gt)
    elif waited > spec.gather_timeout_s and (dead := _dead(gt)) and spec.requeue and not gt.turn.limits.observe:
        _requeue(gt, f"neither agent nor daemon is heard of {', '.join(dead)}", dead)
    elif waited > spec.gather_timeout_s:
        end(gt, Phase.FAILED, EXIT_NEVER_GATHERED, _missing(gang, gt.tally.here))
    else:
        complete = here >= spec.nodes
        gt.turn.wake(gt.now + LOOK_S if complete else since + spec.gather_timeout_s)


def _awaited_nodes(gt: GangTurn, waited: float) -> int:
    """So many nodes start the gang after `waited` seconds."""
    spec = gt.gang.spec
    if waited > spec.gather_timeout_s and not gt.turn.limits.observe:
        return spec.fewest
    long = LAUNCH_S if _srun_waits(gt) else SPARE_WAIT_S
    return spec.nodes if waited > min(long, spec.gather_timeout_s) else spec.nodes + spec.spares


def _srun_waits(gt: GangTurn) -> bool:
    """A node hangs that srun still tries to reach, whatever Slurm makes of the node meanwhile. When srun gives up, it
    ends all agents that it has started. They come back without that node; what had begun meanwhile would be lost."""
    seen, since = gt.seen, gt.gang.phase_at
    if _dead(gt):
        seen.dead_at = gt.now
    return seen.dead_at > since > seen.launched_at


def _never_enough(gt: GangTurn) -> bool:
    """Of the job's nodes too few are in service: Slurm, or their hardware, has taken the others."""
    gang, out = gt.gang, gt.turn.tallies.out
    nodes = gang.job_nodes
    if not nodes or len(nodes) - len(out) >= gang.spec.fewest:
        return False
    return sum(node not in out for node in nodes) < gang.spec.fewest


def _nobody_launches(gt: GangTurn) -> bool:
    """srun and the batch script have died with the batch host: no agent will come that is not on its way."""
    gang = gt.gang
    if gang.batch_host is None or not _batch_host_dead(gang):
        return False
    came_at = max((agent.attached_at for agent in gt.seen.agents.values()), default=0.0)
    on_their_way_until = max(came_at, gang.phase_at, gt.turn.sight.since) + SPARE_WAIT_S
    gt.turn.wake(on_their_way_until)
    return gt.now >= on_their_way_until


def _dead(gt: GangTurn) -> list[str]:
    """The job's nodes that have not attached and whose daemons, which were known, are silent."""
    return [node for node in gt.gang.job_nodes if node not in gt.tally.here and _silent(gt, node)]


def _silent(gt: GangTurn, node: str) -> bool:
    known = node in gt.turn.ledger.nodes and bool(gt.turn.ledger.node(node).probe_address)
    return known and gt.now - max(gt.turn.sight.since, gt.turn.sight.node(node).heard_at) > suspicion.LEASE_S


def _call_roll(gt: GangTurn) -> None:
    """Enough have attached: make sure that no rank of an earlier run is left, and have the store opened."""
    gang, here = gt.gang, [gt.gang.members[node] for node in gt.tally.here]
    store = placement.first_seats(here, gang.spec.nodes)[0]
    gt.turn.record(f.GenerationFenced(gang.id, gang.generation, "start", True, store, 0, gt.now))


def _missing(gang: Gang, here: Collection[str]) -> str:
    absent = [n for n in gang.job_nodes if n not in here]
    who = ", ".join(absent) if absent else f"{gang.spec.nodes - len(here)} nodes"
    return (
        f"{len(here)} of {gang.spec.nodes} nodes attached within {gang.spec.gather_timeout_s:.0f} s; missing: {who}. "
        f"{''.join(f'{member.out}. ' for member in gang.members.values() if member.out)}"
        "See the job's output file for srun's errors, and whether muster-agent is installed on these nodes"
    )


# -- recovery --


def _recover(gt: GangTurn) -> None:
    gang = gt.gang
    if not all(suspicion.ended(gt, gang.members[node]) for node in gt.tally.unfenced):
        return  # `suspicion.examine` asks after those that do not answer
    clear_at = silence.passed_at(gt)
    if gt.now < clear_at:
        gt.turn.wake(clear_at)
        return
    if gang.stop is not None:
        _leave(gt)
        return
    observed = gt.turn.limits.observe and gang.seats
    if _fails(gang) and not observed:
        end(gt, Phase.FAILED, EXIT_NO_REQUEUE, _crash_words(gt))
        return
    doubt.examine(gt)
    if observed:
        end(gt, Phase.FAILED, EXIT_OBSERVED, f"observe mode: {_would_have(gt)}; {gang.recoveries[-1].cause}")
        return
    if words := breaker.too_many_swaps(gang, gt.now, gt.turn.limits.swaps_per_hour):
        if not flushing.begin(gt, words, Phase.FAILED):
            end(gt, Phase.FAILED, EXIT_STOPPED, words)
        return
    if pool.awaited(gt):
        return
    if len(gt.tally.present) - len(gt.tally.unfit) < min(len(gang.seats) or gang.spec.nodes, gang.spec.fewest):
        _no_nodes(gt, _few_words(gt))
    elif _store_opens(gt):
        return  # who sits where is looked at once, not with every report that comes meanwhile
    elif ranked := _next_seats(gt):
        _start_where_store_listens(gt, ranked)


def _would_have(gt: GangTurn) -> str:
    """What would follow if it were not for observe mode."""
    gang = gt.gang
    if _fails(gang):
        return f"the job would fail with exit code {EXIT_NO_REQUEUE}: {_crash_words(gt)}"
    ranked = _next_seats(gt)
    if ranked is None and gt.turn.limits.pool.options and gang.spec.pool_nodes:
        return "nodes of the shared pool would be asked for"
    if ranked is None:
        return "the job would be requeued" if gang.spec.requeue else "no node would be left to go on with"
    before = [seat.node for seat in gang.seats]
    if len(ranked) < len(before):
        return f"the job would go on with {len(ranked)} nodes"
    swaps = [f"{new} would take the place of {old}" for old, new in zip(before, ranked, strict=True) if old != new]
    return ", ".join(swaps) or "the ranks would be restarted in place"


def _remove_unfit(gt: GangTurn) -> None:
    """Take out who is on a node out of service; where one carries running ranks, they are fenced."""
    for node in sorted(gt.tally.unfit):
        suspicion.remove(gt, gt.gang.members[node], gt.turn.ledger.node(node).reason, alive=True)


def _next_seats(gt: GangTurn) -> list[str] | None:
    gang, usable = gt.gang, gt.usable()
    if not gang.seats:
        return placement.first_seats(usable, gang.spec.nodes)
    before = [seat.node for seat in gang.seats]
    return placement.reseat(before, usable, gt.leaves(), min(len(before), gang.spec.fewest))


def _store_opens(gt: GangTurn) -> bool:
    """A node that will carry ranks is opening the store, and has time left for it."""
    gang = gt.gang
    until = max(gang.phase_at, gang.store_at) + STORE_S
    if gt.store_listens() or gt.now >= until or gang.store_node not in gt.tally.present or gt.unfit(gang.store_node):
        return False
    if gang.store_node not in {seat.node for seat in gang.seats}:
        return False
    gt.turn.wake(until)
    return True


def _start_where_store_listens(gt: GangTurn, ranked: list[str]) -> None:
    """The store lives on a node that carries ranks: a spare's would end with the generation's start, or unnoticed."""
    gang = gt.gang
    if gang.store_node not in ranked:
        gt.turn.record(f.StoreMoved(gang.id, next((n for n in ranked if gt.seen.attached(n)), ranked[0])))
    elif gt.store_listens() and gt.seen.status(gang.store_node).store_reserved and gang.store_node != ranked[0]:
        gt.turn.record(f.StoreMoved(gang.id, ranked[0]))  # nobody but rank 0 would open it
    elif gt.store_listens():
        _start(gt, ranked)
    elif gt.now - (asked_at := max(gang.phase_at, gang.store_at)) < STORE_S:
        gt.turn.wake(asked_at + STORE_S)
    elif gang.stores_missed + 1 >= STORE_TRIES:
        minutes = STORE_TRIES * STORE_S / 60
        words = f"no node has opened a rendezvous store within {minutes:.0f} min, though their agents answer"
        end(gt, Phase.FAILED, EXIT_AGENT, f"{words}; the last one asked is {gang.store_node}: see its agent's log")
    else:  # an agent that answers but opens no store is passed over
        after = ranked[(ranked.index(gang.store_node) + 1) % len(ranked)]
        gt.turn.record(f.StoreMoved(gang.id, after, missed=True))


def _start(gt: GangTurn, ranked: list[str]) -> None:
    gang = gt.gang
    version, sources = _state(gt, ranked)
    if version is None and _memory_may_return(gt):
        return
    seats, spares = placement.arrange(ranked, gt.usable())
    gt.turn.record(
        f.GenerationStarted(
            gang=gang.id,
            generation=gang.fenced + 1,
            seats=seats,
            spares=spares,
            master_node=gang.store_node,
            master_port=gt.seen.status(gang.store_node).store_port,
            version=version,
            sources=sources,
            durable_path="" if version else gang.durable_path,
            fenced_at=gt.now,
            action=_action(gang, ranked),
            crashed_on=doubt.crashed_on(gt) if gang.recoveries else None,
        )
    )


def _memory_may_return(gt: GangTurn) -> bool:
    """After a coordinator's restart an outgoing node that holds the only copy may not have attached anew yet."""
    since = gt.turn.sight.since
    away = [m for m in gt.gang.members.values() if m.out and m.alive and not gt.seen.attached(m.node)]
    if not gt.gang.stepped or not away or gt.now - since >= suspicion.REATTACH_S:
        return False
    gt.turn.wake(since + suspicion.REATTACH_S)
    return True


def _action(gang: Gang, ranked: list[str]) -> str:
    before = [seat.node for seat in gang.seats]
    if not before:
        return "requeue" if gang.recoveries else "start"
    if len(ranked) < len(before):
        return "fewer replicas"
    return "restart in place" if before == ranked else "swap"


def _state(gt: GangTurn, ranked: list[str]) -> tuple[Version | None, tuple[f.Source, ...]]:
    spec = gt.gang.spec
    count = len(ranked) * spec.ranks_per_node
    version = restore.newest_complete(gt.held(), lambda _: count)
    durable = gt.gang.durable_version
    if version is None or (durable is not None and durable > version):
        return None, ()
    home = {
        position * spec.ranks_per_node + local: node
        for position, node in enumerate(ranked)
        for local in range(spec.ranks_per_node)
    }
    leaving = frozenset(m.node for m in gt.gang.members.values() if m.out)
    return version, restore.sources(gt.held(), version, count, home, leaving)


def _fails(gang: Gang) -> bool:
    """The software ends it again and again."""
    return gang.failures >= gang.spec.max_failures


def _crash_words(gt: GangTurn) -> str:
    gang = gt.gang
    last = gang.recoveries[-1].cause if gang.recoveries else ""
    return f"{gang.failures} generations running ended without progress; last: {last}"


def _no_nodes(gt: GangTurn, why: str) -> None:
    """Requeue the gang, or end it where it may not be. `why`: unless nodes are known to be bad."""
    gang = gt.gang
    lost = ", ".join(sorted(_bad(gt)))
    words = f"no spare is left for {lost}" if lost else why
    if gt.turn.limits.observe:
        end(gt, Phase.FAILED, EXIT_OBSERVED, f"observe mode: {words}: the job would be requeued")
        return
    if not gang.spec.requeue:
        end(gt, Phase.FAILED, EXIT_NO_NODES, f"{words}, and the job may not be requeued")
        return
    reason = f"{words}: requeue"
    if gang.phase is Phase.RECOVERING and flushing.begin(gt, reason, Phase.REQUEUED):
        return
    _requeue(gt, reason, _dead(gt))


def _few_words(gt: GangTurn) -> str:
    gone = [member for member in gt.gang.members.values() if member.out]
    if not gone:
        return f"{len(gt.gang.job_nodes)} nodes are left in the job"
    return f"{len(gone)} of {len(gt.gang.members)} agents are gone ({gone[0].out})"


def _bad(gt: GangTurn) -> set[str]:
    """Nodes of this run of the job that it shall not start on again."""
    gang, unfit = gt.gang, gt.turn.tallies.out
    left = {member.node for member in gang.members.values() if member.out}
    if 2 * len(left - unfit) > len(gang.members):
        left &= unfit  # most agents are gone from nodes that nothing is known against: it was what they share
    return left | (set(gang.job_nodes) & unfit)


def _requeue(gt: GangTurn, reason: str, dead: Collection[str] = ()) -> None:
    gang, bad, unfit = gt.gang, _bad(gt) | set(dead), gt.turn.tallies.out
    if not gt.requeued:
        exclude = tuple(sorted(bad))
        admit = tuple(node for node in gang.excluded if node not in bad and node not in unfit)
        gt.turn.owe("requeue", gang.id, gang.job, f"muster: {reason}", exclude=exclude, admit=admit)
    pool.close_all(gt, reason, joined=True)
    gt.turn.record(f.PhaseChanged(gang.id, Phase.REQUEUED, reason))


def _admit(gt: GangTurn) -> None:
    """A job that waits may start on nodes again that were put back into service, and after a while on those that never
    were out of it: else it could wait for ever."""
    gang = gt.gang
    if not gang.excluded:
        return
    waited = gt.now - gang.phase_at
    back = []
    for node in (gt.turn.ledger.node(name) for name in gang.excluded if name not in gang.admitted):
        in_service = node.name not in gt.turn.tallies.out
        if in_service and (node.judged_at > gang.phase_at or waited >= EXCLUDED_S):
            back.append(node.name)
    if back:
        words = "muster: in service"
        gt.turn.owe("admit", gang.id, gang.job, words, admit=tuple(back))
    elif waited < EXCLUDED_S:
        gt.turn.wake(gang.phase_at + EXCLUDED_S)


# -- running --


def _ranks_on(gt: GangTurn, node: str) -> list[RankState]:
    """Ranks of the running generation, as the node's agent reports them."""
    return of_generation(gt.seen.status(node).ranks, gt.gang.generation)


def _failing(gt: GangTurn) -> bool:
    """Agents have met an error that no order can mend. Where most have, it is the job's, and the gang ends; a few
    are taken out of it, as any node that can't carry ranks.

    Who was given notice (SIGTERM) will go as well; most of them were, and a stop is planned. So Slurm's word is waited
    for, and nothing else is decided meanwhile.
    """
    failing, seen = gt.tally.failing | gt.tally.noticed, gt.seen
    if not failing or gt.gang.stop is not None or gt.gang.phase not in ACTIVE | {Phase.GATHERING}:
        seen.failed_at = 0.0
        return False
    seen.failed_at = seen.failed_at or gt.now
    if gt.now - seen.failed_at < SLURM_WORD_S:
        gt.turn.wake(seen.failed_at + SLURM_WORD_S)
        return True
    words = {node: f"{node}: {seen.status(node).failure or seen.status(node).notice}" for node in sorted(failing)}
    if _too_many(gt, len(words)):
        end(gt, Phase.FAILED, EXIT_AGENT, next(iter(words.values())))
        return True
    for node, reason in words.items():
        suspicion.remove(gt, gt.gang.members[node], reason, alive=True)
    return False


def _too_many(gt: GangTurn, failing: int) -> bool:
    """So many agents that can't go on are most of the gang, or leave too few nodes to begin with. While it gathers,
    those that have not attached yet are nodes as well, and who was taken out for the same is none."""
    gang = gt.gang
    if gang.phase is not Phase.GATHERING:
        return 2 * failing > len(gt.tally.present)
    nodes = max(len(gang.members), len(gang.job_nodes) or gang.spec.nodes + gang.spec.spares)
    failing += sum(bool(member.out) for member in gang.members.values())
    return 2 * failing > nodes or nodes - failing < gang.spec.fewest


def _run(gt: GangTurn) -> None:
    gang = gt.gang
    if _crashed(gt):
        return
    tally = gt.tally
    whole = tally.reported == gang.ranks
    # Training moves only with every rank, though one may be out of the coordinator's reach.
    if (whole or tally.progressed) and gang.phase is Phase.STARTING:
        gt.turn.record(f.PhaseChanged(gang.id, Phase.RUNNING, ""))
    if tally.progressed and not patience.stepped(gt):
        watched = gt.turn.sight.since <= gang.started_at
        gt.turn.record(f.FirstStep(gang.id, gang.generation, _first_step(gt), watched))
    doubt.blame(gt)
    if whole and tally.done == tally.reported:
        _finish(gt)
    elif not stopping.overdue(gt) and not hang.watch(gt):
        _release(gt)
        flushing.on_request(gt)


def _first_step(gt: GangTurn) -> int:
    return min(rank.step for seat in gt.gang.seats for rank in _ranks_on(gt, seat.node) if rank.progressed)


def _crashed(gt: GangTurn) -> bool:
    tally = gt.tally
    if not tally.crashed:
        return False
    nodes = sorted(tally.crashed, key=lambda node: tally.seats[node].group_rank)
    failed = [(node, rank) for node in nodes for rank in _ranks_on(gt, node) if not rank.running and rank.exit_code]
    # An agent that has fenced the running generation itself has heard nobody for too long: no fault of the software.
    crashed = [(node, rank) for node, rank in failed if gt.seen.status(node).fenced < gt.gang.generation]
    if crashed:
        # What a script does of a stop is no fault of it.
        node, rank = crashed[0]
        stops = gt.gang.stop is not None
        suspicion.fence(gt, _exit_words(node, rank), hardware=stops, suspected_at=gt.now, crashed_on=node)
    else:
        words = f"{failed[0][0]} was cut off from the coordinator and most of its gang, and has ended its ranks"
        suspicion.fence(gt, words, hardware=True, suspected_at=gt.now)
    return True


def _exit_words(node: str, rank: RankState) -> str:
    code = rank.exit_code or 0
    how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
    tail = rank.stderr_tail.strip().splitlines()
    return f"rank {rank.rank} on {node} {how}" + (f": {tail[-1].strip()[:WORDS_MOST]}" if tail else "")


def _release(gt: GangTurn) -> None:
    """Let go of live nodes that carry no ranks again; the batch host can't be, nor anyone once it is dead."""
    gang = gt.gang
    leaving = [gang.members[node] for node in sorted(gt.tally.leaving)]
    if not leaving or gang.phase is not Phase.RUNNING or gt.turn.limits.observe:
        return
    if not patience.stepped(gt) and gt.now - gang.phase_at < RELEASE_S:
        gt.turn.wake(gang.phase_at + RELEASE_S + 0.01)
        return
    for member in leaving:
        if member.job != gang.job:
            pool.let_go(gt, member)
        elif not _batch_host_dead(gang):
            gt.turn.owe("let_go", gang.id, gang.job, f"muster: {member.out}", node=member.node)


# -- ending --


def _finish(gt: GangTurn) -> None:
    if gt.gang.stop is not None:
        _leave(gt)
    elif not flushing.begin(gt, "the job is done", Phase.DONE):
        end(gt, Phase.DONE, 0, "every rank exited with 0")


def _leave(gt: GangTurn) -> None:
    """No rank runs any more: save what they have kept, then go on as the stop was planned."""
    gang, stop = gt.gang, gt.gang.stop
    assert stop is not None
    kept = gang.phase in (Phase.RUNNING, Phase.RECOVERING)
    if not kept or not flushing.begin(gt, stop.reason, stop.after):
        _go_on(gt, stop.after, stop.reason)


def _go_on(gt: GangTurn, after: Phase | None, reason: str) -> None:
    if gt.job_ended:
        end_as_slurm(gt, gt.job_ended)
    elif after is Phase.REQUEUED:
        _requeue(gt, reason)
    else:
        end(gt, Phase.FAILED, EXIT_STOPPED, reason)


def _drain(gt: GangTurn) -> None:
    gang = gt.gang
    if (gang.flush is not None and not flushing.over(gang)) or flushing.go_on(gt):
        return
    error = gang.flush.error if gang.flush else ""
    words = f"the last checkpoint could not be written: {error}"
    if gang.drain_to is not Phase.DONE:
        _go_on(gt, gang.drain_to, f"{gang.reason} ({words})" if error else gang.reason)
    elif error:
        end(gt, Phase.FAILED, EXIT_NOT_DURABLE, f"every rank exited with 0, but {words}")
    else:
        end(gt, Phase.DONE, 0, "every rank exited with 0")
