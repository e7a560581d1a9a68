"""The deterministic simulator: the real core, journal, orders and agents' rules, in virtual time and among faults.

These parts are the real code: the core, the journal, `process_event`, the OrderDispatcher, the agents'
`reconcile.next_steps` and `silence_rules.evaluate`, the checkpoint's CommitTracker, the SlurmWatch and the rules of the
in-memory Slurm. These parts are simulated: processes, kernels, the network, the training, and the asyncio code around
the core.

    environment   virtual time, durations, nodes and processes, the network, an unreliable Slurm
    world         agents, node daemons, Slurm jobs, training, and the coordinator's shell with a crash at any line
    faults        what can go wrong, with weights
    invariants    what must hold at every event, checked against the truth of the simulated cluster
    coverage      which transitions, kinds of recovery, faults and events occurred
    planted_bugs  deliberate bugs that the invariants must find
    seeds         one seed; `parallel` runs many seeds in processes
    scenario      a scripted run without chance; `script` reads and writes transcripts (docs/scenarios)

Every random number follows from the seed: the same seed gives the same run. No other package imports the simulator.

May import: `daemon.coordinator.core`, `daemon.coordinator.core.losses`, `daemon.coordinator.core.state`, `daemon.host`,
`simulator.coverage`, `simulator.environment`, `simulator.faults`, `simulator.invariants`, `simulator.world`,
`slurm.client`.
"""
