"""What a growth may bring that is not wanted: ranks that crash on the nodes that came, and nodes without ranks.

Imports `core.state` and `core.detection`. The rules of `core.recovery` import it.
"""
