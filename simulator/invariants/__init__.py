"""The invariants that Muster must keep, checked against the truth of the world at every event.

1. One generation can run, commit and publish: when a generation starts, the ranks of all before are dead.
2. No committed step is lost while its shards stand, none is mixed.
3. No fit node is taken on one witness's word; nobody is LOST while its gang makes progress, HUNG within 3 s.
4. Every gang ends or settles (`end_of_run`); nothing is owed for ever.
5. While many nodes are silent at once nobody is evicted before a minute has passed.
   A hang is found where there is one, and only there: all agents live, no step was made for as long as the job gives,
   the ranks are in no declared phase; and it is found in good time.
6. No more nodes are taken out of service than the site allows; in observe mode nothing is done.
7. A node keeps memory for gangs that come back, or may do so, ten minutes at most, and never beside another job.

And of the coordinator: nothing is done that the journal does not hold, what the journal holds is the durable state.
In every turn the rules of the core come to an end.

A rank whose agent or node is stopped can do nothing that counts; it must be gone soon after they go on.

    laws           what happens in the world, passed on to all of the others
    journal_first  the journal comes first
    generations    1
    versions       2
    verdicts       3: what nodes are called, and which are taken out
    hangs          3, 4, 5: generations that are ended for standing still
    seats          4: where a generation's ranks and its store are
    launchers      3, 4: whoever starts the agents
    ends           4: what a gang, and a run, may end with
    outages        5: many nodes at once
    site_limits    6
    kept_memory    7
    reach          who could see whom; `progress`: which steps the coordinator was told of
    violation      what a broken law raises
"""
