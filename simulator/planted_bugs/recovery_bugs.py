"""Bugs in recovery: fencing, restore plans, gathering, flushes, planned stops and the shared pool."""

from muster.simulator.planted_bugs.planting import PlantedBug

RECOVERY_BUGS: dict[str, PlantedBug] = {
    "skip-the-fence": PlantedBug(
        "A generation starts although some nodes have not fenced the one before.",
        function="recovering.recover",
        code="not all(ranks_ended(A, B) for C in D)",
        bug="gang_turn.index.present and gang_turn.index.present <= D",
    ),
    "plan-a-stop-for-ever": PlantedBug(
        "A planned stop is planned again in every round of the rules.",
        function="plan_stop",
        code="stop is not None or A",
        bug="A",
    ),
    "restore-without-a-shard": PlantedBug(
        "A version is restored although one rank's shard is lost.",
        function="_complete_versions",
        code="A.issuperset(range(B))",
        bug="A.issuperset(range(B - 1))",
    ),
    "shrink-without-a-shard": PlantedBug(
        "A sharded gang goes on with fewer ranks although a part of its state is lost.",
        function="restore_plan.ranks_needed",
        code="A if is_resharded(B, C, D) else E",
        bug="E",
    ),
    "forget-the-replica": PlantedBug(
        "The state of a lost node counts as lost although another node holds a copy.",
        function="_complete_versions",
        code="ranks.setdefault(A, B).add(C)",
        bug="shard.primary and ranks.setdefault(A, B).add(C)",
    ),
    "forget-what-can-be-rebuilt": PlantedBug(
        "A shard counts as lost although it can be rebuilt.",
        function="_choose_state",
        code="A.newest_left(B, C, with_rebuilt)",
        bug="A.newest_left(B, C)",
    ),
    "stop-without-what-can-be-rebuilt": PlantedBug(
        "A job that ends because a node is lost does not write what could be rebuilt.",
        function="unsaved_version",
        code="A.newest_left(B, C, D)",
        bug="A.newest_left(B, C)",
    ),
    "name-one-part": PlantedBug(
        "The plan names one of the nodes from which a lost shard is rebuilt, from which alone nothing can be rebuilt.",
        function="sources_to_start",
        code="(*others, *(A for A in rebuilt_from if B))",
        bug="others",
    ),
    "restore-what-replicas-disagree-on": PlantedBug(
        "A version on which replicas disagree is restored before a durable checkpoint, or without a warning.",
        function="newest_complete_version",
        code="A <= compared_after or B",
        bug="True",
    ),
    "mix-versions": PlantedBug(
        "Ranks restore their state from different steps.",
        function="choose_sources",
        code="A != version",
        bug="A > version",
    ),
    "stop-without-saving": PlantedBug(
        "A gang loses its last steps in a planned stop.",
        function="save_and_leave",
        code="phase in A",
        bug="False",
    ),
    "leave-without-a-spare": PlantedBug(
        "Ranks are asked to leave a node although no spare is ready.",
        function="planned_swap._leaving",
        code="wanted[:A] if wanted else []",
        bug="wanted",
    ),
    "blame-a-node-that-is-left-on-request": PlantedBug(
        "A node that a user wants to be left is taken out of service and drained.",
        function="leave_nodes",
        code="A is PRECURSOR",
        bug="A is not _Cause.STRAGGLER",
    ),
    "drain-for-ever": PlantedBug(
        "A drain that an operator requested stays in force after the node was resumed.",
        function="end_if_in_service",
        code="in_service",
        bug="seen.down",
    ),
    "resume-whatever-a-check-finds": PlantedBug(
        "A node is resumed although it has failed its check.",
        function="resuming.take_check",
        code="_has_passed(A)",
        bug="True",
    ),
    "resume-over-another-reason": PlantedBug(
        "A node is resumed although somebody has changed the reason of its drain.",
        function="owed_calls._resume",
        code="not is_same(A, B)",
        bug="not A",
    ),
    "leave-on-one-signal-for-ever": PlantedBug(
        "The ranks of each generation after a planned swap are asked to leave again.",
        function="state_updates._start_generation",
        code="swap = None",
        bug="pass",
    ),
    "take-a-planned-swap-for-the-end": PlantedBug(
        "The job counts as done when its ranks have exited for a planned swap.",
        function="running.supervise",
        code="whole and A is not None and have_ranks_stopped(B, C, D)",
        bug="False",
    ),
    "empty-the-pool": PlantedBug(
        "A gang takes more nodes of the shared pool than its job may.",
        function="shared_pool.await_nodes",
        code="A - len(pool_members())",
        bug="missing",
    ),
    "grow-from-nothing": PlantedBug(
        "A gang that grows wants shards of ranks that did not exist, and so loses all its steps.",
        function="restore_plan.ranks_needed",
        code="min(count, written)",
        bug="count",
    ),
    "stay-small": PlantedBug(
        "A gang trains on with fewer ranks although a spare is ready.",
        function="_plan_growth",
        code="len(after) <= len(before)",
        bug="len(after) >= len(before)",
    ),
    "keep-a-node-that-crashes-its-ranks": PlantedBug(
        "A gang that has grown onto a broken node fails, and does not go back to the nodes that it had before.",
        function="undone_growth.suspected",
        code="_unproven_growth(A, B)",
        bug="None",
    ),
    "undo-a-growth-that-was-not-the-last-change": PlantedBug(
        "A gang leaves nodes that it has had for long, because ranks crash after some other node has come.",
        function="_unproven_growth",
        code="action in A",
        bug="started.nodes_in",
    ),
    "give-way-to-a-repaired-node-without-need": PlantedBug(
        "A node of the job's own is left for a repaired one, and the node of the shared pool stays.",
        function="_seated_of_pool",
        code="[A for B in C if is_of_pool(D)]",
        bug="[A for B in C]",
    ),
    "flush-half": PlantedBug(
        "A durable checkpoint counts as soon as one node has written its part.",
        function="check_flush",
        code="not flush_pending",
        bug="index.flush_pending < index.flush_writers",
    ),
    "wait-for-a-lost-batch-process": PlantedBug(
        "A gang gathers although no process is left that would start its agents.",
        function="_launcher_lost",
        code="return A >= lost_at",
        bug="return False",
    ),
    "leave-a-held-job-held": PlantedBug(
        "A job that Slurm holds after a failed launch is not released.",
        function="release_after_failed_launch",
        code="not may",
        bug="may",
    ),
    "give-up-a-live-batch-process": PlantedBug(
        "A batch process that has been silent for a moment is given up.",
        function="_launcher_lost",
        code="max(batch_lost_at, A)",
        bug="max(heard_at or 0.0, since) + 1.0",
    ),
}
