"""Credentials of users that a test chooses.

No program imports it, and no setting of a site selects it.

May import: `daemon.transport`.
"""
