"""The deterministic simulator: the real core, journal, orders and agents' rules, in virtual time and among faults.

These parts are the real code: the core, the journal, `process_event`, the OrderDispatcher, the agents'
`reconcile.next_steps` and `silence_rules.evaluate`, the checkpoint's CommitTracker, the SlurmWatch and the rules of the
in-memory Slurm. These parts are simulated: processes, kernels, the network, the training, and the asyncio code around
the core.

    environment   virtual time, durations, nodes and processes, the network, an unreliable Slurm
    world         agents, node daemons, Slurm jobs, training, and the coordinator's shell with a crash at any line
    faults        what can go wrong, with weights
    ground_truth  who could reach whom, and which progress was reported
    invariants    what must hold at every event
    coverage      which transitions, kinds of recovery, faults and events occurred
    scenarios     scripted runs without chance
    planted_bugs  deliberate bugs that the invariants must find
    seeds         one seed; `parallel` runs many seeds in processes

Every random number follows from the seed: the same seed gives the same run. No other package imports the simulator.

May import: `daemon.coordinator.core.state`, `daemon.host`, `simulator.coverage`, `simulator.environment`,
`simulator.faults`, `simulator.invariants`, `simulator.world`, `slurm.client`.
"""
