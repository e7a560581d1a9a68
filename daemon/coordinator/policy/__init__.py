"""The table from hardware signals to verdicts, and a site's own file merged over it.

Imports `core.state`. `services` and `server` import it.
"""
