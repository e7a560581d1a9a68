"""The memory checkpoints of one node, inside `muster-agent`: one service above six rooms.

`checkpoint_service` serves the ranks and the other agents, `rank_sockets` speaks to ranks. Never imports torch.
The agent imports it.
"""
