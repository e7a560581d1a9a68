"""A folder for PYTHONPATH of users' programs. It holds a module that any interpreter from Python 3.9 on
imports, and what that needs to fork a launcher.

May import: `daemon.agent.ranks`.
"""
