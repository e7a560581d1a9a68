"""Views: what users see of a gang and of nodes, built from the durable state and the observed state. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from muster.checkpoint.redundancy import wire
from muster.daemon.coordinator.core.detection import failure_rate
from muster.daemon.coordinator.core.recovery import flushing, requeueing, restore_plan
from muster.daemon.coordinator.core.recovery.planned_swap import drain_words
from muster.daemon.coordinator.core.recovery.requeueing import exclusion_end
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.checkpoint import Flush
from muster.daemon.coordinator.core.state.durable_state import DurableState, Node
from muster.daemon.coordinator.core.state.events import AgentStatus, RankState
from muster.daemon.coordinator.core.state.fact_text import call_words
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.generations import Recovery, Straggler
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.observed_state import (
    HEARTBEAT_TIMEOUT_S,
    ObservedGang,
    ObservedNode,
    ObservedState,
)
from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.state.slurm_jobs import Exclusion, SlurmJob
from muster.daemon.coordinator.core.state.state_tables import ACTIVE, Phase
from muster.daemon.coordinator.core.turn.turn import progress_of
from muster.daemon.coordinator.services import conversion
from muster.daemon.coordinator.slurm.pending_reasons import pending_words
from muster.daemon.coordinator.view_parts.node_use import add_use
from muster.daemon.coordinator.view_parts.outlook import add_outlook
from muster.daemon.coordinator.view_parts.training import add_training
from muster.daemon.transport import job_limits
from muster.fabric.groups.axes import Axes
from muster.fabric.groups.rank_place import axes_of_world, coordinates
from muster.node_health import OUT_OF_SERVICE, UNRESPONSIVE, NodeHealth
from muster.v1 import api_pb2, common_pb2
from muster.wording import counted, listed

_NODES_NAMED = 8
"""Nodes that one source of a restore lists."""
_SAYING = 3
"""Nodes whose agents are quoted in one line: many may say the same."""

_NO_LEMONS = Limits(lemon_after=0)
GoodputOf = Callable[[Gang, float], api_pb2.GoodputView | None]


def no_goodput(gang: Gang, now: float) -> None:
    """Nobody keeps an account."""


def gang_view(
    state: DurableState,
    observed: ObservedState,
    gang: Gang,
    now: float,
    limits: Limits = _NO_LEMONS,
    *,
    brief: bool = False,
    for_people: bool = True,
    goodput: GoodputOf = no_goodput,
) -> api_pb2.GangView:
    """The view of one gang. Of a gang that is over, only the durable state counts: no agent tells it again.
    `limits`: those of the site's policy. `brief`: as in ListRequest. `for_people`: with how it trains and what it has
    used, which no program acts on. `goodput`: the account of a gang until now.
    """
    seen = ObservedGang() if gang.final else observed.gangs.get(gang.id, ObservedGang())
    jobs, seated = jobs_of(gang), {seat.node for seat in gang.roster.seats}
    progress = _progress(gang, seen)
    view = api_pb2.GangView(
        gang_id=gang.id,
        name=gang.account.name,
        slurm_job_ids=[gang.slurm.job, *(request.job for request in gang.growth.pool.values() if request.job)],
        owner_uid=gang.account.owner_uid,
        phase=gang.phase.value,
        generation=gang.newest.generation,
        step=progress.step.step if progress.step else 0,
        ranks=[] if brief else _ranks(gang, seen),
        nodes=[
            _member_view(state, observed, seen, gang, name, now, jobs, seated, limits.lemon_after)
            for name in (() if brief else _names(gang))
        ],
        recoveries=map(_recovery, gang.recovery.recoveries[-1 if brief else 0 :]),
        recovery_count=len(gang.recovery.recoveries),
        final=gang.final,
        ended_s=gang.phase_at if gang.final else 0.0,
        exit_code=gang.exit_code,
        reason=gang.reason,
        run_dir=json.loads(gang.account.shown_spec).get("run_dir", ""),
        waiting_for=waiting_for(state, observed, gang),
        exclusions=[] if gang.final or brief else _exclusions(state, gang),
        replicas_disagree=gang.findings.disagreement.reason if gang.findings.disagreement is not None else "",
        not_finite=gang.findings.not_finite,
        last_loss=gang.findings.last_loss,
        wider_groups=_wider_than_asked(gang, seen),
        unsupervised=gang.spec.unsupervised or gang.findings.unsupervised,
        awaits_launch=gang.spec.awaits_launch,
        array_task=gang.spec.array_task,
        extra_communication_s=gang.roster.extra_communication_s,
        checkpoint=checkpoint_view(gang, seen, now),
    )
    if committed := progress.committed:
        view.committed.CopyFrom(common_pb2.Version(generation=committed.generation, step=committed.step))
    add_outlook(view, gang, seen, now, limits)
    if for_people:
        add_training(view, gang, seen, brief=brief)
        if not brief:
            add_use(view, gang, seen)
        add_account(view, gang, now, goodput)
    return view


def add_account(view: api_pb2.GangView, gang: Gang, now: float, goodput: GoodputOf) -> None:
    """What the gang has used, and while no rank runs, and after the end, the step that its script's numbers name."""
    if (account := goodput(gang, now)) is not None:
        view.goodput.CopyFrom(account)
        view.step = view.step or account.logged_step


