"""Bugs in what runs on the nodes: agents, the shard store and node daemons."""

from muster.simulator.planted_bugs.planting import PlantedBug

AGENTS_BUGS: dict[str, PlantedBug] = {
    "never-fence-itself": PlantedBug(
        "An agent that hears no other host lets its ranks run on.",
        function="_self_fence_reason",
        code="A - max(B, C) < SELF_FENCE_AFTER_S",
        bug="A - max(B, C) < 1000 * SELF_FENCE_AFTER_S",
    ),
    "commit-without-a-shard": PlantedBug(
        "A version is committed although one node has not stored it.",
        function="CommitTracker.record_stored",
        code="stored.keys() != A",
        bug="len(stored) < max(1, len(A) - 1)",
    ),
    "count-a-doubled-report-twice": PlantedBug(
        "A report that arrives twice counts for another node as well.",
        function="CommitTracker.record_stored",
        code="stored[node] = replicas",
        bug="stored[min(self.nodes - stored.keys(), default=node) if node in stored else node] = replicas",
    ),
    "commit-what-replicas-disagree-on": PlantedBug(
        "A version is committed although its replicas disagree.",
        function="CommitTracker.record_stored",
        code="judge(A)",
        bug="None",
    ),
    "keep-memory-beside-a-job": PlantedBug(
        "A job starts on a node that keeps the memory of another job.",
        function="Retention.job_starts",
        code="A != owner",
        bug="A.job > owner.job",
    ),
}
