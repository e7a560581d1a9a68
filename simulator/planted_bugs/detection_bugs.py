"""Bugs in the detection of failures: probes, witnesses, hangs, outages, attribution and the circuit breaker."""

from muster.simulator.planted_bugs.planting import PlantedBug

_ROOM = "muster.daemon.coordinator.core.detection"

DETECTION_BUGS: dict[str, PlantedBug] = {
    "start-before-self-fencing": PlantedBug(
        "A generation starts before the ranks of a silent node have been killed by self-fencing.",
        module=f"{_ROOM}.time_fencing",
        code="quiet_at = last_contact_at + SELF_FENCE_AFTER_S + KILL_MARGIN_S",
        bug="quiet_at = last_contact_at",
    ),
    "forget-failed-checks": PlantedBug(
        "Ranks start on a node that has failed its node check while a spare that passed waits.",
        module="muster.daemon.coordinator.core.state.gang_index",
        code="        _put(self.check_failed, node, member is not None and member.failed_check)",
        bug="        _put(self.check_failed, node, False)",
    ),
    "leave-out-nodes-that-passed": PlantedBug(
        "A node leaves its gang for a check that another node has failed.",
        module=f"{_ROOM}.node_checks",
        code="    for node in sorted(index.check_failed - {seat.node for seat in gang.seats}):",
        bug="    for node in sorted(index.present - {seat.node for seat in gang.seats}):",
    ),
    "trust-one-witness": PlantedBug(
        "Only the coordinator's own probe counts.",
        module=f"{_ROOM}.probe_result",
        code="    about_agent = [s for w, s in probe.silence_by_witness.items() if w != MUSTERD]",
        bug='    about_agent = [s for w, s in probe.silence_by_witness.items() if w == "agent"]',
    ),
    "ignore-an-answer": PlantedBug(
        "A node that answers one witness is lost because another witness hears nothing.",
        module=f"{_ROOM}.probe_result",
        code="    if any(s is None for s in about_agent):",
        bug="    if probe.complete and all(s is None for s in about_agent):",
    ),
    "ignore-progress": PlantedBug(
        "A node is called lost while its gang makes progress.",
        module=f"{_ROOM}.probe_result",
        code="    if moved_at > probe.asked_at:",
        bug="    if moved_at > probe.asked_at + 1000.0:",
    ),
    "trust-the-coordinator-alone": PlantedBug(
        "A node is called lost or hung although no other agent could be asked about it.",
        module=f"{_ROOM}.failure_detector",
        code="    if asked >= min(2, others) > 0:\n",
        bug="    if asked >= 0:\n",
    ),
    "name-a-node-of-the-majority": PlantedBug(
        "A node whose replicas agree with most others is named for corrupted data.",
        module=f"{_ROOM}.corruption_detector",
        code="    node = nodes[0] if found.majority and len(nodes) == 1 else",
        bug="    node = gang.seats[0].node if found.majority and len(nodes) == 1 else",
    ),
    "hung-at-once": PlantedBug(
        "A node whose processes stop for a moment is called hung.",
        module=f"{_ROOM}.failure_detector",
        code="\nHUNG_AFTER_S = 4.0\n",
        bug="\nHUNG_AFTER_S = 0.0\n",
    ),
    "ignore-the-step-time": PlantedBug(
        "A node is called hung or is replaced in the middle of a step, although its ranks train on.",
        module=f"{_ROOM}.progress_timeouts",
        code="    return gang_turn.now - moved_at < 2 * step_s + REPORT_DELAY_S and",
        bug="    return gang_turn.now - moved_at < 0.0 and",
    ),
    "forget-a-declared-phase": PlantedBug(
        "A node that is cut off from the coordinator is replaced while its gang is in a declared phase.",
        module=f"{_ROOM}.progress_timeouts",
        code="        return inf  # others",
        bug="        return OUT_OF_TOUCH_S  # others",
    ),
    "ignore-a-correlated-fault": PlantedBug(
        "A node is called unfit for a signal that the loss of a peer explains, because finding the loss takes long.",
        module=f"{_ROOM}.correlated_faults",
        code="    over = [(node, reason) for node, reason in over if not _peer_may_be_lost(turn, node)]\n",
        bug="",
    ),
    "blame-nodes-for-storage": PlantedBug(
        "Nodes are called unfit although ranks can't be killed on any node.",
        module=f"{_ROOM}.outage",
        code="    return len(found) > chance_limit(gang_turn)",
        bug="    return len(found) > 100 * chance_limit(gang_turn)",
    ),
    "evict-many-nodes": PlantedBug(
        "Many silent nodes are evicted at once.",
        module=f"{_ROOM}.outage",
        code="    return max(2, max(",
        bug="    return max(200, max(",
    ),
    "count-one-gang-only": PlantedBug(
        "Many silent nodes are evicted at once if no single gang has many of them.",
        module=f"{_ROOM}.outage",
        code="    return len(found) > most or _others_silent(gang_turn, found, most)",
        bug="    return len(found) > most",
    ),
    "blame-a-late-order": PlantedBug(
        "A node is called unfit although it had no order to obey.",
        module=f"{_ROOM}.failure_detector",
        code="    return max(_phase_observed_since(gang_turn), agent.attached_at, reached_at) + KILL_TIMEOUT_S",
        bug="    return _phase_observed_since(gang_turn) + KILL_TIMEOUT_S",
    ),
    "ignore-the-circuit-breaker": PlantedBug(
        "Node after node is taken out of service.",
        module=f"{_ROOM}.circuit_breaker",
        code="    if taken >= limits.nodes_per_hour:",
        bug="    if taken >= 100 + limits.nodes_per_hour:",
    ),
    "recover-without-end": PlantedBug(
        "A gang that has used up its part of the journal is recovered again and again.",
        module=f"{_ROOM}.circuit_breaker",
        code="    if of_job > limits.journal_mib_per_job:",
        bug="    if of_job > 100 + limits.journal_mib_per_job:",
    ),
    "degraded-for-ever": PlantedBug(
        "A node stays DEGRADED after its precursor has ended.",
        module=f"{_ROOM}.precursors",
        code="    if event.signal not in node.precursors:",
        bug="    if event.signal in node.precursors:",
    ),
    "act-in-observe-mode": PlantedBug(
        "Nodes are drained in observe mode.",
        module=f"{_ROOM}.circuit_breaker",
        code="    if limits.observe:",
        bug="    if limits.observe and turn.changed_node:",
    ),
    "blame-after-one-crash": PlantedBug(
        "A node is blamed as soon as one rank has crashed on it.",
        module=f"{_ROOM}.attribution",
        code=(
            '    if last.hardware or before.hardware or not node or before.crashed_on != node:\n        return ""\n'
            "    if gang.failures_in_a_row < CRASHES_UNTIL_SWAP:"
        ),
        bug="    if last.hardware or not node:",
    ),
    "blame-the-first-report": PlantedBug(
        "The node whose crash was reported first is blamed, although its rank died of a peer's reset.",
        module=f"{_ROOM}.attribution",
        code="    if last.hung or not last.crashed_on:",
        bug="    if last.generation:",
    ),
    "name-whoever-attaches-first": PlantedBug(
        "Of ranks that failed while nobody coordinated, the one whose agent attaches first is named.",
        module=f"{_ROOM}.attribution",
        code="    return unseen and not late",
        bug="    return False and not late",
    ),
    "call-a-phase-a-hang": PlantedBug(
        "Ranks in a declared phase count as hung.",
        module=f"{_ROOM}.hang_detector",
        code="    return known and not index.unattached and not index.in_declared_phase\n",
        bug="    return known and not index.unattached\n",
    ),
    "hang-without-an-answer": PlantedBug(
        "A generation counts as hung although one agent has not answered.",
        module=f"{_ROOM}.hang_detector",
        code="    if stall.unanswered or asked_after:",
        bug="    if stall.unanswered and not stall.asked_at:",
    ),
    "hang-too-soon": PlantedBug(
        "A generation counts as hung after two seconds without a step.",
        module=f"{_ROOM}.hang_detector",
        code="    if gang_turn.now < due:",
        bug="    if gang_turn.now < min(due, progress_timeouts.last_progress_at(gang_turn) + 2.0):",
    ),
    "name-a-rank-too-soon": PlantedBug(
        "A rank is named after four seconds without a sign of life.",
        module=f"{_ROOM}.hang_detector",
        code="if silent_s >= SILENT_RANK_S else None",
        bug="if silent_s else None",
    ),
    "blame-a-second-node-for-a-slow-rank": PlantedBug(
        "A second node is left for a rank that takes its slowness along.",
        module=f"{_ROOM}.stragglers.straggler_detector",
        code="        elsewhere = _slow_before_on(gang, group_rank, node)\n",
        bug='        elsewhere = ""\n',
    ),
    "leave-a-node-for-a-moment": PlantedBug(
        "A node is left as soon as a rank on it is a straggler.",
        module=f"{_ROOM}.stragglers.straggler_detector",
        code="    return named_s >= rule.share * rule.window_s",
        bug="    return named_s >= 0.0",
    ),
    "hang-after-any-idleness": PlantedBug(
        "A generation hangs once its ranks have been idle for a quarter of the time that their job allows.",
        module=f"{_ROOM}.hang_detector",
        code="gang_turn.index.idle_quarters() >= allowed",
        bug="gang_turn.index.idle_quarters() > 0",
    ),
    "never-find-a-hang": PlantedBug(
        "A generation that hangs after its first step is left alone.",
        module=f"{_ROOM}.hang_detector",
        code="    return known and not index.unattached",
        bug="    return known and not progress_timeouts.has_finished_step(gang_turn) and not index.unattached",
    ),
}
