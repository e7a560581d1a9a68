"""Bugs in the coordinator around the core: the journal, event processing and orders."""

from muster.simulator.planted_bugs.planting import PlantedBug

_ROOM = "muster.daemon.coordinator"

COORDINATOR_BUGS: dict[str, PlantedBug] = {
    "act-before-journaling": PlantedBug(
        "Orders are sent before the journal holds the facts that they follow from.",
        module=f"{_ROOM}.shell.event_processing",
        code="        records = journal.append(outcome.facts, now, cause(event))\n",
        bug=(
            "        executor.send_orders(outcome.facts)\n"
            "        records = journal.append(outcome.facts, now, cause(event))\n"
        ),
    ),
    "forget-removed-nodes": PlantedBug(
        "A restarted coordinator treats removed nodes as spares.",
        module=f"{_ROOM}.journal.journal",
        code="                replay_record(state, Record(*row), position, crc)",
        bug="                replay_record(state, Record(*row), position, crc) if row[4] != 'MemberOut' else None",
    ),
    "snapshot-too-far": PlantedBug(
        "A journal snapshot claims a fact that it does not hold.",
        module=f"{_ROOM}.journal.journal",
        code="        row = (self.position, text, _crc(self.position, text))",
        bug="        row = (self.position + 1, text, _crc(self.position + 1, text))",
    ),
    "show-what-a-restart-forgets": PlantedBug(
        "After the end of its ranks, a gang shows progress that was reported later, which a restart forgets.",
        module=f"{_ROOM}.services.views",
        code="    return progress_of(gang, seen) if gang.phase in (Phase.STARTING, Phase.RUNNING) else gang.progress",
        bug="    return progress_of(gang, seen)",
    ),
    "keep-memory-after-the-end": PlantedBug(
        "A gang that is over leaves its memory on its nodes.",
        module=f"{_ROOM}.shell.orders",
        code="            _set_exit(order, gang.exit_code, gang.reason)",
        bug="            _set_exit(order, gang.exit_code, gang.reason)\n            order.requeued = True",
    ),
}
