"""What a run has gone through: transitions of the state tables, kinds of recovery, faults and events.

It knows the core's facts and states, and nothing of the simulated cluster. The rest of the simulator imports it.

May import: `daemon.coordinator.core.state`.
"""
