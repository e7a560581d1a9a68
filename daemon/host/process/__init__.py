"""How a process of Muster begins: which packages it imports, which signals it ignores, and the guard that outlives it.

It knows nothing of jobs. Programs, the launcher and the agent's folders import it.

May import: `daemon.host`.
"""
