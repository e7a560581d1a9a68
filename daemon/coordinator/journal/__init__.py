"""The journal: every fact that the core decided, on disk before anything is done about it.

Imports `core.state`. `shell`, `services` and `leadership` import it.
"""
