"""Goodput: to what each second of an allocated node went, from the facts of a gang (docs/GOODPUT.md).

Pure: whoever has facts with their times gets the account, from a running coordinator or from a journal alone.

May import: `checkpoint.format`, `daemon.coordinator.core.state`, `daemon.coordinator.core.turn`.
"""
