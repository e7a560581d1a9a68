"""All planted bugs by name.

Those of the core are in `detection_bugs`, `recovery_bugs` and `state_bugs`, those of what runs around it are here.
"""

from muster.simulator.planted_bugs.detection_bugs import DETECTION_BUGS
from muster.simulator.planted_bugs.planting import PlantedBug
from muster.simulator.planted_bugs.recovery_bugs import RECOVERY_BUGS
from muster.simulator.planted_bugs.state_bugs import STATE_BUGS

PLANTED_BUGS: dict[str, PlantedBug] = {
    **DETECTION_BUGS,
    **RECOVERY_BUGS,
    **STATE_BUGS,
    # the coordinator around the core: journal, event processing, orders
    "act-before-journaling": PlantedBug(
        "Orders are sent before the journal holds the facts that they follow from.",
        function="process_event",
        code="records = A.append(B, C, D)",
        bug="executor.send_orders(B)\nrecords = A.append(B, C, D)",
    ),
    "forget-removed-nodes": PlantedBug(
        "A restarted coordinator treats removed nodes as spares.",
        function="Journal._replay",
        code="replay_record(A, B, C, D)",
        bug='row[4] != "MemberOut" and replay_record(A, B, C, D)',
    ),
    "snapshot-too-far": PlantedBug(
        "A journal snapshot claims a fact that it does not hold.",
        function="Journal._write_snapshot",
        code="(A, text, _crc(A, text))",
        bug="(A + 1, text, _crc(A + 1, text))",
    ),
    "show-what-a-restart-forgets": PlantedBug(
        "After the end of its ranks, a gang shows progress that was reported later, which a restart forgets.",
        function="views._progress",
        code="A if B in C else D",
        bug="A",
    ),
    "keep-memory-after-the-end": PlantedBug(
        "A gang that is over leaves its memory on its nodes.",
        function="Orders._build",
        code="_set_exit(order, A.exit_code, B)",
        bug="_set_exit(order, A.exit_code, B)\norder.requeued = True",
    ),
    "lose-steps-for-nothing": PlantedBug(
        "Steps that are done again count as useful.",
        function="generation_account.after",
        code="A > step",
        bug="False",
    ),
    "charge-whoever-crashed": PlantedBug(
        "The loss of a hang is charged with a node.",
        function="FaultFinder._of_fence",
        code="known.words in A",
        bug="False",
    ),
    "hold-a-node-twice": PlantedBug(
        "A node that carries ranks counts as a spare as well.",
        function="HeldNodes.roles",
        code="held - carrying - A",
        bug="held - A",
    ),
    # what runs on the nodes: agents, the shard store, node daemons
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
