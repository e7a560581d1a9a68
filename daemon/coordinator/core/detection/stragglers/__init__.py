"""From step times to stragglers: the evidence that a rank is slow, and one finding for each node.

Imports `core.state`. `core.recovery` imports it.
"""