def _progress(gang: Gang, seen: ObservedGang) -> facts.Progress:
    """What is observed counts while ranks run. Otherwise it may be forgotten at any time."""
    return progress_of(gang, seen) if gang.phase in (Phase.STARTING, Phase.RUNNING) else gang.newest.progress


def checkpoint_view(gang: Gang, seen: ObservedGang, now: float) -> api_pb2.CheckpointView:
    """What is kept of a gang, how often, what that costs, and what a fault loses now."""
    reports = (agent.status for agent in seen.agents.values() if agent.attached)
    cost = next((status.snapshot_cost for status in reports if status.snapshot_cost is not None), None)
    flush, flush_s, stall_s = gang.checkpoint.flush, seen.flush_costs.took_s, seen.flush_costs.stall_s
    view = api_pb2.CheckpointView(
        mtbf_s=gang.newest.mtbf_s,
        mtbf_of_job=gang.spec.node_mtbf_s > 0,
        durable_every_s=flushing.durable_interval_s(gang, seen),
        durable_every_steps=gang.spec.durable_every_steps,
        durable_auto=gang.spec.durable_auto,
        flush_s=flush_s,
        flush_stall_s=stall_s,
        durable_path=gang.checkpoint.durable_path,
        memory_only=not gang.spec.durable_dir,
    )
    if cost is not None:
        view.every, view.auto_interval, view.cost = cost.every, cost.auto, cost.share
        view.stall_s, view.step_s, view.slots_s = cost.stall_s, cost.step_s, cost.slots_s
        view.delay_s = cost.delay_s
    step_s = seen.pace.median_step_s or (cost.step_s if cost is not None else 0.0)
    if flush is not None:
        view.flush_serial, view.flush_error = flush.serial, flush.error
        view.flushing = gang.checkpoint.is_flushing
        if view.flushing:
            view.flush.CopyFrom(_flush_view(flush, seen, now))
    between_s = view.durable_every_s or view.durable_every_steps * step_s
    view.durable_cost = min(1.0, stall_s / between_s) if between_s else 0.0
    view.no_slots = _said_by_nodes(seen, lambda status: status.no_slots)
    view.copies_wait = _said_by_nodes(seen, lambda status: status.copies_wait)
    progress = _progress(gang, seen)
    step, committed = progress.step.step if progress.step else 0, progress.committed
    newest = max(
        (v for v in (committed, gang.restore.restored_version, gang.checkpoint.durable_version) if v is not None),
        default=None,
    )
    # A script without the library finishes no step here. During a recovery nobody knows yet what memory has left.
    if newest is not None and progress.step is not None and gang.phase is Phase.RUNNING:
        view.loses_steps = max(0, step - newest.step)
        view.loses_s = view.loses_steps * step_s
    if committed is not None and committed.generation == gang.newest.generation:  # so this generation's nodes hold it
        groups = gang.restore.protection_groups
        view.copies = 0 if groups else min((1 + len(seat.holders) for seat in gang.roster.seats), default=0)
        view.parity_groups.extend(wire.group_messages(groups))
    if (restore := _restore_view(gang, seen)) is not None:
        view.restore.CopyFrom(restore)
    if seen.committed is not None and seen.committed[0] == committed:
        view.committed_s = seen.committed[1]
    if gang.checkpoint.durable_version is not None:
        view.durable_s = gang.checkpoint.durable_at
        view.durable_loses_steps = max(0, step - gang.checkpoint.durable_version.step)
        view.durable_loses_s = view.durable_loses_steps * step_s
    return view


