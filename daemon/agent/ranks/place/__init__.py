"""What a rank is told of its place: its GPU, the nearest network adapters, how far its groups reach, who runs where.

`muster.daemon.agent.ranks` alone imports this folder.

May import: `fabric.groups`, `fabric.model`.
"""
