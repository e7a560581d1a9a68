"""`muster plan`: from job.toml to an estimate, and the estimate as a screen or as JSON.

What job.toml does not say is taken from defaults, and each default is named. `launcher/commands` imports this room.
"""
