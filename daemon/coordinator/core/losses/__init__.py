"""What the losses of a gang show, and what the site and the job want then. Without states.

`core.state` keeps it, and `core.recovery.losses` acts on it.

May import: nothing.
"""
