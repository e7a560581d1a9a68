"""The deterministic simulator: the real core, journal, orders and agents' rules in a world of virtual time and faults.

Real are the core, the journal, `process_event`, the `OrderDispatcher`, the agents' `reconcile.next_steps` and
`silence_rules.evaluate`, the checkpoint's `CommitTracker`, the watch on Slurm and the rules of the in-memory Slurm.
Played are processes, kernels, wires, the training itself and what an asyncio shell does in between.

    schedule    virtual time
    network     delays, losses, doubles, one-way cuts; streams as TCP gives them
    machine     one node: kernel, processes, its daemon
    agent       one agent; `memory` keeps its shards, `uneasy` its view of silence
    training    the ranks of one generation
    slurm       a Slurm that may be late, wrong or mute
    coordinator the shell around the core, with a crash at any line
    world       all of it together
    laws        the invariants, checked at every event
    moves       the edges and rungs that are taken; `tally` counts them
    faults      what can go wrong, with weights: `hardware_faults`, `process_faults`, `wire_faults`, `service_faults`
    seeds       one seed; `many` runs them in processes
    rehearsal   a script's front of the same world, without rng
    mutants     planted bugs that the laws must find

Everything random comes from the seed: one seed is one run.
"""