def _said_by_nodes(seen: ObservedGang, read: Callable[[AgentStatus], str]) -> str:
    """What the first agents say, each after the name of its node; empty: nothing."""
    statuses = ((node, agent.status) for node, agent in sorted(seen.agents.items()) if agent.attached)
    said = [f"{node}: {words}" for node, status in statuses if (words := read(status))]
    more = f"; and {counted(len(said) - _SAYING, 'further node')}" if len(said) > _SAYING else ""
    return "; ".join(said[:_SAYING])[: job_limits.MAX_TEXT_CHARS] + more


def lost_at_end(gang: Gang, seen: ObservedGang) -> str:
    """How many steps are in memory alone, and so are lost when the gang ends now, in words; empty: none are known."""
    progress, version, job = _progress(gang, seen), gang.checkpoint.durable_version, gang.slurm.job
    saved = version.step if version is not None else 0
    if progress.step is None or progress.committed is None or progress.step.step <= saved:
        return ""
    lost = counted(progress.step.step - saved, "step that only memory had is", "steps that only memory had are")
    if not gang.spec.durable_dir:
        return f"{lost} lost: with durable_dir in job.toml, muster flush {job} before the cancel keeps them"
    newest = "there is no durable checkpoint"
    if version is not None:
        newest = f"the newest durable checkpoint is of step {saved}"
    return f"{lost} lost: {newest}. muster flush {job} before the cancel keeps them"


def _restore_view(gang: Gang, seen: ObservedGang) -> api_pb2.RestoreView | None:
    """The restore of the running generation, until its first step; None: there is none."""
    if gang.phase not in ACTIVE or gang.newest.stepped_generation >= gang.newest.generation:
        return None
    reports = (seen.status(seat.node).restore for seat in gang.roster.seats)
    loads = (report for report in reports if report is not None and report.generation == gang.newest.generation)
    loaded = next((report for report in loads if report.folder), None)
    version = loaded.version if loaded is not None else gang.restore.restored_version
    if version is None:
        return None
    view = api_pb2.RestoreView(version=common_pb2.Version(generation=version.generation, step=version.step))
    if loaded is not None:
        view.folder, view.damage = loaded.folder, loaded.damage
    for source, (ranks, nodes) in restore_plan.shares(gang).items():
        view.shares.add(source=source, ranks=ranks, nodes=nodes[:_NODES_NAMED])
    for seat in gang.roster.seats:
        report = seen.status(seat.node).restore
        if report is None or report.generation != gang.newest.generation:
            continue
        view.ranks += report.ranks
        view.ranks_done += report.ranks_done
        view.bytes += report.size
        view.own_bytes += report.own
        view.copied_bytes += report.copied
        view.loaded_bytes += report.loaded
        view.fetched_bytes += sum(report.fetched.values())
        view.seconds = max(view.seconds, report.seconds)
    return view


