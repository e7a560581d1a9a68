"""`muster top`: a live screen for one job and for all jobs and nodes.

What is drawn is a pure function of what was received: `messages` and `known` hold that, `pages` and what it uses draw
it, `keys` moves the cursor. `feed` and `app` are the I/O: the coordinator or a recording, and the terminal.

May import: `daemon.host`, `launcher`, `launcher.output`.
"""
