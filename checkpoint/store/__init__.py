"""The memory checkpoints of one node, inside `muster-agent`: one service above four rooms.

`checkpoint_service` serves the ranks and the other agents, `recall` gives a starting rank its state, `rank_sockets`
speaks to ranks. Never imports torch. The agent imports it.
"""
