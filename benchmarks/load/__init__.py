"""The processes of a measurement: a coordinator or an agent that is measured, and nodes, gangs, watchers and callers.

`site_processes` starts them, and says what they cost.
"""
