"""How each fact changes the durable state: `apply(state, fact, at)` changes the state in place and does no I/O.

The same facts in the same order always give the same durable state: a restarted coordinator applies them again.
"""

from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from muster.checkpoint.format.folder_names import parse_path
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.account import FORGOTTEN_BYTES, Account, JournalUse, counted_bytes
from muster.daemon.coordinator.core.state.checkpoint import Checkpoint, DurableCheckpoint, Flush
from muster.daemon.coordinator.core.state.durable_state import (
    CorrelatedFault,
    DrainRequest,
    DurableState,
    Node,
    Precursor,
    ReportedDrain,
)
from muster.daemon.coordinator.core.state.events import Version
from muster.daemon.coordinator.core.state.fact_text import loss_words
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.generations import (
    Disagreement,
    Findings,
    Hang,
    NewestGeneration,
    Recovery,
    RecoveryState,
    Stop,
    Straggler,
    Swap,
)
from muster.daemon.coordinator.core.state.roster import Member, Roster
from muster.daemon.coordinator.core.state.slurm_jobs import Exclusion, PoolRequest, SlurmJob
from muster.daemon.coordinator.core.state.state_tables import Phase, check_gang_transition, check_node_transition
from muster.fabric.model.record import FabricRecord
from muster.node_health import OUT_OF_SERVICE, NodeHealth

LIMIT_WINDOW_S = 3600.0
"""Seconds over which the hourly limits count."""
COUNTED_OUT_S = 86400.0
"""Seconds for which a node out of service counts against the limits. Some nodes never come back."""
RECOVERIES_KEPT = 500
"""Number of a gang's newest recoveries that are kept: each snapshot and each view holds them. The journal has all."""
FAILURES_KEPT_S, FAILURES_KEPT = 30 * 86400.0, 100
"""Seconds for which the failure of a node is kept, and how many of one node are."""

RESUME_TRIAL_S = 86400.0
"""Seconds after a resume by Muster within which a node must not fail, or Muster does not resume it again."""
STRAGGLERS_KEPT = 32
"""Number of a gang's newest stragglers that are kept: each snapshot holds them."""
DURABLE_KNOWN = 16
"""Number of a gang's newest durable checkpoints to which it can go back."""
ROLL_BACKS_KEPT = 100
"""Number of a gang's newest roll backs that are kept, as many as the policy may allow."""
LONG_RUN_S = 3600.0
"""Seconds after which a generation counts as progress although its script never declares a step."""


@dataclass(frozen=True, slots=True)
class _ShownSpec:
    """The keys of a job's spec that views show. The durable state holds no other part of a spec but GangSpec: a spec
    can have 1 MiB, and every snapshot of the journal holds the durable state."""

    run_dir: str = ""
    flops_per_step: float = 0.0
    tokens_per_step: float = 0.0
    peak_flops: float = 0.0


_SHOWN_SPEC = TypeAdapter(_ShownSpec)