def _flush_view(flush: Flush, seen: ObservedGang, now: float) -> api_pb2.FlushView:
    """The flush that runs, as far as the nodes that write have reported."""
    reports = seen.flush_pace.progress(flush.serial)
    # The agents may have agreed on a newer version than the order names.
    version = max((r.version for r in reports.values() if r.version is not None), default=flush.version)
    view = api_pb2.FlushView(
        serial=flush.serial,
        version=common_pb2.Version(generation=version.generation, step=version.step),
        written=sum(report.written for report in reports.values()),
        bytes=sum(report.total for report in reports.values()),
        seconds=now - flush.asked_at,
        nodes_holding_slots=sum(report.holds_slots for report in reports.values()),
    )
    if reports:
        node, since = seen.flush_pace.quietest()
        view.quiet_node, view.quiet_s = node, now - since if node else 0.0
    return view


def node_view(
    state: DurableState, observed: ObservedState, name: str, now: float, readable_jobs: Collection[int] | None
) -> api_pb2.NodeView:
    """The view of one node, without regard to gangs. `readable_jobs`: the jobs of which the reader may know; None: all.

    The owner of a job has written what its node checks say, and other users see neither that nor the job.
    """
    node, seen, failures = state.node(name), observed.nodes.get(name), failure_rate.failures(state, name, now)
    view = api_pb2.NodeView(
        node=name,
        verdict=node.health.value,
        role="absent",
        reason=_fit_words(node, failures, seen) if node.health is NodeHealth.FIT else node.reason,
        musterd_attached=bool(
            seen and seen.attached and now - seen.heard_at < HEARTBEAT_TIMEOUT_S and node.health not in UNRESPONSIVE
        ),
        heard_s_ago=now - seen.heard_at if seen and seen.heard_at else -1.0,
        failures=failures,
        verdict_since_s=node.judged_at,
        signals=list(node.precursors),
        nvlink_domain=seen.report.nvlink_domain if seen and seen.report else "",
        adapter_bandwidth=seen.report.adapter_bandwidth if seen and seen.report else 0.0,
    )
    if node.check and (readable_jobs is None or node.checked_in_job in readable_jobs):
        view.node_check.CopyFrom(conversion.node_check_message(node.check))
        view.checked_s, view.checked_in_job = node.checked_at, node.checked_in_job
    return view


def ever_heard(node: Node, seen: ObservedNode | None) -> bool:
    """Whether the node's daemon was ever heard. What Slurm says of a node makes a record of it, too."""
    return bool(node.boot_id or node.probe_address or (seen is not None and seen.incarnation))


def _fit_words(node: Node, failures: int, seen: ObservedNode | None) -> str:
    """What is to be said of a node in service: that it is drained, or why it is back after a failure."""
    if node.drain is not None:
        return drain_words(node.name, node.drain)
    if seen is not None and (seen.drain is not None or seen.down) and ever_heard(node, seen):
        reason = seen.drain.reason if seen.drain is not None else ""
        return f"{'DOWN' if seen.down else 'drained'} in Slurm" + (f": {reason}" if reason else "")
    return f"in service again: {node.reason}" if node.repaired_at and failures and node.reason else ""


def jobs_of(gang: Gang) -> set[int]:
    """The gang's job, and the pool jobs that its members came with."""
    return {gang.slurm.job, *(member.job for member in gang.roster.members.values())}


def _wider_than_asked(gang: Gang, seen: ObservedGang) -> str:
    """Which groups, and which segments of Slurm, lie further apart than the job asks."""
    batch, slurm = seen.batch, gang.slurm
    split = batch.split_segments if batch is not None and batch.is_of(slurm.job, slurm.restart_count) else ""
    return "; ".join(filter(None, (gang.roster.wider_groups, split)))


