"""How the training goes on this node: what its ranks say, put together for the status and for the node's series; how
much of the node is used, and how much room the logs of the ranks take.

The agent imports it, and `launcher.runs` its trackers.

May import: `checkpoint.format`, `checkpoint.store`, `daemon.host`, `daemon.host.process`.
"""