def apply(state: DurableState, fact: facts.Fact, at: float) -> None:
    """Change the durable state by one fact, decided at wall-clock time `at` (seconds).

    Raises:
        IllegalTransition: a state table forbids it; nothing was changed.
    """
    match fact:
        case facts.NodeRegistered() | facts.NodeJudged():
            _apply_node(state, fact, at)
            if isinstance(fact, facts.NodeJudged) and fact.failure:
                _count_failure(state, fact.node, at)
        case facts.PrecursorEnded():
            _end_precursor(_node(state, fact.node), fact.signal)
        case facts.NodeDrainRequested():
            _node(state, fact.node).drain = DrainRequest(fact.requested_by, fact.reason, at)
        case facts.NodeDrainEnded():
            node = _node(state, fact.node)
            node.drain, node.repaired_at = None, at
        case facts.CorrelatedFaultSuspected():
            state.correlated_faults[fact.node] = CorrelatedFault(fact.reason, at, fact.program_error)
        case facts.CorrelatedFaultResolved():
            state.correlated_faults.pop(fact.node, None)
        case facts.SlurmCallOwed():
            state.owed[fact.call] = fact
            state.last_call = max(state.last_call, fact.call)
            if fact.verb == "let_go":
                state.gangs[fact.gang].roster.members[fact.node].released = True
            elif fact.verb == "complete":
                state.gangs[fact.gang].slurm.completion_owed = True
            elif fact.verb == "requeue":
                gang = state.gangs[fact.gang]
                gang.slurm.excluded, gang.slurm.admitted = (
                    tuple(sorted({*gang.slurm.excluded, *fact.exclude})),
                    fact.admit,
                )
                gang.slurm.exclusions |= {
                    node: Exclusion(_why_excluded(state, gang, node, fact), at) for node in fact.exclude
                }
                gang.slurm.runs_without_start += gang.phase in (Phase.SUBMITTED, Phase.REQUEUED, Phase.GATHERING)
            elif fact.verb == "admit":
                gang = state.gangs[fact.gang]
                gang.slurm.admitted += fact.admit
            elif fact.verb in ("drain", "down") and not fact.requested_by:
                _count_taken_out(state, fact, at)
        case facts.SlurmCallSettled():
            call = state.owed.pop(fact.call, None)
            if call is not None and not fact.error and call.node in state.nodes:
                _note_carried_out(state.nodes[call.node], call, at)
        case facts.ActionWithheld():
            pass  # no call was made
        case facts.GangRegistered():
            _register(state, fact, at)
        case facts.GangForgotten():
            state.gangs.pop(fact.gang, None)
        case facts.NodeChecked():
            _note_check(state, fact, at)
        case _:
            _apply_gang(state.gangs[fact.gang], fact, at)
    _count_record(state, fact, at)


def _note_carried_out(node: Node, call: facts.SlurmCallOwed, at: float) -> None:
    """Slurm has carried out a call that concerns the node."""
    if call.verb in ("drain", "down"):
        node.drained_as = call.text if call.resumable else ""
    elif call.verb == "resume":
        node.drained_as, node.resumed_at = "", at


def _note_check(state: DurableState, fact: facts.NodeChecked, at: float) -> None:
    if fact.request:
        _node(state, fact.node).check_request = fact.request
    else:
        state.gangs[fact.gang].roster.members[fact.node].check = fact.check
    if (node := state.nodes.get(fact.node)) is not None:  # agents add no nodes to the state
        node.check, node.checked_in_job, node.checked_at = fact.check, fact.job, at


def _count_record(state: DurableState, fact: facts.Fact, at: float) -> None:
    """Count the record of `fact` for its gang and for the gang's owner. Registrations have budgets of their own, and a
    change of the network is nobody's deed."""
    gang = state.gangs.get(getattr(fact, "gang", ""))
    if isinstance(fact, facts.GangRegistered):
        kept = {uid: use for uid, use in state.journal_use.items() if use.counted_at(at) >= FORGOTTEN_BYTES}
        state.journal_use = kept
    elif gang is not None and not (isinstance(fact, facts.FabricNoted) and fact.changes):
        size = counted_bytes(fact, gang.slurm.most_nodes)
        gang.account.journal_use.add(size, at)
        state.journal_use.setdefault(gang.account.owner_uid, JournalUse()).add(size, at)


def _count_taken_out(state: DurableState, fact: facts.SlurmCallOwed, at: float) -> None:
    """Count the node against the limits: those of the job's owner if only agents have reported about it, else those of
    the site."""
    reported = {node: drain for node, drain in state.reported_drains.items() if at - drain.at < COUNTED_OUT_S}
    reported.pop(fact.node, None)
    state.reported_drains = reported
    if fact.if_run_has_node is not None:
        reported[fact.node] = ReportedDrain(fact.gang, state.gangs[fact.gang].account.owner_uid, at)
        return
    recent = {node: when for node, when in state.taken_out_at.items() if at - when < LIMIT_WINDOW_S}
    state.taken_out_at = {**recent, fact.node: at}


def _count_failure(state: DurableState, node: str, at: float) -> None:
    recent = {
        name: tuple(when for when in times if at - when < FAILURES_KEPT_S) for name, times in state.failed_at.items()
    }
    recent[node] = (*recent.get(node, ()), at)[-FAILURES_KEPT:]
    state.failed_at = {name: times for name, times in recent.items() if times}


def _why_excluded(state: DurableState, gang: Gang, node: str, requeue: facts.SlurmCallOwed) -> str:
    """Why the job is requeued without the node: why its member left, what is known of the node, or why the requeue."""
    member, known = gang.roster.members.get(node), state.node(node)
    if member is not None and member.removed:
        return member.removal_reason
    return known.reason if known.health in OUT_OF_SERVICE else requeue.text.removeprefix("muster: ")


