"""Bugs in what runs on the nodes: agents, the shard store and node daemons."""

from muster.simulator.planted_bugs.planting import PlantedBug

AGENTS_BUGS: dict[str, PlantedBug] = {
    "never-fence-itself": PlantedBug(
        "An agent that hears no other host lets its ranks run on.",
        module="muster.daemon.agent.failure_detector.silence_rules",
        code="    if now - max(last_contacts.coordinator, suspicion_since) < SELF_FENCE_AFTER_S:",
        bug="    if now - max(last_contacts.coordinator, suspicion_since) < 1000 * SELF_FENCE_AFTER_S:",
    ),
    "commit-without-a-shard": PlantedBug(
        "A version is committed although one node has not stored it.",
        module="muster.checkpoint.store.commit.commit_tracker",
        code="        if stored.keys() != self.nodes:",
        bug="        if len(stored) < max(1, len(self.nodes) - 1):",
    ),
    "count-a-doubled-report-twice": PlantedBug(
        "A report that arrives twice counts for another node as well.",
        module="muster.checkpoint.store.commit.commit_tracker",
        code="        stored[node] = replicas",
        bug="        stored[min(self.nodes - stored.keys(), default=node) if node in stored else node] = replicas",
    ),
    "commit-what-replicas-disagree-on": PlantedBug(
        "A version is committed although its replicas disagree.",
        module="muster.checkpoint.store.commit.commit_tracker",
        code="        disagreement = self.agreement.judge(",
        bug="        disagreement = None and self.agreement.judge(",
    ),
    "keep-memory-beside-a-job": PlantedBug(
        "A job starts on a node that keeps the memory of another job.",
        module="muster.daemon.node.kept_memory.retention",
        code="self.kept.owner != owner else None",
        bug="self.kept.owner.job > owner.job else None",
    ),
}