def waiting_for(state: DurableState, observed: ObservedState, gang: Gang) -> str:
    """What has to happen before the gang continues, in words; empty while it waits for nothing."""
    seen = ObservedGang() if gang.final else observed.gangs.get(gang.id, ObservedGang())
    in_queue = gang.phase in (Phase.SUBMITTED, Phase.REQUEUED) or (gang.phase is Phase.GATHERING and seen.job_pending)
    if suspended := seen.suspended_jobs & gang.jobs():
        why = "which an operator or a job of a higher priority has suspended"
        stopped = f"if its user has stopped it: scancel --signal=CONT {min(suspended)}"
        phase_words = f"Slurm to resume job {min(suspended)}, {why} ({stopped})"
    else:
        phase_words = _queue_words(seen, observed, gang) if in_queue else _phase_words(seen, gang)
    waits = [words for words in (phase_words, _stall_words(seen, gang)) if words]
    waits += [f"the probes of {node}" for node in sorted(seen.suspected_since) if gang.phase in ACTIVE]
    owed = [call_words(call) for call in state.owed.values() if call.gang == gang.id]
    return "; ".join(waits + [f"Slurm: {', '.join(owed)}"] * bool(owed))


def _queue_words(seen: ObservedGang, observed: ObservedState, gang: Gang) -> str:
    if gang.spec.awaits_launch and seen.job_running is not None:
        if gang.spec.unsupervised:
            return f"job {gang.slurm.job} to end: its script runs, and is not supervised"
        launched = seen.batch is not None and seen.batch.is_of(gang.slurm.job, seen.job_running[0])
        return "agents: its script has launched, and none is attached" if launched else "a launch: its script runs"
    failed_on = requeueing.launch_failed_on(observed, gang.slurm)
    drained = requeueing.drained_by_launches(observed) if seen.is_held_after_launch else []
    reason = pending_words(seen.pending_reason, gang.slurm.job, failed_on, _excluded(gang), drained)
    if seen.completing:
        reason = f"{reason}; " * bool(reason) + (
            f"its last run has not ended on {listed(seen.completing)}: if that lasts, a Prolog, an Epilog or a process "
            "hangs there, and slurmd's log on that node says which"
        )
    return f"Slurm to start job {gang.slurm.job}" + (f" ({reason})" if reason else "")


def _phase_words(seen: ObservedGang, gang: Gang) -> str:
    spec = gang.spec
    match gang.phase:
        case Phase.GATHERING:
            attached = sum(seen.is_attached(member.node) for member in gang.roster.present())
            late = sorted(name for name in gang.slurm.job_nodes if not seen.is_attached(name))
            return f"agents: {attached} of {spec.nodes + spec.spares} are attached" + _listed(", missing ", late)
        case Phase.PREFLIGHT:
            checked = sorted(m.node for m in gang.roster.present() if gang.spec.preflight and m.check is None)
            if checked:
                return "the node checks" + _listed(" of ", checked)
            return f"{gang.recovery.next_store_node} to open the rendezvous store"
        case Phase.STARTING:
            late = sorted(seat.node for seat in gang.roster.seats if not _all_run(gang, seen, seat.node))
            return "ranks to start" + _listed(" on ", late)
        case Phase.RUNNING if not any(agent.attached for agent in seen.agents.values()):
            return "agents to attach again, which tell how far the ranks are"
        case Phase.RUNNING if gang.plans.stop is not None:
            return f"ranks to stop after a step: {gang.plans.stop.reason}"
        case Phase.RUNNING if gang.plans.swap is not None and (gang.plans.swap.nodes or gang.plans.swap.gives_way_to):
            return f"ranks to stop after a step: {'the gang ' * bool(gang.plans.swap.nodes)}{gang.plans.swap.reason}"
        case Phase.RUNNING if gang.roster.seats and len(gang.roster.seats) < spec.nodes:
            return f"further nodes: ranks run on {len(gang.roster.seats)} of {spec.nodes}{_requested(gang)}"
        case Phase.RECOVERING | Phase.DRAINING:
            late = sorted(
                m.node
                for m in gang.roster.present()
                if seen.status(m.node).fenced_generation < gang.recovery.fenced_generation
            )
            return (
                f"the ranks of generation {gang.recovery.fenced_generation} to end" + _listed(" on ", late)
                if late
                else _after_fence(gang)
            )
        case _:
            return ""