def _register(state: DurableState, fact: facts.GangRegistered, at: float) -> None:
    new, known = _registered(fact, at), state.gangs.get(fact.gang)
    if known is None:
        state.gangs[fact.gang] = new
    elif known.spec.awaits_launch:  # the script has launched, and its first agent has brought the whole spec
        known.spec = new.spec
        known.account.shown_spec, known.account.spec_chars = new.account.shown_spec, new.account.spec_chars


def _registered(fact: facts.GangRegistered, at: float) -> Gang:
    shown = _SHOWN_SPEC.dump_json(_SHOWN_SPEC.validate_json(fact.spec_json or "{}"), exclude_defaults=True).decode()
    account = Account(fact.owner_uid, fact.name, shown, at, spec_chars=len(fact.spec_json))
    gang = Gang(fact.gang, fact.spec, account, SlurmJob(fact.job), phase_at=at)
    if path := fact.spec.resume_from:
        # Another gang has counted its generations. Whatever this one keeps is newer.
        name = parse_path(path)
        gang.checkpoint.durable_path = path
        gang.checkpoint.durable_version = Version(0, name.step if name is not None else 0)
    return gang


def _node(state: DurableState, name: str) -> Node:
    return state.nodes.setdefault(name, Node(name))


def _apply_node(state: DurableState, fact: facts.NodeRegistered | facts.NodeJudged, at: float) -> None:
    node = _node(state, fact.node)
    if isinstance(fact, facts.NodeRegistered):
        node.boot_id, node.probe_address, node.addresses = fact.boot_id, fact.probe_address, fact.addresses
        node.registered_at = node.registered_at or at
    else:
        if node.health in OUT_OF_SERVICE and fact.health is NodeHealth.FIT:
            node.repaired_at = at
        node.health = check_node_transition(node.health, fact.health)
        if fact.health not in OUT_OF_SERVICE:
            node.drained_as, node.failed_again = "", False
        elif node.resumed_at and at - node.resumed_at < RESUME_TRIAL_S:
            node.failed_again = True
        node.reason, node.judged_at, node.response = fact.reason, at, fact.response
        node.program_error = fact.program_error
        if fact.health is NodeHealth.DEGRADED:
            node.precursors[fact.signal] = Precursor(fact.reason, fact.response)
            _show_strongest_precursor(node)
        else:
            node.precursors = {}
        if fact.health in OUT_OF_SERVICE:
            state.correlated_faults.pop(fact.node, None)


def _end_precursor(node: Node, signal: str) -> None:
    node.precursors.pop(signal, None)
    if node.precursors:
        _show_strongest_precursor(node)


def _show_strongest_precursor(node: Node) -> None:
    """Of equally strong ones the oldest."""
    strongest = max(node.precursors.values(), key=lambda precursor: precursor.response.strength)
    node.reason, node.response = strongest.reason, strongest.response


