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
    "forget-owed-calls": PlantedBug(
        "A journal snapshot lacks the calls that are owed to Slurm.",
        module=f"{_ROOM}.state.durable_state",
        code="        return _STORED_STATE.dump_json(self, by_alias=True).decode()",
        bug='        return _STORED_STATE.dump_json(self, by_alias=True, exclude={"owed"}).decode()',
    ),
}
