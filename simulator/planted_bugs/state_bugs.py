"""Bugs in the state that the core decides on, and in the rules at its surface."""

from muster.simulator.planted_bugs.planting import PlantedBug

STATE_BUGS: dict[str, PlantedBug] = {
    "accept-a-stale-generation": PlantedBug(
        "A rank of an earlier generation counts as a rank of the current one.",
        function="AgentStatus.ranks_of",
        code="A == generation",
        bug="True",
    ),
    "leave-a-spare-waiting": PlantedBug(
        "An elastic job shrinks although a spare is there.",
        function="refill_seats",
        code="_take_spare(free, A, B, C)",
        bug="_take_spare([], A, B, C)",
    ),
    "tear-tensor-groups": PlantedBug(
        "Ranks get their nodes as if no groups of them communicated.",
        function="generation_start.next_seats",
        code="communicating_seats(A)",
        bug="()",
    ),
    "ignore-racks-and-power": PlantedBug(
        "Both copies of a shard are in one rack, or on one power feed, although other nodes are there.",
        function="communication.failure_domains_of",
        code="SPREAD",
        bug="SPREAD[-1:]",
    ),
    "forget-further-copies": PlantedBug(
        "A job that asks for three copies gets two.",
        function="redundancy_of",
        code="1 + more_holders",
        bug="1",
    ),
    "place-by-the-first-network": PlantedBug(
        "Ranks, holders and witnesses follow the network as it was when the gang first started.",
        function="_fabric_of_switches",
        code="(A := _topology_of(gang, B)) is not None",
        bug="(A := _topology_of(gang, B)) is not None and gang.roster.fabric is None",
    ),
    "detached-counts-as-fenced": PlantedBug(
        "Ranks count as ended when their agent is detached.",
        function="GangIndex.recount",
        code="attached and A >= B",
        bug="not attached or A >= B",
    ),
    "exit-before-the-requeue": PlantedBug(
        "A batch process exits before Slurm has the job back in its queue, so the job ends.",
        function="batch_may_end",
        code="A > restarts",
        bug="A >= restarts",
    ),
    "exit-with-the-requeue-flag": PlantedBug(
        "The batch process of a failed job exits before its requeue flag is cleared.",
        function="batch_may_end",
        code="A and not owes(B, C)",
        bug="A",
    ),
    "forget-the-progress": PlantedBug(
        "The fact that ends a gang does not say how far the gang had come.",
        function="Turn.record",
        code="A if progress == B else C",
        bug="A if progress else C",
    ),
    "forget-the-earlier-run": PlantedBug(
        "A job that goes on from an earlier run starts without its checkpoint.",
        function="state_updates._registered",
        code="A = path",
        bug='A = ""',
    ),
    "forget-owed-calls": PlantedBug(
        "A journal snapshot lacks the calls that are owed to Slurm.",
        function="DurableState.dump",
        code="A.dump_json(self, by_alias=True)",
        bug='A.dump_json(self, by_alias=True, exclude={"owed"})',
    ),
}