def _apply_gang(gang: Gang, fact: facts.Fact, at: float) -> None:
    if isinstance(fact, facts.PhaseChanged | facts.GenerationFenced | facts.GangEnded):
        gang.newest.progress = fact.progress or gang.newest.progress
    match fact:
        case facts.MemberJoined():
            _add_member(gang, fact)
        case facts.FabricNoted():
            _note_fabric(gang, fact.fabric)
            gang.roster.wider_groups = fact.wider_groups if fact.changes else gang.roster.wider_groups
        case facts.NewcomerKnown():
            gang.roster.members[fact.node].newcomer = False
        case facts.MemberRemoved():
            _remove_member(gang, fact, at)
        case facts.PhaseChanged():
            _enter_phase(gang, fact.phase, at)
            if fact.phase is Phase.RUNNING and (recovery := _recovery_to(gang, gang.newest.generation)) is not None:
                recovery.running_at = recovery.running_at or at
            gang.reason, gang.plans.phase_after_drain = fact.reason, fact.next_phase
            gang.order_serial += fact.phase is Phase.REQUEUED  # the agents are told to leave
            gang.slurm.runs_given_back += fact.given_back
        case facts.GangShrunk():
            _shrink(gang, fact.nodes)
        case facts.GenerationFenced():
            _fence_generation(gang, fact, at)
        case facts.HangDetected():
            gang.findings.hang = Hang(fact.reason, fact.suspected_at, fact.node, at)
            gang.order_serial += 1
        case facts.StragglerDetected():
            _note_straggler(gang.findings, fact, at)
        case facts.ReplicasDisagreed():
            _note_disagreement(gang.findings, fact.version, fact.node, fact.reason, fact.comparison_ends)
            gang.order_serial += fact.comparison_ends
        case facts.NotFiniteReported():
            gang.findings.not_finite = f"{fact.words} at step {fact.step}, on rank {fact.rank} ({fact.node})"
        case facts.LossNoted():
            gang.findings.losses_noted += 1
            gang.findings.last_loss = loss_words(fact)
        case facts.RolledBack():
            _roll_back(gang, fact)
        case facts.LaunchUnsupervised():
            gang.findings.unsupervised = fact.words
        case facts.CorruptCopyFound():
            gang.findings.corrupt_copies = (*gang.findings.corrupt_copies, fact)
        case facts.StateRestored():
            gang.restore.restored_generation = fact.generation
            if (recovery := _recovery_to(gang, fact.generation)) is not None and not recovery.first_step_at:
                recovery.restored_at = at
        case facts.StoreMoved():
            gang.recovery.next_store_node, gang.recovery.store_at = fact.store_node, at
            gang.recovery.stores_missed += fact.missed
            gang.order_serial += 1
        case facts.GenerationStarted():
            _start_generation(gang, fact, at)
        case facts.FirstStep():
            gang.newest.stepped_generation = fact.generation
            gang.newest.progress = replace(gang.newest.progress, step=Version(fact.generation, fact.step))
            if fact.observed_live:
                gang.newest.first_step_s = max(gang.newest.first_step_s, at - gang.newest.started_at)
            if (recovery := _recovery_to(gang, fact.generation)) is not None:
                recovery.first_step_at = at
        case facts.FlushOrdered():
            gang.checkpoint.flush = Flush(fact.serial, fact.version, fact.sources, fact.reason, at)
            gang.order_serial += 1
        case facts.FlushEnded():
            _end_flush(gang.checkpoint, fact)
        case facts.GangEnded():
            _enter_phase(gang, fact.phase, at)
            gang.exit_code, gang.reason = fact.exit_code, fact.reason
            gang.order_serial += 1
        case facts.StopPlanned():
            gang.plans.stop = Stop(fact.reason, fact.next_phase, at)
            gang.order_serial += 1
        case facts.SwapPlanned():
            gang.plans.swap = Swap(fact.node, fact.reason, at, fact.requested_by, fact.gives_way_to)
            gang.growth.last_growth_at = at if fact.gives_way_to else gang.growth.last_growth_at
            gang.order_serial += 1
        case facts.GrowthPlanned():
            gang.plans.swap, gang.growth.last_growth_at = Swap("", fact.reason, at, nodes=fact.nodes), at
            gang.order_serial += 1
        case facts.JobRestarted():
            _restart_job(gang, fact)
        case facts.JobChanged():
            gang.slurm.job_nodes = fact.nodes
            gang.slurm.most_nodes = max(gang.slurm.most_nodes, len(fact.nodes))
        case facts.JobEnded():
            gang.slurm.job_over = True
        case facts.PoolNodeRequested() | facts.PoolJobQueued() | facts.PoolRequestClosed():
            _apply_pool_request(gang, fact, at)


def _note_straggler(findings: Findings, fact: facts.StragglerDetected, at: float) -> None:
    others = [known for known in findings.stragglers if (known.generation, known.rank) != (fact.generation, fact.rank)]
    straggler = Straggler(fact.generation, fact.rank, fact.node, fact.reason, fact.response, at)
    findings.stragglers = (*others[1 - STRAGGLERS_KEPT :], straggler)


def _recovery_to(gang: Gang, generation: int) -> Recovery | None:
    """The recovery that has led to `generation`; None: there was none, or it is not known any more."""
    last = gang.recovery.last
    return last if last is not None and last.generation == generation else None


def _enter_phase(gang: Gang, to: Phase, at: float) -> None:
    if to != gang.phase:
        gang.phase = check_gang_transition(gang.phase, to)
        gang.phase_at = at


