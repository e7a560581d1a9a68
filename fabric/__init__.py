"""What the network of a cluster is like: topology, costs of communication, placement.

A pure library: no I/O, no clock. It imports nothing of Muster, and both the launcher and the coordinator's core may
import it. Subfolders: `model` (the fabric itself), `sources` (where a fabric comes from), `cost` (what communication
costs), `groups` (which ranks communicate), `placement` (which rank runs where).

May import: nothing.
"""
