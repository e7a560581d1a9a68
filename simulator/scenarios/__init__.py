"""Scripted runs of the simulated cluster without chance. `scenario` is the cluster, `script` reads and writes
transcripts.

Unit tests of the core and the transcripts of docs/scenarios use it.

May import: `daemon.coordinator.core`, `daemon.coordinator.core.state`, `daemon.coordinator.core.turn`,
`simulator.environment`, `simulator.invariants`, `simulator.world`.
"""