def _add_member(gang: Gang, fact: facts.MemberJoined) -> None:
    before = gang.roster.members.get(fact.node)
    stays = before is not None and not before.removed and before.job == fact.job  # only its agent was started again
    gang.roster.members[fact.node] = Member(
        fact.node,
        fact.job,
        fact.incarnation,
        fact.peer_address,
        fact.batch_host,
        fact.leaf,
        nvlink_domain=fact.nvlink_domain,
        adapter_bandwidth=fact.adapter_bandwidth,
        newcomer=before.newcomer if before is not None and stays else len(gang.roster.seats) == 1,
    )
    for request in gang.growth.pool.values():
        if request.job == fact.job:
            request.node = fact.node
            gang.roster.members[fact.node].returned, gang.growth.requests_in_vain = bool(request.wanted_node), 0
    gang.order_serial += 1


def _note_fabric(gang: Gang, record: FabricRecord) -> None:
    gang.roster.fabric = record
    before = {node: member.leaf for node, member in gang.roster.members.items()}
    for node in gang.roster.members.keys() & record.fabric.nodes:
        gang.roster.members[node].leaf = record.fabric.leaf_name(node)
    # Agents know leaves.
    gang.order_serial += before != {node: member.leaf for node, member in gang.roster.members.items()}


def _remove_member(gang: Gang, fact: facts.MemberRemoved, at: float) -> None:
    member, swap, last = gang.roster.members[fact.node], gang.plans.swap, gang.recovery.last
    earlier = member.removed and (last is None or fact.node not in last.nodes_out)
    if not member.removed:
        ended = fact.left_job or fact.reason == member.agent_ended_reason
        member.removed_at, member.fell_silent = at, not fact.alive and not ended
        member.program_error = fact.program_error
    member.removal_reason, member.alive = fact.reason, fact.alive
    gives_way = fact.requested and swap is not None and bool(swap.gives_way_to) and swap.node == fact.node
    member.gave_way |= fact.surplus or gives_way
    gang.order_serial += 1
    _note_cause_of_crashes(gang.recovery, gang.roster, fact)
    # A member that was removed before this recovery is not one that it waits for.
    if last is not None and gang.phase is Phase.RECOVERING and not earlier:
        _note_node_out(gang.recovery, last, fact, at)


def _note_cause_of_crashes(recovery: RecoveryState, roster: Roster, fact: facts.MemberRemoved) -> None:
    if not fact.attributed:
        recovery.unattributed_node = "" if any(one.hung for one in recovery.recoveries[-2:]) else fact.node
        left = (seat.group_rank for seat in roster.seats if seat.node == fact.node)
        recovery.group_ranks_swapped_once += tuple(left)
    elif recovery.unattributed_node == fact.node:
        recovery.unattributed_node = ""


def _note_node_out(so_far: RecoveryState, recovery: Recovery, fact: facts.MemberRemoved, at: float) -> None:
    """The member is removed in this recovery, the last one."""
    if fact.node not in recovery.nodes_out:  # a member that was removed alive may die later
        recovery.nodes_out.append(fact.node)
        recovery.nodes_requested += [fact.node] * fact.requested
        recovery.nodes_undone += [fact.node] * bool(fact.undoes_growth)
        recovery.seats_undone += [fact.node] * (fact.undoes_growth == "fewer seats")
    if not recovery.hardware and fact.attributed and not fact.requested and not fact.undoes_growth:
        # The rank failed because of its node, so the failure does not count against the software.
        recovery.hardware, recovery.cause, recovery.detected_at = True, fact.reason, at
        so_far.failures_in_a_row = max(0, so_far.failures_in_a_row - 1)


def _apply_pool_request(
    gang: Gang, fact: facts.PoolNodeRequested | facts.PoolJobQueued | facts.PoolRequestClosed, at: float
) -> None:
    match fact:
        case facts.PoolNodeRequested():
            gang.growth.pool[fact.serial] = PoolRequest(
                fact.serial, fact.requesting_node, fact.options, wanted_node=fact.wanted_node, until=fact.until
            )
            gang.growth.pool_serial, gang.growth.pool_requested_at = fact.serial, gang.growth.pool_requested_at or at
            gang.growth.last_request_at = at
            if fact.wanted_node:
                gang.roster.members[fact.wanted_node].asked_for_at = at
            gang.order_serial += 1
        case facts.PoolJobQueued():
            gang.growth.pool[fact.serial].job = fact.job
        case facts.PoolRequestClosed():
            request = gang.growth.pool.pop(fact.serial)
            gang.growth.pool_refused = fact.reason if fact.refused else gang.growth.pool_refused
            gang.growth.requests_in_vain += bool(request.until) and not request.node
            member = gang.roster.members.get(request.node)
            if member is not None and member.job == request.job:
                member.released = True
            gang.order_serial += 1