def _stall_words(seen: ObservedGang, gang: Gang) -> str:
    if (
        gang.findings.hang is not None and seen.pace.progressed_at <= gang.findings.hang.at
    ):  # in observe mode ranks may continue by themselves
        return f"the fence of the hanging generation: {gang.findings.hang.reason}"
    if seen.stall is not None:
        silent = len(seen.stall.unanswered)
        unanswered = f"; {counted(silent, 'agent has', 'agents have')} not answered" if silent else ""
        return f"a step: no rank finished one for long{unanswered}"
    return ""


def _after_fence(gang: Gang) -> str:
    if gang.phase is Phase.DRAINING:
        return "the last checkpoint to be written to durable storage"
    if coming := [request for request in gang.growth.pool.values() if not request.node]:
        return "a node of the shared pool" + _listed(", job ", [str(request.job) for request in coming if request.job])
    return f"{gang.recovery.next_store_node} to open the rendezvous store"


def _requested(gang: Gang) -> str:
    """The nodes that are on their way, in words."""
    coming = [request for request in gang.growth.pool.values() if not request.node]
    names = [request.wanted_node or "one of the shared pool" for request in coming]
    return f"; requested: {', '.join(names)}" if names else ""


def _listed(before: str, names: list[str]) -> str:
    return before + listed(names) if names else ""


def _all_run(gang: Gang, seen: ObservedGang, node: str) -> bool:
    running = [r for r in seen.status(node).ranks if r.generation == gang.newest.generation and r.running]
    return len(running) == gang.spec.ranks_per_node


def _ranks(gang: Gang, seen: ObservedGang) -> list[api_pb2.RankView]:
    views = []
    axes = axes_of_world(
        len(gang.roster.seats) * gang.spec.ranks_per_node,
        tensor=gang.spec.tensor,
        context=gang.spec.context,
        expert=gang.spec.expert,
        pipeline=gang.spec.pipeline,
        order=gang.spec.axis_order,
    )
    paces = seen.blocks.paces.stragglers if seen.blocks.generation == gang.newest.generation else {}
    stragglers = {rank: pace.slower_by for rank, pace in paces.items()}
    for seat in sorted(gang.roster.seats, key=lambda seat: seat.group_rank):
        states = {r.rank: r for r in seen.status(seat.node).ranks if r.generation == gang.newest.generation}
        first = seat.group_rank * gang.spec.ranks_per_node
        for rank in range(first, first + gang.spec.ranks_per_node):
            view = _rank(rank, seat.node, states.get(rank), stragglers.get(rank, 0.0))
            if gang.phase is Phase.DONE:  # its agents forget what every rank has exited with: 0
                view.state, view.exit_code = "exited", 0
            _add_place(view, rank - first, gang.roster.members.get(seat.node), axes)
            views.append(view)
    return views


def _add_place(view: api_pb2.RankView, local_rank: int, member: Member | None, axes: Axes | None) -> None:
    """Where the rank is: on its node, in the network, on the axes of parallelism."""
    view.local_rank = local_rank
    if member is not None:
        view.leaf, view.nvlink_domain = member.leaf, member.nvlink_domain
    for axis, place in coordinates(axes, view.rank).items() if axes else ():
        view.coordinates[axis.word] = place


def _rank(rank: int, node: str, state: RankState | None, slower_by: float) -> api_pb2.RankView:
    if state is None:
        return api_pb2.RankView(rank=rank, node=node, state="absent")
    word = "running" if state.running else "starting" if state.exit_code is None else "exited"
    return api_pb2.RankView(
        rank=rank,
        node=node,
        state=word,
        exit_code=state.exit_code or 0,
        step=state.step,
        declared_phase=state.declared if state.exit_code is None else "",
        slower_by=slower_by,
        gpu=state.gpu,
    )


def _names(gang: Gang) -> list[str]:
    return sorted({*gang.roster.members, *gang.slurm.job_nodes}, key=lambda name: (len(name), name))


