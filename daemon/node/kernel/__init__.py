"""The kernel log: opening and following it, its records, and the errors that its messages tell of.

It judges nothing. A record is believed only if the kernel wrote it, and only from its first character on. `sensors`
imports it, and so does what reads a log that was saved.

May import: `daemon.host`.
"""
