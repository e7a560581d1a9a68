"""`muster runs`: the record of each run, what differs between two of them, and their numbers in other tools' forms.

`muster submit` writes a record as a small file, which costs it no wait. `muster runs` takes the files into an SQLite
store, and adds how the runs went.

May import: `daemon.agent.batch`, `daemon.agent.training`, `daemon.host`, `launcher`, `launcher.submission`.
"""
