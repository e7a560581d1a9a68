"""What is true in the simulated cluster, as opposed to what the core believes.

`reachability` records who could reach whom. `progress` records which steps the coordinator was told of.
`simulator/invariants` imports this room.

May import: `daemon.coordinator.core.state`, `simulator.environment`, `simulator.world`.
"""