def _fence_generation(gang: Gang, fact: facts.GenerationFenced, at: float) -> None:
    gang.recovery.fenced_generation = fact.generation
    gang.recovery.next_store_node, gang.recovery.stores_missed = fact.store_node, 0
    # The cause may add what the stacks show.
    hung, gang.findings.hang = gang.findings.hang is not None and fact.cause.startswith(gang.findings.hang.reason), None
    coming = any(not request.node for request in gang.growth.pool.values())  # it was requested beforehand
    gang.growth.pool_requested_at, gang.growth.pool_refused = at if coming else 0.0, ""
    gang.order_serial += 1
    if gang.phase is Phase.GATHERING:
        _enter_phase(gang, Phase.PREFLIGHT, at)
    else:
        _enter_phase(gang, Phase.RECOVERING, at)
        if not fact.hardware:
            _count_failure_of_software(gang.recovery, gang.newest, fact.step_before, at)
        gang.recovery.furthest_step = max(gang.recovery.furthest_step, fact.step_before)
        recovery = Recovery(fact.generation + 1, fact.cause, fact.hardware, step_before=fact.step_before)
        recovery.crashed_on, recovery.hung = fact.crashed_on, hung
        recovery.suspected_at, recovery.detected_at = fact.suspected_at, at
        gang.recovery.recoveries = [*gang.recovery.recoveries[1 - RECOVERIES_KEPT :], recovery]


def _count_failure_of_software(recovery: RecoveryState, newest: NewestGeneration, step: int, at: float) -> None:
    if step > recovery.furthest_step or _ran_long(newest, at):
        recovery.failures_in_a_row = 1  # it came further
    else:
        recovery.failures_in_a_row += 1
        recovery.unattributed_node = ""  # ranks crash elsewhere, too: the node was not the cause


def _shrink(gang: Gang, nodes: int) -> None:
    spec = gang.spec
    spares = spec.spares + spec.nodes - nodes
    gang.spec = replace(spec, nodes=nodes, spares=spares, min_nodes=min(spec.min_nodes, nodes))


def _ran_long(newest: NewestGeneration, at: float) -> bool:
    """The script never declares a step, and the generation ran for long. Nothing else tells whether it made
    progress."""
    return newest.stepped_generation == 0 and at - newest.started_at >= LONG_RUN_S


def _start_generation(gang: Gang, fact: facts.GenerationStarted, at: float) -> None:
    before = {seat.node for seat in gang.roster.seats}
    _enter_phase(gang, Phase.STARTING, at)
    gang.newest.generation, gang.newest.started_at, gang.slurm.runs_without_start = fact.generation, at, 0
    gang.plans.swap = None
    gang.findings.not_finite, gang.slurm.runs_given_back, gang.findings.losses_noted = "", 0, 0
    gang.roster.wider_groups, gang.roster.extra_communication_s = fact.wider_groups, fact.extra_communication_s
    gang.roster.seats, gang.roster.spares = fact.seats, fact.spares
    for member in gang.roster.members.values():
        member.newcomer = False  # the order that starts the ranks lists it
    if gang.ranks != gang.ranks_of(Version(fact.generation, 0)):
        gang.checkpoint.rank_counts[fact.generation] = gang.ranks
    gang.newest.current_store_node, gang.newest.current_store_port = fact.master_node, fact.master_port
    gang.restore.restored_version, gang.restore.restore_sources = fact.version, fact.sources
    gang.restore.other_sources = fact.other_sources
    gang.restore.protection_groups = fact.protection_groups
    gang.restore.resharded = fact.resharded
    gang.newest.agreed_groups = fact.agreed_groups
    gang.newest.mtbf_s = fact.mtbf_s
    _skip_batches(gang, fact)
    if fact.version is not None and fact.warning:
        _note_disagreement(gang.findings, fact.version, "", f"step {fact.version.step} is restored: {fact.warning}")
    # A start from memory does not change it.
    gang.checkpoint.durable_path = fact.durable_path or gang.checkpoint.durable_path
    gang.order_serial += 1
    if (recovery := gang.recovery.last) is not None and recovery.generation == fact.generation:
        recovery.action, recovery.fenced_at, recovery.started_at = fact.action, fact.fenced_at, at
        origin = fact.version or (gang.checkpoint.durable_version if fact.durable_path else None)
        recovery.step_restored = origin.step if origin else 0
        recovery.nodes_in = sorted({seat.node for seat in fact.seats} - before)
        recovery.crashed_on = recovery.crashed_on if fact.crashed_on is None else fact.crashed_on


