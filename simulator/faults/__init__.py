"""What can go wrong in the simulated cluster.

A fault is a function of the world and a gang. `injection` has the weight of every fault and arms faults for phases, the
other modules have the faults: `hardware_faults`, `process_faults`, `network_faults`, `service_faults`. A fault that can
heal schedules its own end. `simulator/seeds.py` imports this room.

May import: `daemon.coordinator.core.state`, `simulator.environment`, `simulator.world`.
"""
