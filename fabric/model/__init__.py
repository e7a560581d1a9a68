"""The fabric of a cluster: nodes, links, a tree of network domains, failure domains.

Immutable data and questions about it, without I/O. All other folders of `fabric` import this one. It imports none.

May import: nothing.
"""
