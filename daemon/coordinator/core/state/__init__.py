"""What the core knows: events in, facts out, durable state, observed state, and the indexes of both.

Imports no other room of the core. `detection` and `recovery` read and change state through `turn` alone.
"""
