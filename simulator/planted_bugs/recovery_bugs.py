"""Bugs in recovery: fencing, restore plans, gathering, flushes, planned stops and the shared pool."""

from muster.simulator.planted_bugs.planting import PlantedBug

_ROOM = "muster.daemon.coordinator.core.recovery"

RECOVERY_BUGS: dict[str, PlantedBug] = {
    "skip-the-fence": PlantedBug(
        "A generation starts although some nodes have not fenced the one before.",
        module=f"{_ROOM}.transitions",
        code=(
            "    if not all(failure_detector.ranks_ended("
            "gang_turn, gang.members[node]) for node in gang_turn.index.unfenced):"
        ),
        bug="    if gang_turn.index.present and gang_turn.index.unfenced >= gang_turn.index.present:",
    ),
    "plan-a-stop-for-ever": PlantedBug(
        "A planned stop is planned again in every round of the rules.",
        module=f"{_ROOM}.planned_stop",
        code="    if gang.stop is not None or gang.phase not in ACTIVE",
        bug="    if gang.phase not in ACTIVE",
    ),
    "restore-without-a-shard": PlantedBug(
        "A version is restored although one rank's shard is lost.",
        module=f"{_ROOM}.restore_plan",
        code="have.issuperset(range(ranks_of(v)))]",
        bug="have.issuperset(range(ranks_of(v) - 1))]",
    ),
    "shrink-without-a-shard": PlantedBug(
        "A sharded gang goes on with fewer ranks although a part of its state is lost.",
        module=f"{_ROOM}.restore_plan",
        code="    return written if is_resharded(gang_turn, count, version) else min(count, written)",
        bug="    return min(count, written)",
    ),
    "forget-the-replica": PlantedBug(
        "The state of a lost node counts as lost although its buddy holds the replica.",
        module=f"{_ROOM}.restore_plan",
        code="        for shard in shards:\n            ranks.setdefault(",
        bug="        for shard in (s for s in shards if s.primary):\n            ranks.setdefault(",
    ),
    "forget-the-parity": PlantedBug(
        "A shard counts as lost although it can be rebuilt from a parity.",
        module=f"{_ROOM}.transitions",
        code="newest_left(gang_turn, ranks_needed, with_rebuilt)",
        bug="newest_left(gang_turn, ranks_needed)",
    ),
    "stop-without-the-parity": PlantedBug(
        "A job that ends because a node is lost does not write what could be rebuilt.",
        module=f"{_ROOM}.flushing",
        code="gang.ranks_of, restore_plan.with_rebuilt(gang_turn)[0])\n    return",
        bug="gang.ranks_of)\n    return",
    ),
    "name-one-part-of-a-parity": PlantedBug(
        "The plan names one of the nodes that hold a parity, from which nothing can be rebuilt.",
        module=f"{_ROOM}.transitions",
        code="(*others, *(one for one in parities if not one.digest)), warning",
        bug="others, warning",
    ),
    "restore-what-replicas-disagree-on": PlantedBug(
        "A version on which replicas disagree is restored before a durable checkpoint, or without a warning.",
        module=f"{_ROOM}.restore_plan",
        code="    agreed = gang.agreed_groups if ",
        bug="    agreed = () if ",
    ),
    "mix-versions": PlantedBug(
        "Ranks restore their state from different steps.",
        module=f"{_ROOM}.restore_plan",
        code="            if shard.version != version or",
        bug="            if shard.version > version or",
    ),
    "stop-without-saving": PlantedBug(
        "A gang loses its last steps in a planned stop.",
        module=f"{_ROOM}.completion",
        code="    kept = gang.phase in (Phase.RUNNING, Phase.RECOVERING)",
        bug="    kept = False",
    ),
    "leave-without-a-spare": PlantedBug(
        "Ranks are asked to leave a node although no spare is ready.",
        module=f"{_ROOM}.planned_swap",
        code="    return wanted[: max(0, free_spares(gang_turn))] if wanted else []",
        bug="    return wanted",
    ),
    "blame-a-node-that-is-left-on-request": PlantedBug(
        "A node that a user wants to be left is taken out of service and drained.",
        module=f"{_ROOM}.planned_swap",
        code="        if concern.cause is _Cause.PRECURSOR:",
        bug="        if concern.cause is not _Cause.STRAGGLER:",
    ),
    "drain-for-ever": PlantedBug(
        "A drain that an operator requested stays in force after the node was resumed.",
        module=f"{_ROOM}.requests.requested_drain",
        code="    if seen.in_service and turn",
        bug="    if seen.down and turn",
    ),
    "resume-whatever-a-check-finds": PlantedBug(
        "A node is resumed although it has failed its check.",
        module=f"{_ROOM}.resuming",
        code="    if _has_passed(reported.check):",
        bug="    if True:",
    ),
    "resume-over-another-reason": PlantedBug(
        "A node is resumed although somebody has changed the reason of its drain.",
        module="muster.daemon.coordinator.slurm.owed_calls",
        code="    if not drain_reason.is_same(found.reason, call.text):",
        bug="    if not found.reason:",
    ),
    "leave-on-one-signal-for-ever": PlantedBug(
        "The ranks of each generation after a planned swap are asked to leave again.",
        module="muster.daemon.coordinator.core.state.state_updates",
        code="    gang.swap = None\n",
        bug="",
    ),
    "take-a-planned-swap-for-the-end": PlantedBug(
        "The job counts as done when its ranks have exited for a planned swap.",
        module=f"{_ROOM}.transitions",
        code="    if whole and gang.swap is not None and gang.stop is None and",
        bug="    if whole and gang.swap is not None and gang.stop is not None and",
    ),
    "empty-the-pool": PlantedBug(
        "A gang takes more nodes of the shared pool than its job may.",
        module=f"{_ROOM}.shared_pool",
        code="    room = gang.spec.pool_nodes - len(_pool_members(gang))\n    if room < missing",
        bug="    room = missing\n    if room < missing",
    ),
    "grow-from-nothing": PlantedBug(
        "A gang that grows wants shards of ranks that did not exist, and so loses all its steps.",
        module=f"{_ROOM}.restore_plan",
        code="    return written if is_resharded(gang_turn, count, version) else min(count, written)",
        bug="    return written if is_resharded(gang_turn, count, version) else count",
    ),
    "stay-small": PlantedBug(
        "A gang trains on with fewer ranks although a spare is ready.",
        module=f"{_ROOM}.planned_growth",
        code="    if len(after) <= len(before) or",
        bug="    if len(after) >= len(before) or",
    ),
    "keep-a-node-that-crashes-its-ranks": PlantedBug(
        "A gang that has grown onto a broken node fails, and does not go back to the nodes that it had before.",
        module=f"{_ROOM}.growth.undone_growth",
        code="    return _unproven_growth(gang)\n",
        bug="    return None\n",
    ),
    "undo-a-growth-that-was-not-the-last-change": PlantedBug(
        "A gang leaves nodes that it has had for long, because ranks crash after some other node has come.",
        module=f"{_ROOM}.growth.undone_growth",
        code="        if started.action in (GROWTH, GIVES_WAY):",
        bug="        if started.nodes_in:",
    ),
    "give-way-to-a-repaired-node-without-need": PlantedBug(
        "A node of the job's own is left for a repaired one, and the node of the shared pool stays.",
        module=f"{_ROOM}.planned_growth",
        code="for seat in gang.seats if gang.is_of_pool(gang.members[seat.node])]",
        bug="for seat in gang.seats]",
    ),
    "flush-half": PlantedBug(
        "A durable checkpoint counts as soon as one node has written its part.",
        module=f"{_ROOM}.flushing",
        code="    elif not index.flush_pending:",
        bug="    elif index.flush_pending < index.flush_writers:",
    ),
    "wait-for-a-lost-batch-process": PlantedBug(
        "A gang gathers although no process is left that would start its agents.",
        module=f"{_ROOM}.gathering",
        code="    return gang_turn.now >= lost_at\n",
        bug="    return False\n",
    ),
    "leave-a-held-job-held": PlantedBug(
        "A job that Slurm holds after a failed launch is not released.",
        module=f"{_ROOM}.requeueing",
        code="    if not may or owed or seen.released_at_restarts == seen.job_restarts:\n",
        bug="    if may or owed or seen.released_at_restarts == seen.job_restarts:\n",
    ),
    "give-up-a-live-batch-process": PlantedBug(
        "A batch process that has been silent for a moment is given up.",
        module=f"{_ROOM}.gathering",
        code="    lost_at = max(batch_lost_at, last_attach_at + SPARE_WAIT_S)\n",
        bug="    lost_at = max(heard_at or 0.0, since) + 1.0\n",
    ),
}