def _member_view(
    state: DurableState,
    observed: ObservedState,
    seen: ObservedGang,
    gang: Gang,
    name: str,
    now: float,
    jobs: Collection[int],
    seated: Collection[str],
    lemon_after: int,
) -> api_pb2.NodeView:
    """`jobs`: those of the gang. `seated`: the nodes that carry its ranks."""
    view = node_view(state, observed, name, now, jobs)
    member = gang.roster.members.get(name)
    agent = seen.agents.get(name)
    if agent and agent.heard_at:
        ago = now - agent.heard_at
        view.heard_s_ago = ago if view.heard_s_ago < 0 else min(ago, view.heard_s_ago)
    if name in seen.suspected_since and gang.phase in ACTIVE and state.node(name).health not in OUT_OF_SERVICE:
        view.verdict, view.reason = (
            NodeHealth.SUSPECT.value,
            f"silent or accused for {now - seen.suspected_since[name]:.1f} s",
        )
    elif state.node(name).health is NodeHealth.FIT and (straggler := _lasting_straggler(gang, name)) is not None:
        view.verdict, view.reason = NodeHealth.DEGRADED.value, straggler.reason
    view.role = role_of(member, seated)
    if member is not None:
        view.reason = _member_words(view, member, gang.slurm)
    view.lemon = failure_rate.is_lemon(view.failures, lemon_after)
    view.leaf, view.pod = member.leaf if member else "", observed.pod(name)
    view.agent_attached = seen.is_attached(name) and state.node(name).health not in UNRESPONSIVE
    view.warm = seen.status(name).warm
    return view


def _member_words(view: api_pb2.NodeView, member: Member, job: SlurmJob) -> str:
    """The reason of the verdict. Of a node in service: why it has left the gang or is a member again, and why it is in
    service. Where Slurm takes a node from the job, and ends the agent there, as when somebody sets it DOWN, the end of
    the agent is mostly seen first: then both are said."""
    if view.verdict != NodeHealth.FIT and view.reason:
        return view.reason
    again = "the job has it again after its repair" if member.returned and not member.removed else ""
    ended = member.removal_reason == member.agent_ended_reason and member.job == job.job
    left = member.departed_reason if ended and member.node not in job.job_nodes else ""
    return "; ".join(dict.fromkeys(filter(None, (member.removal_reason, left, again, view.reason))))


def _lasting_straggler(gang: Gang, node: str) -> Straggler | None:
    """The newest straggler of the running generation on the node that has lasted. In other jobs the node is FIT."""
    of_node = [
        known for known in gang.findings.stragglers if (known.node, known.generation) == (node, gang.newest.generation)
    ]
    return next((known for known in reversed(of_node) if known.response is not None), None)


def role_of(member: Member | None, seated: Collection[str]) -> str:
    """What a member does in its gang, as NodeView says it. `seated`: the nodes that carry the gang's ranks."""
    if member is None:
        return "absent"
    if member.removed:
        return "out"
    return "rank" if member.node in seated else "spare"


def _excluded(gang: Gang) -> list[str]:
    return [name for name in gang.slurm.excluded if name not in gang.slurm.admitted]


def _exclusions(state: DurableState, gang: Gang) -> list[api_pb2.ExclusionView]:
    """The nodes on which the next run of the job does not start."""
    views = []
    for node in _excluded(gang):
        why = gang.slurm.exclusions.get(node) or Exclusion("", gang.phase_at)
        until = 0.0 if state.node(node).health in OUT_OF_SERVICE else exclusion_end(gang, node)
        views.append(api_pb2.ExclusionView(node=node, reason=why.reason, at_s=why.at, until_s=until))
    return views


def _recovery(recovery: Recovery) -> api_pb2.RecoveryView:
    return api_pb2.RecoveryView(
        generation=recovery.generation,
        action=recovery.action,
        cause=recovery.cause,
        nodes_out=recovery.nodes_out,
        nodes_in=recovery.nodes_in,
        suspected_s=recovery.suspected_at,
        detected_s=recovery.detected_at,
        fenced_s=recovery.fenced_at,
        started_s=recovery.started_at,
        running_s=recovery.running_at,
        restored_s=recovery.restored_at,
        first_step_s=recovery.first_step_at,
        step_before=recovery.step_before,
        step_restored=recovery.step_restored,
    )
