"""Bugs in the state that the core decides on, and in the rules at its surface."""

from muster.simulator.planted_bugs.planting import PlantedBug

_ROOM = "muster.daemon.coordinator.core"

STATE_BUGS: dict[str, PlantedBug] = {
    "accept-a-stale-generation": PlantedBug(
        "A rank of an earlier generation counts as a rank of the current one.",
        module=f"{_ROOM}.state.gang_index",
        code="    return [rank for rank in ranks if rank.generation == generation]",
        bug="    return list(ranks)",
    ),
    "leave-a-spare-waiting": PlantedBug(
        "An elastic job shrinks although a spare is there.",
        module=f"{_ROOM}.state.placement",
        code="_take_spare(free, fabric, node, last_choices)",
        bug="_take_spare(free[:0], fabric, node, last_choices)",
    ),
    "tear-tensor-groups": PlantedBug(
        "Ranks get their nodes as if no groups of them communicated.",
        module=f"{_ROOM}.recovery.transitions",
        code="    groups = communicating_seats(gang.spec)\n    if not gang.seats:",
        bug="    groups = ()\n    if not gang.seats:",
    ),
    "ignore-racks-and-power": PlantedBug(
        "Both copies of a shard are in one rack, or on one power feed, although other nodes are there.",
        module="muster.fabric.placement.failure_domains",
        code="SPREAD = (FailureDomain.POWER, FailureDomain.RACK, FailureDomain.LEAF)",
        bug="SPREAD = (FailureDomain.LEAF,)",
    ),
    "forget-further-copies": PlantedBug(
        "A job that asks for three copies gets two.",
        module=f"{_ROOM}.state.placement",
        code="among[node], 1 + more_copies) or",
        bug="among[node], 1) or",
    ),
    "place-by-the-first-network": PlantedBug(
        "Ranks, buddies and witnesses follow the network as it was when the gang first started.",
        module=f"{_ROOM}.state.communication",
        code="    if (site := _topology_of(gang, observed)) is not None:\n        return site",
        bug="    if (site := _topology_of(gang, observed)) is not None and gang.fabric is None:\n        return site",
    ),
    "detached-counts-as-fenced": PlantedBug(
        "Ranks count as ended when their agent is detached.",
        module=f"{_ROOM}.state.gang_index",
        code="expected and not (attached and status.fenced_generation >= gang.fenced_generation))",
        bug="expected and attached and status.fenced_generation < gang.fenced_generation)",
    ),
    "exit-before-the-requeue": PlantedBug(
        "A batch process exits before Slurm has the job back in its queue, so the job ends.",
        module=f"{_ROOM}.core",
        code="seen.job_restarts > restarts and",
        bug="seen.job_restarts >= restarts and",
    ),
    "exit-with-the-requeue-flag": PlantedBug(
        "The batch process of a failed job exits before its requeue flag is cleared.",
        module=f"{_ROOM}.core",
        code="        return gang.final and not any(",
        bug="        return gang.final or any(",
    ),
    "forget-the-progress": PlantedBug(
        "The fact that ends a gang does not say how far the gang had come.",
        module=f"{_ROOM}.state.turn",
        code="            fact = fact if progress == gang.progress else replace(fact, progress=progress)",
        bug="            fact = fact if progress else replace(fact, progress=progress)",
    ),
    "forget-the-earlier-run": PlantedBug(
        "A job that goes on from an earlier run starts without its checkpoint.",
        module="muster.daemon.coordinator.core.state.state_updates",
        code="        gang.durable_path, gang.durable_version = path, Version(",
        bug='        gang.durable_path, gang.durable_version = "", Version(',
    ),
    "forget-owed-calls": PlantedBug(
        "A journal snapshot lacks the calls that are owed to Slurm.",
        module=f"{_ROOM}.state.durable_state",
        code="        return _STORED_STATE.dump_json(self, by_alias=True).decode()",
        bug='        return _STORED_STATE.dump_json(self, by_alias=True, exclude={"owed"}).decode()',
    ),
}
