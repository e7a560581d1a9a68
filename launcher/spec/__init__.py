"""job.toml: its model, its checks, and its error messages.

Pure. `commands` and `submission` import this folder.
"""
