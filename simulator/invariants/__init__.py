"""The invariants that Muster must keep, checked at every event against the truth of the simulated cluster.

1. One generation can run, commit and publish. When a generation starts, all ranks of earlier generations have ended. 2.
No committed step is lost while its shards exist, and no restored state mixes versions. 3. No healthy node is evicted on
the word of one witness. No node is called LOST while its gang makes progress, and none is called HUNG within 3 s. A
hang is found only if there is one. 4. Every gang ends or settles; no call is owed to Slurm for ever. A hang is found in
time. 5. While many nodes are silent at once, none is evicted for a minute. 6. No more nodes are taken out of service
than the site allows. In observe mode nothing is done to a node. 7. A node keeps memory only for a gang that may come
back, for ten minutes at most, and never beside another job. 8. A precursor costs no finished step, and moves ranks only
where a spare is ready. 9. No healthy node is named for corrupted data, and no state on which replicas disagree is
restored. 10. No generation starts on a node whose check has failed while a node that passed is there, and no node is
left out for a check that it did not fail. 11. Muster resumes only a node that it drained itself, and that has passed a
check since. 12. Only a slow rank is named a straggler. 13. Seats, holders and watched peers follow the network that the
coordinator has read. 14. The ledger of a gang adds up, and charges each loss with what has happened.
15. A gang that goes back because of its loss starts from a state of before, and reads no bad batch again.

Three more concern the coordinator: it does nothing that the journal does not hold, a replay of the journal gives the
durable state, and the core's rules come to an end in every turn.

    invariants            tells each event to the invariants that it concerns
    journal_first         the journal comes first
    generations           1
    versions              2 and 15
    node_health           3: verdicts on nodes, and evictions
    hangs_and_stragglers  3, 4 and 12: ranks that hang, and ranks that are slow
    batch_processes       3 and 4: the processes that start the agents
    seats                 4: the nodes of a generation, and its store; 13
    liveness              4: how a gang and a run end
    outages               5
    site_limits           6 and 7: what is taken from the site
    planned_swaps         8, with versions
    replicas              9
    node_checks           10 and 11
    goodput               14
    ground_truth          who could reach whom, and which progress was reported

A rank whose agent or node is stopped can do nothing that counts; it must have ended soon after the agent or node
resumes.

May import: `checkpoint.redundancy`, `daemon.coordinator.core`, `daemon.coordinator.core.detection`,
`daemon.coordinator.core.recovery`, `daemon.coordinator.core.state`, `daemon.coordinator.core.turn`,
`daemon.coordinator.goodput`, `daemon.coordinator.journal`, `daemon.coordinator.services`, `daemon.node.kept_memory`,
`fabric.model`, `simulator.coverage`, `simulator.environment`, `simulator.world`, `slurm.client`.
"""
