"""The journal: every fact that the core decided. A fact is on disk before the coordinator acts on it.

Imports `core.state`. `shell`, `services` and `leadership` import it.
"""
