"""Bugs in the coordinator around the core: the journal, event processing and orders."""

from muster.simulator.planted_bugs.planting import PlantedBug

COORDINATOR_BUGS: dict[str, PlantedBug] = {
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
}
