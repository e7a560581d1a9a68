"""Bugs in the detection of failures: probes, witnesses, hangs, outages, attribution and the circuit breaker."""

from muster.simulator.planted_bugs.planting import PlantedBug

DETECTION_BUGS: dict[str, PlantedBug] = {
    "start-before-self-fencing": PlantedBug(
        "A generation starts before the ranks of a silent node have been killed by self-fencing.",
        function="ranks_ended_at",
        code="A + SELF_FENCE_AFTER_S + KILL_MARGIN_S",
        bug="A",
    ),
    "forget-failed-checks": PlantedBug(
        "Ranks start on a node that has failed its node check while a spare that passed waits.",
        function="_count_check",
        code="member is not None and A",
        bug="False",
    ),
    "leave-out-nodes-that-passed": PlantedBug(
        "A node leaves its gang for a check that another node has failed.",
        function="leave_out_failed",
        code="check_failed - A",
        bug="gang_turn.index.present - A",
    ),
    "trust-one-witness": PlantedBug(
        "Only the coordinator's own probe counts.",
        function="probe_result.evaluate",
        code="A != MUSTERD",
        bug='A == "agent"',
    ),
    "ignore-an-answer": PlantedBug(
        "A node that answers one witness is lost because another witness hears nothing.",
        function="probe_result.evaluate",
        code="any(A is None for A in B)",
        bug="probe.complete and all(A is None for A in B)",
    ),
    "ignore-progress": PlantedBug(
        "A node is called lost while its gang makes progress.",
        function="probe_result.evaluate",
        code="moved_at > A",
        bug="moved_at > A + 1000.0",
    ),
    "trust-the-coordinator-alone": PlantedBug(
        "A node is called lost or hung without a quorum: no other agent could be asked about it.",
        function="_witnessed",
        code="asked >= min(2, A) > 0",
        bug="asked >= 0",
    ),
    "name-a-node-of-the-majority": PlantedBug(
        "A node whose replicas agree with most others is named for corrupted data.",
        function="detect_corruption",
        code="nodes[0]",
        bug='min(gang_turn.index.present - set(nodes), default="")',
    ),
    "hung-at-once": PlantedBug(
        "A node whose processes stop for a moment is called hung.",
        function="failure_detector._hangs",
        code="HUNG_AFTER_S",
        bug="0.0",
    ),
    "ignore-the-step-time": PlantedBug(
        "A node is called hung or is replaced in the middle of a step, although its ranks train on.",
        function="step_may_be_under_way",
        code="2 * A + REPORT_DELAY_S",
        bug="0.0",
    ),
    "forget-a-declared-phase": PlantedBug(
        "A node that is cut off from the coordinator is replaced while its gang is in a declared phase.",
        function="silent_agent_timeout_s",
        code="return inf",
        bug="return OUT_OF_TOUCH_S",
    ),
    "ignore-a-correlated-fault": PlantedBug(
        "A node is called unfit for a signal that the loss of a peer explains, because finding the loss takes long.",
        function="resolve_unexplained",
        code="not _peer_may_be_lost(A, B)",
        bug="True",
    ),
    "blame-nodes-for-storage": PlantedBug(
        "Nodes are called unfit although ranks can't be killed on any node.",
        function="many_stuck",
        code="len(found) > A",
        bug="len(found) > 100 * A",
    ),
    "evict-many-nodes": PlantedBug(
        "Many silent nodes are evicted at once.",
        function="chance_limit",
        code="max(2, A)",
        bug="max(200, A)",
    ),
    "count-one-gang-only": PlantedBug(
        "Many silent nodes are evicted at once if no single gang has many of them.",
        function="many_silent",
        code="_others_silent(A, B, C)",
        bug="False",
    ),
    "blame-a-late-order": PlantedBug(
        "A node is called unfit although it had no order to obey.",
        function="_kill_timeout_at",
        code="max(_phase_observed_since(A), B, C)",
        bug="_phase_observed_since(A)",
    ),
    "ignore-the-circuit-breaker": PlantedBug(
        "Node after node is taken out of service.",
        function="reason_to_withhold",
        code="taken >= A",
        bug="taken >= 100 + A",
    ),
    "recover-without-end": PlantedBug(
        "A gang that has used up its part of the journal is recovered again and again.",
        function="too_many_records",
        code="of_job > journal_mib_per_job",
        bug="False",
    ),
    "degraded-for-ever": PlantedBug(
        "A node stays DEGRADED after its precursor has ended.",
        function="hardware_signals._end_precursor",
        code="signal not in A",
        bug="event.signal in A",
    ),
    "act-in-observe-mode": PlantedBug(
        "Nodes are drained in observe mode.",
        function="reason_to_withhold",
        code="observe",
        bug="False",
    ),
    "blame-after-one-crash": PlantedBug(
        "A node is blamed as soon as one rank has crashed on it.",
        function="node_to_swap",
        code="node = find_crashed_node(A)",
        bug=(
            "node = find_crashed_node(A)\n"
            "if not last.hardware and any(one.node == node for one in A.usable()):\n"
            "    return node"
        ),
    ),
    "blame-the-first-report": PlantedBug(
        "The node whose crash was reported first is blamed, although its rank died of a peer's reset.",
        function="find_crashed_node",
        code="hung or not A",
        bug="True",
    ),
    "name-whoever-attaches-first": PlantedBug(
        "Of ranks that failed while nobody coordinated, the one whose agent attaches first is named.",
        function="may_have_failed_earlier_elsewhere",
        code="unseen and A",
        bug="False",
    ),
    "call-a-phase-a-hang": PlantedBug(
        "Ranks in a declared phase count as hung.",
        function="_may_stall",
        code="known and A and not in_declared_phase",
        bug="known and A",
    ),
    "hang-without-an-answer": PlantedBug(
        "A generation counts as hung although one agent has not answered.",
        function="_all_have_answered",
        code="unanswered or A",
        bug="False",
    ),
    "hang-too-soon": PlantedBug(
        "A generation counts as hung after two seconds without a step.",
        function="detect_hang",
        code="now < due",
        bug="gang_turn.now < min(due, progress_timeouts.last_progress_at(gang_turn) + 2.0)",
    ),
    "name-a-rank-too-soon": PlantedBug(
        "A rank is named after four seconds without a sign of life.",
        function="hang_detector._silent_rank",
        code="silent_s >= SILENT_RANK_S",
        bug="silent_s",
    ),
    "blame-a-second-node-for-a-slow-rank": PlantedBug(
        "A second node is left for a rank that takes its slowness along.",
        function="_record_stragglers",
        code="_slow_before_on(A, B, C)",
        bug='""',
    ),
    "leave-a-node-for-a-moment": PlantedBug(
        "A node is left as soon as a rank on it is a straggler.",
        function="straggler_detector.lasts",
        code="named_s >= A",
        bug="named_s >= 0.0",
    ),
    "hang-after-any-idleness": PlantedBug(
        "A generation hangs once its ranks have been idle for a quarter of the time that their job allows.",
        function="_idle_for_long",
        code="A >= allowed",
        bug="A > 0",
    ),
    "never-find-a-hang": PlantedBug(
        "A generation that hangs after its first step is left alone.",
        function="_may_stall",
        code="known and A and B",
        bug="known and not progress_timeouts.has_finished_step(gang_turn) and A and B",
    ),
}