def _note_disagreement(
    findings: Findings, version: Version, node: str, reason: str, comparison_ends: bool = False
) -> None:
    count = 1 + (findings.disagreement.count if findings.disagreement is not None else 0)
    findings.disagreement = Disagreement(version, node, reason, comparison_ends, count)


def _skip_batches(gang: Gang, fact: facts.GenerationStarted) -> None:
    restore, origin = gang.restore, fact.version or gang.checkpoint.durable_version or Version(0, 0)
    ahead = restore.skipped_before(origin.generation) + max(0, fact.skip_to_step - origin.step)
    restore.skip_to_step = fact.skip_to_step
    if ahead != restore.skipped_before(fact.generation):
        restore.skipped[fact.generation] = ahead


def _roll_back(gang: Gang, fact: facts.RolledBack) -> None:
    checkpoint = gang.checkpoint
    known = next((one for one in checkpoint.earlier_durable if one.path == fact.path), None)
    if known is not None:
        _note_earlier_durable(checkpoint)
        checkpoint.earlier_durable = tuple(one for one in checkpoint.earlier_durable if one.path != fact.path)
        checkpoint.durable_path, checkpoint.durable_version, checkpoint.durable_at = known.path, known.version, known.at
    gang.restore.roll_backs = (*gang.restore.roll_backs[1 - ROLL_BACKS_KEPT :], fact)


def _end_flush(checkpoint: Checkpoint, fact: facts.FlushEnded) -> None:
    flush = checkpoint.flush
    if flush is None or flush.serial != fact.serial:
        return
    flush.path, flush.error = fact.path, fact.error
    if fact.path:
        _note_earlier_durable(checkpoint)
        checkpoint.durable_path, checkpoint.durable_version = fact.path, fact.version or flush.version
        checkpoint.durable_at = flush.asked_at
    elif fact.version is not None:
        _add_earlier(checkpoint, DurableCheckpoint(fact.path, fact.version, flush.asked_at))


def _note_earlier_durable(checkpoint: Checkpoint) -> None:
    if checkpoint.durable_path and checkpoint.durable_version is not None:
        before = DurableCheckpoint(checkpoint.durable_path, checkpoint.durable_version, checkpoint.durable_at)
        _add_earlier(checkpoint, before)


def _add_earlier(checkpoint: Checkpoint, one: DurableCheckpoint) -> None:
    checkpoint.earlier_durable = (*checkpoint.earlier_durable[1 - DURABLE_KNOWN :], one)


def _restart_job(gang: Gang, fact: facts.JobRestarted) -> None:
    gang.slurm.job, gang.slurm.restart_count = fact.job, fact.restart_count
    gang.roster.members, gang.roster.seats, gang.roster.spares, gang.restore.restore_sources = {}, (), (), ()
    gang.restore.other_sources, gang.findings.corrupt_copies, gang.restore.protection_groups = (), (), ()
    gang.slurm.job_nodes = ()
    gang.restore.restored_version = gang.plans.stop = gang.plans.swap = gang.findings.hang = None
    gang.recovery.unattributed_node, gang.recovery.group_ranks_swapped_once = "", ()
    gang.findings.stragglers, gang.findings.disagreement, gang.findings.not_finite = (), None, ""
    gang.findings.last_loss = gang.findings.unsupervised = ""
    gang.recovery.furthest_step = 0  # the new run may start from an old checkpoint
    gang.recovery.fenced_generation = -1
    gang.order_serial += 1
