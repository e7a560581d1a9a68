"""What a node's daemon says of its hardware, for those who read it: agents and the coordinator.

The daemon makes the message `Hardware`. This room asks for it and turns it into what `muster.fabric` works with.

May import: `daemon.host`, `fabric.model`, `fabric.sources`.
"""
